"""Datasets from text files, folders and JSONL."""
