"""The meaning of a row: the columns of any format, as one of four standard forms."""
