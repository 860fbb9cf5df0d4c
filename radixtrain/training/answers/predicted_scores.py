"""The scores of `predict`: of each sequence of a step, in the order of the file, whichever rank has computed them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from radixtrain.collators.steps import Step
from radixtrain.data.tokens.next_tokens import next_token_ids
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.hf.scores import Scorer, named_scores

__all__ = ["scored_records", "scorer_of"]


def scorer_of(settings: Any) -> Scorer:
    """What computes the scores. settings: of a `RadixModule`. Reads the tokenizer if words are scored.

    Raises UserError if a word is not one token.
    """
    words = settings.next_tokens
    ids = next_token_ids(load_tokenizer(settings.model_name_or_path), words) if words else {}
    return Scorer(named_scores(settings.scores), ids, settings.normalize_embeddings)


def scored_records(scorer: Scorer, model: nn.Module, step: Step, plain_head: bool) -> list[dict[str, Any]]:
    """For each sequence its file row, or None, and its scores: the whole step, on every rank.

    Afterwards `step.num_computed_tokens` counts the rows of all ranks.
    """
    here = ranks()
    found = [each for part in here.gather(list(_scored(scorer, model, step, plain_head))) for each in part]
    (step.num_computed_tokens,) = here.total(step.num_computed_tokens)
    rows = step.where or (None,) * len(found)
    return [{"row": rows[member], **scores} for member, scores in sorted(found, key=lambda pair: pair[0])]


def _scored(scorer: Scorer, model: nn.Module, step: Step, plain_head: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Place and scores of each sequence of this rank. A micro-batch of weight zero is computed, and has none."""
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        scores = scorer(model, batch, plain_head)
        if members:
            yield from zip(members, scores, strict=True)
