"""What decides whether a model is shared: a probe of the model itself, and rules for what no probe sees."""
