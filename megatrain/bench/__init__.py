"""Whole steps, measured: this library's, and those of what else trains the same shape, each in a process of its own."""
