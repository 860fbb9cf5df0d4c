"""Files to rows: what is read, and how each kind of file is read."""
