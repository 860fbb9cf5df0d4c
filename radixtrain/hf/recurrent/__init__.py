"""Layers with a recurrent state on unique tokens: their state forks at branches of the tree."""
