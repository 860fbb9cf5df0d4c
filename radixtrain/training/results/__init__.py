"""What a run leaves: the best and the last weights, a summary, a picture, a model card."""
