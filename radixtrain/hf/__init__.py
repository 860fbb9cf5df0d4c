"""Hugging Face models on unique tokens: how a model is shared, what its layers call, and what is refused."""
