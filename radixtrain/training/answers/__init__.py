"""What the model says of rows: answers, what judges them, and where they go; for `predict` also scores of the rows."""
