"""Trees of token ids, as plans: what one layer of attention is measured on."""

from collections.abc import Callable
from functools import partial

import numpy as np

from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["PLANS", "TINY_PLANS", "Plans", "one_prompt"]

Plans = dict[str, Callable[[], PrefixPlan]]


def one_prompt(prompt: int, own: int, number: int) -> PrefixPlan:
    """Sequences of `prompt` shared and `own` tokens."""
    return plan_of([[*range(prompt), *[-index - 1] * own] for index in range(number)])


def three_levels(trunk: int, middle: int, own: int, groups: int) -> PrefixPlan:
    """A trunk for all, a middle for each group, and tokens of each of four sequences' own."""
    middles = [[*range(trunk), *[-group - 1] * middle] for group in range(groups)]
    return plan_of([[*middles[index // 4], *[-index - 100] * own] for index in range(groups * 4)])


def comb(forks: int, between: int, own: int) -> PrefixPlan:
    """A trunk from which a sequence forks after every `between` tokens."""
    trunk = list(range(forks * between))
    return plan_of([[*trunk[: (fork + 1) * between], *[-fork - 1] * own] for fork in range(forks)])


def plan_of(sequences: list[list[int]]) -> PrefixPlan:
    """Tokens below 0 are in no trunk."""
    tokens = np.concatenate(sequences)
    return build_prefix_plan(np.where(tokens < 0, 1_000_000 - tokens, tokens), np.cumsum([0, *map(len, sequences)]))


PLANS: Plans = {
    "one prompt": partial(one_prompt, 2048, 256, 32),
    "three levels": partial(three_levels, 1024, 128, 256, 8),
    "comb of 200 forks": partial(comb, 200, 25, 26),
}
TINY_PLANS: Plans = {
    "one prompt": partial(one_prompt, 32, 8, 4),
    "three levels": partial(three_levels, 16, 8, 4, 4),
    "comb of 4 forks": partial(comb, 4, 8, 7),
}
