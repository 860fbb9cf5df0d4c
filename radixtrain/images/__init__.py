"""Images in a batch: as tensors, as tokens, and the tower that computes each distinct one once."""
