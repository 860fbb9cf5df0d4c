"""Hugging Face models on unique tokens: how a model is prepared, what its layers call, and what is refused."""
