"""Ordinary padded batches on their unique tokens: what `share_prefixes` adds to a prepared model."""
