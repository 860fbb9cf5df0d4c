"""Layers with a recurrent state on unique tokens: their state forks where the tree does."""
