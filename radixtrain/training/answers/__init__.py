"""Answers that a model generates, the metrics that judge them, and the records of `predict`."""
