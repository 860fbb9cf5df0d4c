"""What training sees, as a person would check it: a micro-batch, a sample, one row of a file through every stage."""
