"""The prefix plan of a batch, its layout as tensors, and what a plan costs."""
