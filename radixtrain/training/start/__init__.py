"""Prepares the first step: loads the model, fails early, and prints an overview of the run."""
