"""Everything that knows transformers: how a model is prepared, what its layers call, and what is refused."""
