"""Images in a batch: as tokens, and the tower that computes each distinct one once."""
