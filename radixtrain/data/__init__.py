"""Rows of chat files -> token sequences with labels -> optimizer steps."""
