"""Training under Lightning."""
