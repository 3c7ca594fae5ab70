"""Pure arithmetic: where everything lives and what it costs."""
