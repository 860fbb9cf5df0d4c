"""One micro-batch of a training run, with the sequences that are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from radixtrain.collators.steps import Step
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.grouping import whole_chats
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import features_of
from radixtrain.errors import UserError
from radixtrain.tree.radix_inputs import layout_of, radix_of


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What the model receives at once, and where it comes from.

    place: which part of which optimizer step of the first epoch, counted from 0, as a person reads it.
    samples: its sequences, in the order of `cu_seqlens`.
    batch: as `RadixCollator` makes it for radixtrain's own loss.
    num_step_labels: labelled tokens of the whole step, by which its loss is divided.
    num_whole_tokens: of its chats, each up to the end of its last turn here; T if none is split into its turns.
    """

    place: str
    samples: Sequence[TokenRow]
    batch: dict[str, Any]
    num_step_labels: int
    num_whole_tokens: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(layout_of(self.batch).inverse_indices.numel())

    @property
    def num_padding(self) -> int:
        return int(self.batch["input_ids"].numel()) - self.num_unique_tokens

    @property
    def num_unique_tokens(self) -> int:
        """U, without padding."""
        return int(torch.unique(layout_of(self.batch).inverse_indices).numel())

    @property
    def num_labels(self) -> int:
        """Labelled tokens, each counted once for every sequence that learns it."""
        radix = radix_of(self.batch)
        return int(radix.loss_weights.sum()) if radix.label_indices is None else len(radix.loss_weights)


def micro_batches(data: StepData, step: int) -> list[MicroBatch]:
    """All micro-batches of an optimizer step of the first epoch, as training collates them.

    data: after its `setup("inspect")`.
    step: from 0.

    Raises UserError if there is no such step, and with `dedup: false`, whose batches share nothing.
    """
    if not data.settings.dedup:
        raise UserError("inspect shows what a batch shares, and with dedup: false nothing is; leave it out")
    steps = data.train_steps()
    if not 0 <= step < len(steps):
        raise UserError(f"step: an epoch has the steps 0 to {len(steps) - 1}, got {step}")
    conversations = [data.conversations["train"][index] for index in steps[step]]
    samples = [sample for conversation in conversations for sample in conversation]
    chat_of = [chat for chat, conversation in enumerate(conversations) for _ in conversation]
    collated: Step = data.step_collator()(features_of(samples))
    parts = zip(collated.members, collated.micro_batches, strict=True)
    return [
        MicroBatch(
            place=f"step {step} of {len(steps)}, micro-batch {index} of {len(collated.members)}",
            samples=[samples[member] for member in members],
            batch=batch,
            num_step_labels=collated.num_labels,
            num_whole_tokens=sum(
                length
                for _, turns in groupby(sorted(members), chat_of.__getitem__)
                for length, _ in whole_chats([samples[turn] for turn in turns])
            ),
        )
        for index, (members, batch) in enumerate(parts)
    ]
