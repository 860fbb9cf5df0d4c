"""Prompts -> the model's answers: by generation on a radix cache, or in the ordinary arm on padded rows.

With several ranks each answers a share of the prompts, and all get all answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from radixtrain.data.prompts import Prompt
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache
from radixtrain.generation.generate import Generated, generate
from radixtrain.generation.options import resolve_config
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.cached_pass import on_stored_rows
from radixtrain.hf.dropout import evaluating
from radixtrain.training.answers.answer_options import AnswerOptions
from radixtrain.training.answers.padded_answers import AnswerRow, answers_of_padded_rows
from radixtrain.tree.arrays import cumulative
from radixtrain.tree.sorting import sort_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Answer", "Answers", "answer_prompts", "check_answering"]

ORDINARY_BATCH = 32  # prompts at once of Hugging Face's `generate`, if `batch_size` does not say it


@dataclass(frozen=True)
class Answer:
    """text: without special tokens. token_ids: with the token that ended it. logprob: of all of them, under the model.

    finish_reason: `stop`, at an end token or a stop string, or `length`.
    """

    text: str
    token_ids: list[int]
    logprob: float
    finish_reason: str

    def record(self) -> dict[str, Any]:
        """What `predict` writes."""
        counts = {"num_tokens": len(self.token_ids), "logprob": self.logprob}
        return {"answer": self.text, **counts, "finish_reason": self.finish_reason}


@dataclass(frozen=True)
class Answers:
    """Of prompts, in their order. num_prompt_tokens: of all prompts. num_computed_tokens: rows computed for them.

    seconds: of the rank that took longest.
    """

    answers: list[Answer]
    num_prompt_tokens: int
    num_computed_tokens: int
    seconds: float


def check_answering(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: AnswerOptions, dedup: bool
) -> None:
    """UserError if the model or an option is not supported. Nothing is computed.

    With `dedup: false` Hugging Face's `generate` refuses what it cannot do when it is called.
    """
    fields = options.fields(tokenizer, model, prompts)
    if not dedup:
        return
    longest = max(len(prompt.token_ids) for prompt in prompts) + options.max_new_tokens
    try:
        resolve_config(model, None, **fields)
        with on_stored_rows(model, parts_of(model), "auto", longest):
            pass
    except UserError as error:
        reason = re.sub("(use|call) model.generate", "set dedup: false", str(error))
        raise UserError(f"evaluate_generation: {reason}") from None


def answer_prompts(
    model: Any,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    options: AnswerOptions,
    dedup: bool,
    logprobs: bool = False,
    cache: RadixCache | None = None,
) -> Answers:
    """One answer for each prompt. With several ranks, each calls this with all prompts.

    model: is in evaluation mode meanwhile, and every module has its own mode afterwards.
    dedup: False for Hugging Face's `generate`, on rows that are padded on the left.
    logprobs: whether the ordinary arm computes them, which costs the memory of all logits; otherwise they are 0.
    cache: for prompts that come in several calls and share a beginning.

    The global random generators are not touched. Raises UserError if the model or an option is not supported.
    """
    fields = options.fields(tokenizer, model, prompts)
    start = time.perf_counter()
    here = ranks()
    shares = _shares(prompts, here.size)
    mine, seed = [prompts[place] for place in shares[here.rank]], options.seed + here.rank
    with torch.no_grad(), isolate_rng(), evaluating(model):
        if dedup:
            given: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": options.batch_size, "seed": seed}
            given["cache"] = cache
            found = generate(model, [prompt.token_ids.tolist() for prompt in mine], **given, **fields)
            rows, num_computed = _rows_of(found), found.stats.num_computed_tokens
        else:
            torch.manual_seed(seed)
            size = options.batch_size or ORDINARY_BATCH
            rows, num_computed = answers_of_padded_rows(model, mine, tokenizer, fields, size, logprobs)
    parts = here.gather((rows, num_computed, time.perf_counter() - start))
    pairs = [pair for share, part in zip(shares, parts, strict=True) for pair in zip(share, part[0], strict=True)]
    rows = [row for _, row in sorted(pairs, key=lambda pair: pair[0])]
    texts = tokenizer.batch_decode([row.token_ids for row in rows], skip_special_tokens=True)
    answers = [Answer(text, *row) for text, row in zip(texts, rows, strict=True)]
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return Answers(answers, num_prompt_tokens, sum(part[1] for part in parts), max(part[2] for part in parts))


def _shares(prompts: Sequence[Prompt], num_ranks: int) -> list[list[int]]:
    """The prompts of each rank, by index: equally many or one more, neighbours in sorted order."""
    if num_ranks == 1:
        return [list(range(len(prompts)))]
    ids = [prompt.token_ids for prompt in prompts]
    order = sort_sequences(np.concatenate(ids), cumulative(np.array([len(each) for each in ids]))).order
    return [part.tolist() for part in np.array_split(order, num_ranks)]


def _rows_of(found: Generated) -> list[AnswerRow]:
    columns = zip(found.token_ids, found.logprobs, found.finish_reasons, strict=True)
    return [AnswerRow(ids, sum(logprobs, 0.0), reason) for ids, logprobs, reason in columns]
