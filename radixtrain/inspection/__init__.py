"""Shows a person what training sees: a micro-batch, a sample, one row of a file through every stage."""
