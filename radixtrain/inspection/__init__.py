"""What training sees, for a person to check: a micro-batch, a sample, one row of a file through every stage."""
