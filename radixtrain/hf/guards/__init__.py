"""What decides whether a model is shared: a trial of the model itself, and rules for what no trial shows."""
