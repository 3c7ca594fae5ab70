"""Runs a model's own forward with layers streamed through the device."""
