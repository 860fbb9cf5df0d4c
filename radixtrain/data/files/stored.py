"""Data sets of the `datasets` library: a folder of `save_to_disk`, or a name on the Hugging Face hub."""

from __future__ import annotations

import os
from typing import Any

from radixtrain.errors import UserError, first_line

__all__ = ["hub_dataset", "saved_dataset"]


def saved_dataset(path: str, split: str | None) -> tuple[str, Any]:
    """A data set that `save_to_disk` wrote, and the path that its rows are named after.

    split: one of a folder with several.

    Raises UserError if it cannot be read, holds several splits and none is named, or lacks the one that is.
    """
    import datasets

    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:
        raise UserError(
            f"{path}: not a data set folder ({first_line(error)}); expected one written by datasets' save_to_disk, "
            "or the path of a file"
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        if split is not None:
            raise UserError(f"{path}: holds one data set without splits; remove split: {split}")
        return path, dataset
    if split is not None and split in dataset:
        return os.path.join(path, split), dataset[split]
    if split is not None:
        raise UserError(f"{path}: has no split {split!r}; it has {', '.join(map(str, dataset))}")
    if len(dataset) == 1:
        [(name, only)] = dataset.items()
        return os.path.join(path, str(name)), only
    splits = ", ".join(os.path.join(path, str(name)) for name in dataset)
    raise UserError(f"{path}: holds several splits; name one of them: {splits}")


def hub_dataset(name: str, subset: str | None, split: str | None) -> Any:
    """A data set of the hub, from the local cache if it is there.

    Raises UserError if it cannot be loaded, or has several splits and none is named.
    """
    import datasets

    try:
        dataset = datasets.load_dataset(name, subset, split=split, trust_remote_code=False)
    except Exception as error:  # no network, no such name, a missing subset, a script that is no longer run
        reason = f"no such file or folder, and not loaded from the Hugging Face hub: {first_line(error)}"
        raise UserError(f"{name}: {reason}") from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if len(dataset) == 1:
        return next(iter(dataset.values()))
    splits = ", ".join(map(str, dataset))
    raise UserError(f"{name}: has the splits {splits}; name one, as in {{path: {name}, split: {next(iter(dataset))}}}")
