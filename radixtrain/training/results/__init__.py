"""What a run leaves: the best and the last weights, why it ended, a summary, a picture, a model card."""
