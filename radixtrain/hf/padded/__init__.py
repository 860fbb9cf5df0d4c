"""Ordinary padded batches on their unique tokens: the ordinary kind of batch of a shared model."""
