"""Files to rows: which files are read, and how each kind is read."""
