"""The ordinary arm of generation, with `dedup: false`: Hugging Face's `generate` on rows padded on the left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixtrain.data.prompts import Prompt
from radixtrain.errors import UserError, first_line

__all__ = ["AnswerRow", "answers_of_padded_rows"]


class AnswerRow(NamedTuple):
    """token_ids: with the token that ended it. logprob: of all of them; 0 if it was not asked for."""

    token_ids: list[int]
    logprob: float
    finish_reason: str


def answers_of_padded_rows(
    model: Any, prompts: Sequence[Prompt], tokenizer: Any, fields: Mapping[str, Any], batch_size: int, logprobs: bool
) -> tuple[list[AnswerRow], int]:
    """An answer to each prompt, and the rows that were computed for the prompts, padding among them.

    model: not prepared, in evaluation mode. Draws come from torch's generator.
    fields: of `GenerationConfig`, with `eos_token_id` as a list, or None.
    logprobs: keeps the logits of a batch, (batch_size, max_new_tokens, vocabulary).

    Prompts of similar length make a batch, so that little is padded. Raises UserError for an option that `generate`
    refuses.
    """
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].token_ids))
    answers: dict[int, AnswerRow] = {}
    num_computed = 0
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = _left_padded([prompts[index].token_ids for index in chosen], model.device)
        num_computed += batch["input_ids"].numel()
        found = _generated(model, batch, tokenizer, fields, logprobs)
        answers.update(zip(chosen, found, strict=True))
    return [answers[index] for index in range(len(prompts))], num_computed


def _generated(
    model: Any, batch: dict[str, Tensor], tokenizer: Any, fields: Mapping[str, Any], logprobs: bool
) -> list[AnswerRow]:
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
        answers.append(AnswerRow(tokens, _logprob(logits, tokens), reason))
    return answers


def _left_padded(rows: Sequence[np.ndarray], device: torch.device) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    padded = np.zeros((2, len(rows), longest), dtype=np.int64)
    for place, ids in enumerate(rows):
        padded[0, place, longest - len(ids) :] = ids
        padded[1, place, longest - len(ids) :] = 1
    return dict(zip(("input_ids", "attention_mask"), torch.from_numpy(padded).to(device), strict=True))


def _until_end(tokens: list[int], fields: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], str]:
    """An answer without the end tokens that pad it, and why it ended."""
    length = next((place for place, token in enumerate(tokens) if token in (fields["eos_token_id"] or ())), len(tokens))
    stop_strings = fields.get("stop_strings") or ()
    text = tokenizer.decode(tokens[:length]) if stop_strings else ""
    if any(each in text for each in ([stop_strings] if isinstance(stop_strings, str) else stop_strings)):
        return tokens[:length], "stop"
    return tokens[: length + 1], "stop" if length < len(tokens) else "length"


def _logprob(logits: list[Tensor], tokens: list[int]) -> float:
    """Of all tokens together. logits: (V,) for each."""
    if not logits:
        return 0.0
    chosen = torch.tensor(tokens, device=logits[0].device)[:, None]
    return float(torch.stack(logits).double().log_softmax(-1).gather(1, chosen).sum())
