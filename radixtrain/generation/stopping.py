"""When an answer ends: transformers' stopping criteria, with each row judged as if it were alone."""

# Axes: n answers that are decoded together, L length of the longest, W tokens that a stop string can span.

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers import StopStringCriteria as StopStrings

from radixtrain.errors import UserError, first_line
from radixtrain.hf.backbone import model_inside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STOP, LENGTH = 1, 2  # an end token, a stop string or a criterion; max_new_tokens, max_length or max_time


class Stopper:
    """Finds the answers that end. The time of `max_time` begins when it is made.

    model: a `PreTrainedModel` or a PEFT model around one.
    config: from `resolve_config`.
    tokenizer: for `stop_strings`.
    stopping_criteria: the user's; one of transformers' types replaces what the options would give.

    Raises UserError for stop strings that cannot be matched and for a criterion of length.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
    ):
        criteria = _criteria(model, config, tokenizer, stopping_criteria)
        self.eos_ids = [eos for each in criteria if type(each) is EosTokenCriteria for eos in _eos_ids(each)]
        self.times = [each for each in criteria if type(each) is MaxTimeCriteria]
        self.stop_strings = [each for each in criteria if type(each) is StopStrings]
        handled = (EosTokenCriteria, MaxTimeCriteria, StopStrings)
        self.others = [each for each in criteria if type(each) not in handled]

    @property
    def reads_token_ids(self) -> bool:
        """Return whether `finished` reads its `token_ids`."""
        return bool(self.stop_strings or self.others)

    def finished(
        self,
        tokens: np.ndarray,
        token_ids: Tensor | None,
        lengths: np.ndarray,
        num_new: np.ndarray,
        max_new: np.ndarray,
    ) -> np.ndarray:
        """Return 0 for an answer that goes on, STOP or LENGTH for one that ends, (n,), int8. STOP wins over LENGTH.

        tokens: (n,), int64. The newest token of each answer.
        token_ids: (n, L), int64, right-padded. Prompt and answer with the newest token.
        lengths: (n,), int64. Of each row of `token_ids`.
        num_new, max_new: (n,), int64. Tokens of each answer with the newest, and how many it may have.

        Raises UserError if a row had no token with any probability.
        """
        if (tokens < 0).any():
            raise UserError(
                "sampling: no token can be drawn, because after the logits processors all scores of an answer are "
                "-inf, or one is nan or inf; check logits_processor, bad_words_ids and suppress_tokens, and whether "
                "the model overflows in its dtype"
            )
        stopped = np.zeros(len(tokens), dtype=bool)
        for eos in self.eos_ids:  # a few: np.isin takes several times as long
            stopped |= tokens == eos
        if self.reads_token_ids:
            assert token_ids is not None, "stop strings and criteria read token ids"
            for criterion in self.stop_strings:
                stopped |= _verdicts(criterion, token_ids, lengths, criterion.maximum_token_len)
            for criterion in self.others:
                stopped |= _verdicts(criterion, token_ids, lengths)
        late = any(bool(criterion(torch.zeros(1, 1, dtype=torch.int64), None)) for criterion in self.times)
        ended = np.where((num_new >= max_new) | late, LENGTH, 0)
        return np.where(stopped, STOP, ended).astype(np.int8)


def _verdicts(criterion: Any, token_ids: Tensor, lengths: np.ndarray, window: int | None = None) -> np.ndarray:
    """Return the verdict of a criterion on every row, (n,), bool. It gets rows of one length, without padding.

    window: only the last W tokens are given; shorter rows are given whole.
    """
    verdicts = np.zeros(len(lengths), dtype=bool)
    spans = lengths if window is None else np.minimum(lengths, window)
    for span in np.unique(spans):
        rows = np.flatnonzero(spans == span)
        columns_nW = (lengths[rows, None] - span) + np.arange(span)
        places = (
            torch.from_numpy(each).to(token_ids.device, non_blocking=True) for each in (rows[:, None], columns_nW)
        )
        verdict = criterion(token_ids[tuple(places)], None)
        verdicts[rows] = torch.as_tensor(verdict).to("cpu", torch.bool).numpy()
    return verdicts


def _criteria(model: nn.Module, config: GenerationConfig, tokenizer: Any, own: Any) -> StoppingCriteriaList:
    """Merge transformers' criteria of these options with the user's, without one of length."""
    _check_own(own)
    base: Any = model_inside(model)
    config = copy.deepcopy(config)
    config.max_length = None
    config.stop_strings = _stop_strings(config.stop_strings, tokenizer)
    try:
        base._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
        return base._get_stopping_criteria(config, StoppingCriteriaList(own or []), tokenizer)
    except (TypeError, ValueError) as error:
        raise UserError(f"stop_strings or stopping_criteria: {first_line(error)}") from error


def _check_own(own: object) -> None:
    if own is not None and (not isinstance(own, list) or not all(callable(each) for each in own)):
        raise UserError(
            f"stopping_criteria: expected a StoppingCriteriaList or a list of functions of token ids and scores, "
            f"got {type(own).__name__}"
        )
    if any(isinstance(each, MaxLengthCriteria) for each in own or []):
        raise UserError("stopping_criteria: MaxLengthCriteria is not supported; set max_new_tokens or max_length")


def _stop_strings(stop_strings: Any, tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or [])
    if not all(isinstance(each, str) and each for each in strings):
        raise UserError(f"stop_strings: expected texts that are not empty, got {stop_strings!r}")
    if strings and tokenizer is None:
        raise UserError("stop_strings need the model's tokenizer: pass tokenizer=")
    return strings or None


def _eos_ids(criterion: EosTokenCriteria) -> list[int]:
    return criterion.eos_token_id.reshape(-1).tolist()
