"""Generates the model's answers to prompts, which are computed on their unique tokens; whole, by recurrent layers.

With several ranks, each answers a share of the prompts, and all receive all answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from transformers import GenerationConfig

from radixtrain.collators.batching import cut_by_unique_tokens
from radixtrain.data.prompts import Prompt, end_tokens
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, did_you_mean, first_line
from radixtrain.generation.cache import RadixCache
from radixtrain.generation.generate import check_arguments, generate
from radixtrain.generation.prefill import generating
from radixtrain.generation.score import score_completions
from radixtrain.hf.backbone import mixers_of, parts_of
from radixtrain.hf.guards.draws import evaluating
from radixtrain.settings.commands import AnswerSettings
from radixtrain.tree.arrays import back_to_back
from radixtrain.tree.sorting import sort_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
SECTION = "evaluate_generation"
# Prompts at once by default, and tokens that they and their answers may store: most are shorter than the limit.
MAX_BATCH, STORED_TOKENS, EXPECTED_ANSWER = 256, 65_536, 1_024


def fields_of_config(
    options: AnswerSettings, tokenizer: PreTrainedTokenizerBase, model: object, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Return fields of `GenerationConfig`, with the tokens that end an answer."""
    fields: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.do_sample}
    fields["eos_token_id"] = _end_tokens(tokenizer, model, prompts)
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    fields |= options.generation_kwargs or {}
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


class Answer(NamedTuple):
    """An answer. token_ids: with the token that ended it. finish_reason: `stop`, at an end token or a stop string, or
    `length`. text: without special tokens. logprob: of all tokens, under the model; 0 if not requested.
    """

    token_ids: list[int]
    finish_reason: str
    text: str = ""
    logprob: float = 0.0


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
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: AnswerSettings
) -> None:
    """Raise UserError if the model or an option is not supported, before anything is computed.

    The first answers show what only `model.generate` can say of an option.
    """
    try:
        for name in GenerationConfig().update(**options.generation_kwargs or {}):
            raise UserError(f"unknown option {name!r}{did_you_mean(name, GenerationConfig().to_dict())}")
        check_arguments(model, None, fields_of_config(options, tokenizer, model, prompts))
        longest = max(len(prompt.token_ids) for prompt in prompts) + options.max_new_tokens - 1  # all but the last
        parts = parts_of(model)
        if _is_recurrent(model):
            logger.warning("%s computes each prompt whole: states of recurrent layers are not stored", parts.name)
        else:
            with generating(model, parts, longest):
                return
    except (TypeError, ValueError) as error:
        raise UserError(f"{SECTION}: {error}") from None


def answer_prompts(
    model: Any,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    options: AnswerSettings,
    logprobs: bool = False,
    cache: RadixCache | None = None,
) -> Answers:
    """Generate one answer for each prompt. With several ranks, each calls this with all prompts.

    model: runs in evaluation mode, and is left as it was.
    logprobs: whether they are computed; otherwise they are 0.
    cache: for prompts of several calls that share a beginning.

    The global random generators are not touched. Raises UserError if the model or an option is not supported.
    """
    fields = fields_of_config(options, tokenizer, model, prompts)
    start, rank = time.perf_counter(), ranks().rank
    shares = _shares(prompts, ranks().size)
    own = [prompts[index] for index in shares[rank]]
    with isolate_rng():
        torch.manual_seed(options.seed + rank)
        found, num_computed = _generated(model, own, tokenizer, fields, options, cache)
        if logprobs and own:
            scores = score_completions(
                model, [each.token_ids.tolist() for each in own], [[each.token_ids] for each in found]
            )
            found = [each._replace(logprob=sum(score)) for each, (score,) in zip(found, scores, strict=True)]
    parts = ranks().gather((found, num_computed, time.perf_counter() - start))
    pairs = [pair for share, part in zip(shares, parts, strict=True) for pair in zip(share, part[0], strict=True)]
    answers = [answer for _, answer in sorted(pairs, key=lambda pair: pair[0])]
    texts = tokenizer.batch_decode([answer.token_ids for answer in answers], skip_special_tokens=True)
    answers = [answer._replace(text=text) for answer, text in zip(answers, texts, strict=True)]
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return Answers(answers, num_prompt_tokens, sum(part[1] for part in parts), max(part[2] for part in parts))


def _shares(prompts: Sequence[Prompt], num_ranks: int) -> list[list[int]]:
    """Divide the prompts among the ranks, by index: equally many or one more, neighbours in sorted order."""
    if num_ranks == 1:
        return [list(range(len(prompts)))]
    order = sort_sequences(*back_to_back([prompt.token_ids for prompt in prompts])).order
    return [part.tolist() for part in np.array_split(order, num_ranks)]


def _generated(
    model: Any,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, Any],
    options: AnswerSettings,
    cache: RadixCache | None,
) -> tuple[list[Answer], int]:
    """Generate an answer to each prompt, and count the rows that were computed for the prompts.

    fields: of `GenerationConfig`, with `eos_token_id` as a list. Draws come from torch's generator. Raises UserError
    for an option that `generate` refuses.
    """
    ids = [prompt.token_ids for prompt in prompts]
    stored = RadixCache(STORED_TOKENS) if cache is None else cache
    answers: dict[int, Answer] = {}
    before = stored.counters.num_computed
    for members in _batches(ids, options):
        batch = _left_padded([ids[member] for member in members], model.device)
        answers.update(zip(members, _answered(model, batch, tokenizer, fields, stored), strict=True))
    num_last = len(ids)  # the last token of each prompt, which is never stored
    num_computed = num_last + stored.counters.num_computed - before
    in_order = [answers[member] for member in range(len(ids))]
    return in_order, sum(map(len, ids)) if _is_recurrent(model) else num_computed


def _is_recurrent(model: Any) -> bool:
    """Return whether a model has states that a cache of keys and values does not hold: it computes prompts whole."""
    return bool(mixers_of(parts_of(model).decoder))


def _batches(ids: Sequence[np.ndarray], options: AnswerSettings) -> list[list[int]]:
    """Return the prompts of each batch: neighbours in sorted order, of so many tokens with their answers."""
    expected = min(options.max_new_tokens, EXPECTED_ANSWER)
    in_order = sort_sequences(*back_to_back(ids))
    return cut_by_unique_tokens(in_order, STORED_TOKENS, expected, options.batch_size or MAX_BATCH)


def _answered(
    model: Any,
    batch: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, Any],
    cache: RadixCache,
) -> Iterator[Answer]:
    """Yield the answer to each prompt of a batch, without its text and log-probability."""
    pad = next(iter(fields["eos_token_id"] or ()), 0)  # what follows an end token is cut off
    arguments = {**batch, "tokenizer": tokenizer, "pad_token_id": pad, **fields}
    try:
        if _is_recurrent(model):
            with evaluating(model):
                generated = model.generate(**arguments)
        else:
            generated = generate(model, cache=cache, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{SECTION}: {first_line(error)}") from error
    for answer in generated[:, batch["input_ids"].shape[1] :].tolist():
        yield _until_end(answer, fields, tokenizer)


def _left_padded(rows: Sequence[np.ndarray], device: torch.device) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    padded = np.zeros((2, len(rows), longest), dtype=np.int64)
    for row, ids in enumerate(rows):
        padded[0, row, longest - len(ids) :] = ids
        padded[1, row, longest - len(ids) :] = 1
    return dict(zip(("input_ids", "attention_mask"), torch.from_numpy(padded).to(device), strict=True))


def _until_end(tokens: list[int], fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Cut an answer after its end token, and say why it ended."""
    length = next((index for index, token in enumerate(tokens) if token in (fields["eos_token_id"] or ())), len(tokens))
    stop_strings = fields.get("stop_strings") or ()
    text = tokenizer.decode(tokens[:length]) if stop_strings else ""
    if any(each in text for each in ([stop_strings] if isinstance(stop_strings, str) else stop_strings)):
        return Answer(tokens[:length], "stop")
    return Answer(tokens[: length + 1], "stop" if length < len(tokens) else "length")
