"""Writes models that plain transformers loads."""
