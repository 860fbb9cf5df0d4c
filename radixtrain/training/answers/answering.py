"""Generates the model's answers to prompts: on a radix cache, or for the ordinary baseline on padded rows.

With several ranks, each answers a share of the prompts, and all receive all answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from radixtrain.data.prompts import Prompt, end_tokens
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, first_line
from radixtrain.generation.cache import RadixCache
from radixtrain.generation.generate import generate
from radixtrain.generation.options import resolve_config
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.cached_pass import on_stored_rows
from radixtrain.hf.dropout import evaluating
from radixtrain.tree.arrays import cumulative
from radixtrain.tree.sorting import sort_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "evaluate_generation"
OWN_KEYS = ("max_new_tokens", "do_sample", "temperature")
ORDINARY_BATCH = 32  # prompts that Hugging Face's `generate` takes at once by default


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are generated.

    max_new_tokens: most tokens of an answer.
    do_sample: draw tokens; otherwise take the most likely one, whatever the model's generation config says.
    temperature: of the draws; None for the model's.
    generation_kwargs: more fields of `GenerationConfig`.
    batch_size: prompts at once; None leaves it to `radixtrain.generate`.
    seed: of the draws.

    Raises UserError that names the key.
    """

    max_new_tokens: int = 256
    do_sample: bool = False
    temperature: float | None = None
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.do_sample:
            raise UserError(f"{KEY}.temperature {self.temperature} is read only with {KEY}.do_sample: true")
        for name in OWN_KEYS:
            if name in self.generation_kwargs:
                raise UserError(f"{KEY}.generation_kwargs: {name} is a key of its own, {KEY}.{name}")
        if self.generation_kwargs.get("num_return_sequences", 1) != 1:
            raise UserError(f"{KEY}.generation_kwargs: num_return_sequences must be 1, since a row gets one answer")

    def fields(self, tokenizer: PreTrainedTokenizerBase, model: object, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return fields of `GenerationConfig`, with the tokens that end an answer."""
        fields = {"eos_token_id": _end_tokens(tokenizer, model, prompts), "max_new_tokens": self.max_new_tokens}
        fields |= {"do_sample": self.do_sample, "temperature": self.temperature, **self.generation_kwargs}
        if fields["temperature"] is None:
            del fields["temperature"]
        if isinstance(fields["eos_token_id"], int):
            fields["eos_token_id"] = [fields["eos_token_id"]]
        return fields


def _end_tokens(tokenizer: PreTrainedTokenizerBase, model: object, prompts: Sequence[Prompt]) -> list[int]:
    """Return the end tokens of the model, the tokenizer and training's turns; a base model's config lacks these."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id}
    ends = (own - {None}) | end_tokens(tokenizer, prompts)
    if not ends:
        raise UserError("neither the model nor its tokenizer has an end-of-sequence token, so no answer would end")
    return sorted(ends)


Row = tuple[list[int], float, str]
"""Fields of an `Answer` without its text."""


class Answer(NamedTuple):
    """An answer. text: without special tokens. token_ids: with the token that ended it. logprob: of all of them, under
    the model; 0 if not requested. finish_reason: `stop`, at an end token or a stop string, or `length`.
    """

    text: str
    token_ids: list[int]
    logprob: float
    finish_reason: str


@dataclass(frozen=True)
class Answers:
    """Answers to prompts, in order. num_prompt_tokens: of all prompts. num_computed_tokens: rows computed for them.

    seconds: of the rank that took longest.
    """

    answers: list[Answer]
    num_prompt_tokens: int
    num_computed_tokens: int
    seconds: float


def check_answering(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: AnswerOptions, dedup: bool
) -> None:
    """Raise UserError if the model or an option is not supported, before anything is computed.

    With `dedup: false` Hugging Face's `generate` refuses when it is called.
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
    """Generate one answer for each prompt. With several ranks, each calls this with all prompts.

    model: is put into evaluation mode meanwhile; afterwards every module has its previous mode.
    dedup: False for Hugging Face's `generate`, on rows that are padded on the left.
    logprobs: whether the ordinary arm computes them, which costs the memory of all logits; otherwise they are 0.
    cache: for prompts of several calls that share a beginning.

    The global random generators are not touched. Raises UserError if the model or an option is not supported.
    """
    fields = options.fields(tokenizer, model, prompts)
    start, rank = time.perf_counter(), ranks().rank
    shares = _shares(prompts, ranks().size)
    own, seed = [prompts[index] for index in shares[rank]], options.seed + rank
    with torch.no_grad(), isolate_rng(), evaluating(model):
        if dedup:
            ids = [prompt.token_ids.tolist() for prompt in own]
            fields.update(tokenizer=tokenizer, batch_size=options.batch_size, seed=seed, cache=cache)
            generated = generate(model, ids, **fields)
            columns = zip(generated.token_ids, generated.logprobs, generated.finish_reasons, strict=True)
            rows = [(tokens, sum(logprobs, 0.0), reason) for tokens, logprobs, reason in columns]
            num_computed = generated.stats.num_computed_tokens
        else:
            torch.manual_seed(seed)
            size = options.batch_size or ORDINARY_BATCH
            rows, num_computed = answers_of_padded_rows(model, own, tokenizer, fields, size, logprobs)
    parts = ranks().gather((rows, num_computed, time.perf_counter() - start))
    pairs = [pair for share, part in zip(shares, parts, strict=True) for pair in zip(share, part[0], strict=True)]
    rows = [row for _, row in sorted(pairs, key=lambda pair: pair[0])]
    texts = tokenizer.batch_decode([tokens for tokens, *_ in rows], skip_special_tokens=True)
    answers = [Answer(text, *row) for text, row in zip(texts, rows, strict=True)]
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return Answers(answers, num_prompt_tokens, sum(part[1] for part in parts), max(part[2] for part in parts))


def _shares(prompts: Sequence[Prompt], num_ranks: int) -> list[list[int]]:
    """Divide the prompts among the ranks, by index: equally many or one more, neighbours in sorted order."""
    if num_ranks == 1:
        return [list(range(len(prompts)))]
    ids = [prompt.token_ids for prompt in prompts]
    order = sort_sequences(np.concatenate(ids), cumulative(np.array([len(each) for each in ids]))).order
    return [part.tolist() for part in np.array_split(order, num_ranks)]


def answers_of_padded_rows(
    model: Any,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, Any],
    batch_size: int,
    logprobs: bool,
) -> tuple[list[Row], int]:
    """Generate an answer to each prompt, and count the rows that were computed for the prompts, padding included.

    model: not shared, in evaluation mode. Draws come from torch's generator.
    fields: of `GenerationConfig`, with `eos_token_id` as a list, or None.
    logprobs: keeps the logits of a batch, (batch_size, max_new_tokens, vocabulary).

    Prompts of similar length make a batch, so that little is padded. Raises UserError for an option that `generate`
    refuses.
    """
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].token_ids))
    answers: dict[int, Row] = {}
    num_computed = 0
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = _left_padded([prompts[index].token_ids for index in chosen], model.device)
        num_computed += batch["input_ids"].numel()
        rows = _generated(model, batch, tokenizer, fields, logprobs)
        answers.update(zip(chosen, rows, strict=True))
    return [answers[index] for index in range(len(prompts))], num_computed


def _generated(
    model: Any, batch: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any], logprobs: bool
) -> list[Row]:
    length = batch["input_ids"].shape[1]
    pad = next(iter(fields["eos_token_id"] or ()), 0)  # what follows an end token is cut off
    wanted = {"return_dict_in_generate": True, "output_logits": logprobs, "pad_token_id": pad}
    try:
        out = model.generate(**batch, tokenizer=tokenizer, **{**fields, **wanted})
    except (TypeError, ValueError) as error:
        raise UserError(f"generation options: {first_line(error)}") from error
    answers = []
    for row, generated in enumerate(out.sequences[:, length:].tolist()):
        tokens, reason = _until_end(generated, fields, tokenizer)
        logits = [step[row] for step in out.logits[: len(tokens)]] if logprobs else []
        answers.append((tokens, _logprob(logits, tokens), reason))
    return answers


def _left_padded(rows: Sequence[np.ndarray], device: torch.device) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    padded = np.zeros((2, len(rows), longest), dtype=np.int64)
    for row, ids in enumerate(rows):
        padded[0, row, longest - len(ids) :] = ids
        padded[1, row, longest - len(ids) :] = 1
    return dict(zip(("input_ids", "attention_mask"), torch.from_numpy(padded).to(device), strict=True))


def _until_end(
    tokens: list[int], fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], str]:
    """Cut an answer after its end token, and say why it ended."""
    length = next((index for index, token in enumerate(tokens) if token in (fields["eos_token_id"] or ())), len(tokens))
    stop_strings = fields.get("stop_strings") or ()
    text = tokenizer.decode(tokens[:length]) if stop_strings else ""
    if any(each in text for each in ([stop_strings] if isinstance(stop_strings, str) else stop_strings)):
        return tokens[:length], "stop"
    return tokens[: length + 1], "stop" if length < len(tokens) else "length"


def _logprob(logits: list[Tensor], tokens: list[int]) -> float:
    """Sum over all tokens. logits: (V,) for each."""
    if not logits:
        return 0.0
    chosen = torch.tensor(tokens, device=logits[0].device)[:, None]
    return float(torch.stack(logits).double().log_softmax(-1).gather(1, chosen).sum())
