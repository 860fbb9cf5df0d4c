"""What a run leaves: the best and the last weights, predictions, a summary, a picture, a model card."""
