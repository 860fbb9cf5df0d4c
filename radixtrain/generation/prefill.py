"""Prompts are computed once on their unique tokens: what the cache does not hold of them, or to score completions.

The same attention functions as in training (`radixtrain/hf/attention_interface.py`), whether the model is shared or
not. Layers see no cache of Hugging Face's: the attention function itself receives the call (`radix_call`), stores keys
and values, and attends to what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.attention import continued_attention
from radixtrain.collators.batching import cut_by_unique_tokens
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.generation.cache import Match, Node, RadixCache
from radixtrain.hf.attention_interface import Call, Extent, Heads
from radixtrain.hf.backbone import Parts, model_inside, parts_of
from radixtrain.hf.dropout import evaluating
from radixtrain.hf.guards.code import code_in, why_recorded
from radixtrain.hf.guards.model import verdict_of
from radixtrain.hf.guards.rules import WITHOUT
from radixtrain.hf.head import logits_of
from radixtrain.hf.modules import num_attention_layers
from radixtrain.hf.progress import Progress
from radixtrain.hf.refusals import check_generation
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.kernels.stored import Readers, Shared
from radixtrain.loss import logits_logprobs
from radixtrain.tree.arrays import IntArray, back_to_back, concatenate_ranges, lengths_of
from radixtrain.tree.layout import TreeLayout, on_device
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.sorting import sort_sequences

MAX_ROWS = 16_384  # new rows of a pass, as long as it is more than one prompt
MAX_LOGITS = 2**27  # that scores hold at once: 512 MiB in float32
_GENERATING = RLock()  # a model has one mode for all threads, and a cache one tree


@contextmanager
def generating(model: nn.Module, parts: Parts, longest: int) -> Iterator[None]:
    """Let the model compute on stored rows: in evaluation mode, without gradients. Restores it afterwards.

    Another thread that generates waits.

    model: as the user gave it, maybe with adapters around it. longest: as in `check_generation`.

    Raises UserError for a model or an adapter that cannot generate exactly this way.
    """
    check_generation(parts, longest)
    try:
        with _GENERATING, evaluating(model), torch.no_grad():
            code = code_in(parts.base, parts.decoder, parts.head, outer=[parts.base, parts.backbone])
            reason = why_recorded() or code.refused
            if reason is None:
                shape = 3, longest
                reason = verdict_of(parts.backbone, parts.head, code=code, progress=Progress(), shape=shape).reason
            if reason is not None:
                raise UserError(f"{parts.name}: {reason}; leave it out, or {WITHOUT['generate']}")
            yield
    except UserError as error:  # of a layer
        raise UserError(str(error).replace(TRAIN_WITHOUT_SHARING, WITHOUT["generate"])) from None


def device_of(parts: Parts) -> torch.device:
    """Return the device on which the model takes its tokens."""
    weight: Tensor = parts.base.get_input_embeddings().weight  # type: ignore[assignment]
    return weight.device


class LayerRows(NamedTuple):
    """Keys and values of some tokens in one layer, (n, K, H) each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class KeyValues:
    """What a `RadixCache` stores for some tokens: their keys and values, by the number of the attention call."""

    layers: list[LayerRows]

    def __len__(self) -> int:
        return len(self.layers[0].keys)

    def __getitem__(self, part: slice) -> KeyValues:
        """Return those of some tokens, in memory of their own, so that the others may be freed."""
        return KeyValues([LayerRows(keys[part].clone(), values[part].clone()) for keys, values in self.layers])


class StoredCall(Call):
    """A forward pass on new rows of some sequences, whose earlier rows are stored.

    depths: (U,), int64. the place of each new row in its sequence. longest: sequence, in tokens, with these.
    """

    def __init__(self, parts: Parts, depths: Tensor, longest: int) -> None:
        super().__init__(Extent(longest), "auto", window_may_bind(parts.decoder.config, longest))
        self.parts, self.depths = parts, depths

    def arguments(self, input_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of the model for these rows. input_ids: (U,)."""
        mask = no_mask(self.window_may_bind, self.depths.device, self)
        positions = {"position_ids": self.depths[None], "attention_mask": mask}
        return {"input_ids": input_ids[None], **positions, "use_cache": False, "radix_call": self}

    def check(self) -> None:
        """Raise RuntimeError if a layer attended without the stored rows."""
        number = num_attention_layers(self.parts.decoder)
        self.check_layers(self.parts.backbone, number, "did not see the stored rows; use model.generate")


class PromptCall(StoredCall):
    """A pass of what sequences add to what is stored of them.

    Two of them share a row only if they continue the same node, so each token is marked with the node that its
    sequence continues.

    plan: of their ends. ids: (U,), int64. the token of each of its rows. num_stored: tokens of each sequence.
    readers: the rows that see each stored node. stored: keys and values of the new rows, by attention call.
    """

    def __init__(self, parts: Parts, sequences: Sequence[IntArray], matches: Sequence[Match]) -> None:
        """Take sequences, (n,), int64 each, and what is stored of them, of none the whole."""
        self.num_stored = [match.length for match in matches]
        tokens, bounds = back_to_back([ids[length:] for ids, length in zip(sequences, self.num_stored, strict=True)])
        lengths = lengths_of(bounds)
        nodes = {match.node: None for match in matches}
        numbers = {node: number for number, node in enumerate(nodes)}
        owners = np.array([numbers[match.node] for match in matches]).repeat(lengths)
        marked = tokens + owners * (1 + int(tokens.max()))
        self.plan = build_prefix_plan(marked, bounds, concatenate_ranges(np.array(self.num_stored), lengths))
        first, device = self.plan.gather_indices, device_of(parts)
        super().__init__(parts, on_device(self.plan.position_ids, device), max(map(len, sequences)))
        self.ids = on_device(tokens[first], device)
        self.tree = TreeLayout.from_plan(self.plan).to(device, non_blocking=True)
        self.readers = {node: Readers.of(rows, device) for node, rows in readers_of(list(nodes), owners[first])}
        self.places = {node: sum(len(above.tokens) for above in node.path[:-1]) for node in self.readers}
        self.stored: list[LayerRows] = []

    def run(self) -> Tensor:
        """Run the model without its head; returns its hidden rows, (U, D)."""
        hidden: Tensor = self.parts.backbone(**self.arguments(self.ids))[0][0]
        self.check()
        return hidden

    def attend(self, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Store the keys and values of the new rows, and attend to them and to what they continue."""
        query, key, value = heads
        self.stored.append(LayerRows(key, value))
        shared = []
        for node, readers in self.readers.items():
            keys, values = node.rows.layers[len(self.calls)]
            shared.append(Shared(readers, keys, values, self.places[node]))
        del scoring["both_ways"]  # only images attend so
        how = {"depths": self.depths, "window": window, **scoring}
        return continued_attention(query, key, value, self.tree, shared, **how)

    def rows_of(self, sequence: int) -> IntArray:
        """Return the rows of what a sequence adds."""
        start, end = self.plan.cu_seqlens[sequence : sequence + 2]
        return self.plan.inverse_indices[start:end]

    def key_values(self, sequence: int, start: int) -> KeyValues:
        """Return the keys and values of a sequence from a place in it on."""
        rows = on_device(self.rows_of(sequence)[start - self.num_stored[sequence] :], self.depths.device)
        return KeyValues([LayerRows(*(x.index_select(0, rows) for x in layer)) for layer in self.stored])


def readers_of(nodes: Sequence[Node], owners: IntArray) -> Iterator[tuple[Node, IntArray]]:
    """Yield each stored node with the rows that see it. owners: (U,). which of the nodes each row continues."""
    below: dict[Node, list[int]] = {}
    for number, node in enumerate(nodes):
        for above in node.path:
            below.setdefault(above, []).append(number)
    return ((node, np.flatnonzero(np.isin(owners, numbers))) for node, numbers in below.items())


def prefill(parts: Parts, cache: RadixCache, prompts: Sequence[IntArray]) -> list[Node]:
    """Compute what a cache does not hold of some prompts, (n,), int64 each; returns where each ends.

    Call it inside `generating`.
    """
    ends = [cache.root] * len(prompts)
    for members in cut_by_unique_tokens(sort_sequences(*back_to_back(prompts)), MAX_ROWS):
        matches = {member: cache.match_prefix(prompts[member]) for member in members}
        new = [member for member, match in matches.items() if match.length < len(prompts[member])]
        for member, match in matches.items():
            ends[member] = match.node
        if new:
            call = PromptCall(parts, [prompts[each] for each in new], [matches[each] for each in new])
            call.run()
            cache.counters.num_computed += call.plan.num_rows
            for place, member in enumerate(new):
                ends[member] = cache.insert(prompts[member], partial(call.key_values, place))
    return ends


@dataclass(frozen=True)
class CompletionScore:
    """The score of a completion.

    token_ids: its tokens.
    logprobs: the log-probability of each token given those before it, in nats.
    """

    token_ids: list[int]
    logprobs: list[float]

    @property
    def logprob(self) -> float:
        """Return the log-probability of the whole completion: the sum of `logprobs`."""
        return float(np.sum(self.logprobs))

    @property
    def mean_logprob(self) -> float:
        """Return the mean of `logprobs`, which compares completions of different lengths."""
        return self.logprob / len(self.logprobs)


def score_completions(
    model: nn.Module, prompts: Sequence[Any], completions: Sequence[Any]
) -> list[list[CompletionScore]]:
    """Score completions by their log-probabilities, for multiple choice and reranking. Each prompt is computed once.

    model: as in `generate`.
    prompts: lists of token ids.
    completions: lists of token ids; the same for every prompt, or a list of them for each prompt.

    Returns, for each prompt, a `CompletionScore` for each of its completions, in their order.
    Raises UserError for a model that `generate` refuses, and for anything but at least one token id.

    >>> [scores] = score_completions(model, [[7, 8]], [[9], [5, 6]])
    >>> best = max(scores, key=lambda score: score.mean_logprob)
    >>> [score.token_ids for score in scores]
    [[9], [5, 6]]
    """
    parts = parts_of(model_inside(model))
    of_prompts = list(zip(prompts, _of_each_prompt(completions, len(prompts)), strict=True))
    vocabulary = parts.decoder.config.vocab_size
    pairs = [
        (ids, _token_ids(completion, f"completion {place} of prompt {number}", vocabulary))
        for number, (prompt, of_prompt) in enumerate(of_prompts)
        for ids in [_token_ids(prompt, f"prompt {number}", vocabulary)]
        for place, completion in enumerate(of_prompt)
    ]
    sequences = [np.append(prompt, completion[:-1]) for prompt, completion in pairs]
    scores: dict[int, CompletionScore] = {}
    with generating(model, parts, max(map(len, sequences), default=1)):
        for members in cut_by_unique_tokens(sort_sequences(*back_to_back(sequences)), MAX_ROWS):
            labels = [pairs[member][1] for member in members]
            logprobs = iter(_logprobs(parts, [sequences[member] for member in members], labels))
            for member, ids in zip(members, labels, strict=True):
                scores[member] = CompletionScore(ids.tolist(), [next(logprobs) for _ in ids])
    in_order = iter([scores[place] for place in range(len(pairs))])
    return [[next(in_order) for _ in of_prompt] for _, of_prompt in of_prompts]


def _logprobs(parts: Parts, sequences: Sequence[IntArray], labels: Sequence[IntArray]) -> Iterator[float]:
    """Yield the log-probabilities of tokens that the ends of sequences predict, in one pass."""
    call = PromptCall(parts, sequences, [Match(RadixCache().root, 0)] * len(sequences))
    rows = [call.rows_of(place)[-len(ids) :] for place, ids in enumerate(labels)]
    hidden = call.run()
    size = max(1, MAX_LOGITS // parts.decoder.config.vocab_size)
    pieces = (on_device(np.concatenate(each), hidden.device).split(size) for each in (rows, labels))
    for some, tokens in zip(*pieces, strict=True):
        logits = logits_of(parts, hidden[some])[0]
        yield from logits_logprobs(logits, tokens, torch.arange(len(tokens), device=logits.device)).tolist()


def _of_each_prompt(completions: Sequence[Any], num_prompts: int) -> list[Sequence[Any]]:
    """Return the completions of each prompt."""
    if isinstance(completions, str) or not isinstance(completions, Sequence):
        raise UserError(f"completions must be a list, got {type(completions).__name__}")
    is_of_prompts = bool(completions) and all(_is_list_of_completions(each) for each in completions)
    if not is_of_prompts:
        return [completions] * num_prompts
    if len(completions) != num_prompts:
        raise UserError(f"completions: {len(completions)} lists for {num_prompts} prompts; give one for each")
    return list(completions)


def _is_list_of_completions(each: Any) -> bool:
    """Return whether it is a list of completions, and not one completion as token ids."""
    is_list = isinstance(each, Sequence) and not isinstance(each, str)
    return is_list and all(not isinstance(inner, int | np.integer) for inner in each)


def _token_ids(given: Any, name: str, vocabulary: int) -> IntArray:
    """Return token ids, (n,), int64, at least one. name: whose, for errors."""
    ids = np.asarray(given)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise UserError(f"{name}: expected a list of at least one token id, got {given!r}"[:200])
    check_vocabulary(name, ids, vocabulary)
    return ids.astype(np.int64)


def check_vocabulary(name: str, ids: IntArray, vocabulary: int) -> None:
    """Refuse token ids that have no embedding. name: whose, for errors."""
    if len(wrong := ids[(ids < 0) | (ids >= vocabulary)]):
        raise UserError(
            f"{name} has the token id {wrong[0]}, and the model has embeddings for ids from 0 to {vocabulary - 1}: is "
            f"it the tokenizer of this model?"
        )
