"""Before the first step: load the model, fail early, and print an overview of the run."""
