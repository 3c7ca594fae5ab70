"""What the model is: its streamed layers and their flat layout."""
