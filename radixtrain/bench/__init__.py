"""Measures a training step on an ordinary batch and on unique tokens, alternating."""
