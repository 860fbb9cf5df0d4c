"""Three sequences that share a beginning, with labels on shared tokens and several at a branch."""

__all__ = ["FEATURES"]

FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [-100, 8, 9, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]},
    {"input_ids": [7, 8, 5, 6, 4, 4], "labels": [-100, -100, 5, -100, 4, 4]},
]
