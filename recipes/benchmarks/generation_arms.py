"""The arms of `generation.py`: the same greedy answers from three decoding loops, and what they cost in operations.

Each arm takes a model, lists of token ids and the number of new tokens, and returns a list of token ids for each
prompt, in the order of the prompts, with the end token if there was one.
"""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from flops import StepFlops, costs_of, ordinary_flops, unique_flops
from transformers import ContinuousBatchingConfig, GenerationConfig

import radixtrain
from radixtrain.tree.arrays import cumulative
from radixtrain.tree.plan import build_prefix_plan

Ids = list[list[int]]
Arm = Callable[[Any, Ids, int], Ids]
MOST_REQUESTS = 256  # that `radix` and `generate_batch` have at once
MOST_TOKENS = 65_536  # that `radix` keeps from one batch to the next


def radix(model: Any, prompts: Ids, num_new: int) -> Ids:
    """`radixtrain.generate` on batches of neighbours in sorted order, with one cache."""
    answers: Ids = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    cache = radixtrain.RadixCache(MOST_TOKENS) if len(order) > MOST_REQUESTS else None
    for start in range(0, len(order), MOST_REQUESTS):
        places = order[start : start + MOST_REQUESTS]
        inputs = left_padded([prompts[place] for place in places], pad_token_id(model))
        options = {"max_new_tokens": num_new, "do_sample": False, "pad_token_id": pad_token_id(model)}
        found = radixtrain.generate(model, **inputs, cache=cache, **options)
        for place, row in zip(places, found[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            answers[place] = until_end(row, end_token_ids(model))
    return answers


def padded(batch_size: int) -> Arm:
    """`model.generate` on batches of this size, which prompts of similar length fill."""

    def generate(model: Any, prompts: Ids, num_new: int) -> Ids:
        answers: Ids = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            inputs = left_padded([prompts[place] for place in places], pad_token_id(model))
            found = model.generate(**inputs, max_new_tokens=num_new, do_sample=False, pad_token_id=pad_token_id(model))
            for place, row in zip(places, found[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                answers[place] = until_end(row, end_token_ids(model))
        return answers

    return generate


def blocks(page_size: int) -> Arm:
    """`model.generate_batch`, continuous batching, whose requests share whole pages of this many tokens."""

    def generate(model: Any, prompts: Ids, num_new: int) -> Ids:
        pages = -(-(max(map(len, prompts)) + num_new) // page_size) + 1
        batching = ContinuousBatchingConfig(
            allow_block_sharing=True,
            page_size=page_size,
            num_blocks=pages * min(len(prompts), MOST_REQUESTS),
            max_batch_tokens=4096,
            max_requests_per_batch=MOST_REQUESTS,
        )
        options = GenerationConfig(
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=end_token_ids(model) or None,
            pad_token_id=pad_token_id(model),
        )
        implementation = model.config._attn_implementation
        found = model.generate_batch(prompts, options, continuous_batching_config=batching, warmup=False)
        model.set_attn_implementation(implementation)
        if len(found) != len(prompts):
            raise RuntimeError(f"generate_batch answered {len(found)} of {len(prompts)} prompts")
        return [until_end(each.generated_tokens, end_token_ids(model)) for each in found.values()]

    return generate


def best_batch_size(model: Any, prompts: Ids, num_new: int, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds a prompt in one batch of each size, of prompts of middle length. Sizes above their number are left out.

    The fastest is the best; the first batch of all is run before, unmeasured.
    """
    by_length = sorted(prompts, key=len)
    sizes = [size for size in sizes if size <= len(prompts)] or [len(prompts)]
    padded(sizes[0])(model, by_length[: sizes[0]], num_new)
    seconds = {}
    for size in sizes:
        start = (len(prompts) - size) // 2
        began = time.perf_counter()
        padded(size)(model, by_length[start : start + size], num_new)
        seconds[size] = (time.perf_counter() - began) / size
    return seconds


def left_padded(prompts: Ids, pad: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, (B, L), int64."""
    ids = torch.full((len(prompts), max(map(len, prompts))), pad)
    mask = torch.zeros_like(ids)
    for place, prompt in enumerate(prompts):
        ids[place, ids.shape[1] - len(prompt) :] = torch.tensor(prompt)
        mask[place, ids.shape[1] - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def until_end(tokens: list[int], ends: list[int]) -> list[int]:
    """Without what comes after the first end token."""
    first = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: first + 1]


def end_token_ids(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def pad_token_id(model: Any) -> int:
    return model.generation_config.pad_token_id or 0


class Agreement(NamedTuple):
    """num_different: answers that differ. largest_gap: of the two best logits, where such answers part, at most."""

    num_different: int
    largest_gap: float


@torch.no_grad()
def agreement(model: Any, prompts: Ids, one: Ids, other: Ids) -> Agreement:
    """Whether two arms gave the same answers. The gap is that of a float64 copy of the model.

    other: may have fewer answers, to the first prompts.
    """
    differing = [place for place in range(len(other)) if one[place] != other[place]]
    exact = copy.deepcopy(model).double() if differing else None
    gaps = []
    for place in differing:
        pairs = zip(one[place], other[place], strict=False)
        common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one[place]), len(other[place])))
        ids = torch.tensor([[*prompts[place], *one[place][:common]]])
        best, second = exact(ids).logits[0, -1].topk(2).values.tolist()
        gaps.append(best - second)
    return Agreement(len(differing), max(gaps, default=0.0))


class Ideal(NamedTuple):
    """Operations of both arms: every row computed in full, and every prompt token once. r: tokens per computed row."""

    ordinary: StepFlops
    radix: StepFlops
    r: float

    @property
    def speedup(self) -> float:
        return self.ordinary.total / self.radix.total


def ideal_of(config: Any, prompts: Ids, answers: Ids) -> Ideal:
    """What arithmetic allows. The last token of an answer is never computed, and nothing of two answers is shared."""
    rows, counter = [], config.get_text_config().vocab_size
    for prompt, answer in zip(prompts, answers, strict=True):
        own = np.arange(counter, counter + len(answer) - 1)  # ids that no other row has
        counter += len(answer)
        rows.append(np.concatenate([np.array(prompt, dtype=np.int64), own]))
    plan = build_prefix_plan(np.concatenate(rows), cumulative(np.array([len(row) for row in rows])))
    num_predictions = sum(map(len, answers))
    costs = costs_of(config)
    ordinary, unique = (count(costs, plan, num_predictions) for count in (ordinary_flops, unique_flops))
    return Ideal(ordinary, unique, plan.num_tokens / plan.num_unique_tokens)
