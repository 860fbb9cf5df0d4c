"""What a checkpoint says of the data: a run goes on only in the steps that it began with."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from radixtrain.data.tokenized.corpus import Corpus
from radixtrain.errors import UserError

__all__ = ["check_state", "checksum", "state_of"]


def state_of(settings: Any, corpus: Corpus | None) -> dict[str, Any]:
    """What the order of the steps depends on, and a digest of the samples.

    settings: of an `SFTData`. corpus: of training; None before it is read.
    """
    sizes: dict[str, Any] = {name: int(settings[name]) for name in ("batch_size", "seed", "shuffle_dataset")}
    sizes["group_by_prefix"] = str(settings.group_by_prefix).lower()  # true is not 1
    if corpus is None:
        return {"conversations": 0, **sizes, "digest": ""}
    return {"conversations": len(corpus), **sizes, "digest": corpus.digest}


def check_state(state: Mapping[str, Any], settings: Any, corpus: Corpus) -> None:
    """UserError if the state is not that of these data: its place in their order would mean nothing here."""
    here = state_of(settings, corpus)
    state = {"group_by_prefix": "false", **state}  # checkpoints of version 0.1.0 and older do not say it
    if "rows" in state:  # checkpoints of version 0.1.0 and older have a checksum of the tokens
        here = {**here, "rows": checksum(corpus)}
        del here["digest"]
    changed = [f"{name} was {state.get(name)} and is {here[name]}" for name in here if state.get(name) != here[name]]
    if changed:
        raise UserError(
            f"ckpt_path: the checkpoint belongs to other steps: {', '.join(changed)}; give the data settings of the run"
        )


def checksum(corpus: Corpus) -> int:
    """CRC-32 of all tokens."""
    found = 0
    for sample in (sample for samples in corpus for sample in samples):
        found = zlib.crc32(sample.input_ids.tobytes(), found)
    return found
