"""Prepares the first step: loads the model, and prints an overview of the run."""
