"""The next token of every answer, and its log-probability: transformers' logits processors, then argmax or a draw.

A row gets the token that it would get alone. So a processor that reads token ids is called with rows of one length,
without padding, and a draw belongs to an answer, not to a place in a batch.
"""

# Axes: n answers that are decoded together, L length of the longest, V vocabulary.

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process

from radixtrain.errors import UserError, first_line
from radixtrain.generation.options import max_length_of
from radixtrain.hf.backbone import model_inside

# Their exact types: these read scores only, so that one call serves rows of any length. A subclass may read more.
READS_SCORES_ONLY = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
# Options whose processors are made for one length of prompt.
MADE_FOR_A_LENGTH = (
    "min_new_tokens",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "forced_eos_token_id",
)
WEIGHT_BITS = 52  # a probability becomes a whole number of 2^-52: sums are exact, in any order, on any device


class Stage(NamedTuple):
    """Consecutive processors, [begin, end) of the list, and whether they read only scores."""

    begin: int
    end: int
    reads_scores_only: bool


class TokenChooser:
    """Chooses tokens as `model.generate` would for each row alone.

    model: a `PreTrainedModel` or a PEFT model around one.
    config: from `resolve_config`.
    logits_processor: the user's, which follow transformers' own and replace those of their type.
    seed: of the draws. None: drawn from torch's generator, which `torch.manual_seed` governs; given: no generator of
        torch, NumPy or Python is touched.

    Raises UserError for options that a processor refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        seed: int | None = None,
    ):
        self.base: Any = model_inside(model)
        self.config = config
        self.samples = bool(config.do_sample)
        self.own = _processor_list(logits_processor)
        self.seed = _seed(seed) if self.samples else 0
        self.made: dict[tuple[torch.device, int], LogitsProcessorList] = {}
        self.depends_on_length = any(getattr(config, name) is not None for name in MADE_FOR_A_LENGTH)
        self.stages = list(_stages(self._processors(torch.device("cpu"), 1)))

    def draws(self, sequence: int, count: int) -> np.ndarray:
        """Draw the numbers that choose the tokens of one answer, (count,), float64 in [0, 1).

        sequence: the answer's place in the result. The first ones are the same whatever `count` is.
        """
        stream = np.random.SeedSequence(self.seed, spawn_key=(sequence,))
        return np.random.Generator(np.random.PCG64(stream)).random(count)

    def choose(
        self,
        logits: Tensor,
        token_ids: Tensor,
        lengths: np.ndarray,
        prompt_lengths: np.ndarray,
        draws: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the next tokens, (n,), int64; return their log-probabilities, (n,), too. Nothing is read back.

        logits: (n, V), floating point, of the model's head. The log-probabilities are float32; float64 for float64.
        token_ids: (n, L), int64, on the same device, right-padded. Prompt and answer so far.
        lengths: (n,), int64. Of each row of `token_ids`.
        prompt_lengths: (n,), int64.
        draws: (n,), float64 in [0, 1). Not read in greedy decoding.

        While sampling, a token is -1 if all scores of its row are -inf or one is nan or inf.
        """
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = logits.to(dtype)
        logprobs = scores.log_softmax(-1)  # 7.9 ms for (32, 151936) on a CPU thread; logsumexp takes 15 ms
        if self.stages:  # on a copy: groups are written back in place, and a user's processor may do the same
            scores = scores.clone() if scores is logits else scores
            scores = self._processed(scores, token_ids, lengths, prompt_lengths)
        if self.samples:
            assert draws is not None, "sampling needs a draw for each row"
            tokens = _drawn(
                scores.to(dtype), torch.as_tensor(draws, dtype=torch.float64).to(logits.device, non_blocking=True)
            )
            places = tokens.clamp(min=0)
        else:
            tokens = places = scores.argmax(-1)
        return tokens, logprobs.gather(-1, places[:, None]).squeeze(-1)

    def _processed(self, scores: Tensor, token_ids: Tensor, lengths: np.ndarray, prompt_lengths: np.ndarray) -> Tensor:
        """Apply all processors to scores, (n, V), in groups of rows of one length, and one prompt length if needed.

        scores: (n, V), float. Changes in place.
        """
        if not self.depends_on_length:
            prompt_lengths = np.ones_like(lengths)
        groups: list[tuple[int, int, np.ndarray]] | None = None
        for begin, end, reads_scores_only in self.stages:
            if reads_scores_only:
                scores = self._part(scores.device, int(prompt_lengths[0]), begin, end)(token_ids, scores)
                continue
            groups = _groups(lengths, prompt_lengths) if groups is None else groups
            for length, prompt_length, rows in groups:
                part = self._part(scores.device, prompt_length, begin, end)
                if len(groups) == 1:
                    scores = part(token_ids[:, :length], scores)
                else:
                    rows_on_device = torch.from_numpy(rows).to(scores.device, non_blocking=True)
                    changed = part(token_ids[rows_on_device, :length], scores[rows_on_device])
                    scores.index_copy_(0, rows_on_device, changed.to(scores.dtype))
        return scores

    def _part(self, device: torch.device, prompt_length: int, begin: int, end: int) -> Any:
        """Return the processors of one stage; called with token ids and scores."""
        return LogitsProcessorList(self._processors(device, prompt_length)[begin:end])

    def _processors(self, device: torch.device, prompt_length: int) -> LogitsProcessorList:
        """Return transformers' processors and the user's, for prompts of one length; made once."""
        key = (device, prompt_length)
        if key not in self.made:
            self.made[key] = self._make(device, prompt_length)
        return self.made[key]

    def _make(self, device: torch.device, prompt_length: int) -> LogitsProcessorList:
        config = copy.deepcopy(self.config)
        config.max_length = int(max_length_of(config, np.array([prompt_length]))[0])
        if config.min_new_tokens is not None:  # which wins over min_length
            config.min_length = config.min_new_tokens + prompt_length
        try:
            self.base._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=device)
            return self.base._get_logits_processor(
                config, input_ids_seq_length=prompt_length, logits_processor=self.own, device=device
            )
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"generation options: {first_line(error)}") from error


def _drawn(scores: Tensor, draws: Tensor) -> Tensor:
    """Return the token at which the cumulative probability passes the draw, (n,), int64; -1 if there is no probability.

    scores: (n, V), float. draws: (n,), float64 in [0, 1).
    """
    weights = (scores.softmax(-1) * 2.0**WEIGHT_BITS).to(torch.int64)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    # A draw below 1 times the total, rounded down, is below the total: a token of weight 0 is never chosen.
    threshold = (draws * total).floor().to(torch.int64)
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    return torch.where(total > 0, tokens, -1)


def _groups(lengths: np.ndarray, prompt_lengths: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """Group rows by length and prompt length: (length, prompt length, rows), rows (m,) int64 ascending."""
    pairs, inverse = np.unique(np.stack([lengths, prompt_lengths], axis=1), axis=0, return_inverse=True)
    return [
        (int(length), int(prompt_length), np.flatnonzero(inverse.reshape(-1) == place))
        for place, (length, prompt_length) in enumerate(pairs)
    ]


def _stages(processors: LogitsProcessorList) -> Iterator[Stage]:
    begin = 0
    for scores_only, run in groupby(processors, key=lambda processor: type(processor) in READS_SCORES_ONLY):
        end = begin + len(list(run))
        yield Stage(begin, end, scores_only)
        begin = end


def _processor_list(logits_processor: object) -> LogitsProcessorList:
    if logits_processor is None:
        return LogitsProcessorList()
    if not isinstance(logits_processor, list) or not all(callable(each) for each in logits_processor):
        raise UserError(
            f"logits_processor: expected a LogitsProcessorList or a list of functions of token ids and scores, "
            f"got {type(logits_processor).__name__}"
        )
    return LogitsProcessorList(logits_processor)


def _seed(seed: int | None) -> int:
    """Make the seed non-negative, as NumPy requires; without one, draw it from torch's generator."""
    if seed is None:
        return int(torch.randint(2**63 - 1, ()))
    try:
        return operator.index(seed) % 2**64
    except TypeError:
        raise UserError(f"seed: expected a whole number, got {seed!r}") from None
