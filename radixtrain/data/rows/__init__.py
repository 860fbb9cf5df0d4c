"""What a row means: the columns of any format, as one of four standard forms."""
