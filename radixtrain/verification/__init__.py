"""Is the gradient the ordinary one? The float64 oracle, the bars that errors must stay under, and the report."""
