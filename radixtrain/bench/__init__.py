"""A training step, measured: ordinary and on unique tokens, in turns."""
