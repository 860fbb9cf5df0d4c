"""Tokenised rows on disk: encoded once, in parallel, and memory-mapped from then on."""
