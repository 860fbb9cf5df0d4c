"""Tokenised rows on disk: encoded once, in parallel, then memory-mapped."""
