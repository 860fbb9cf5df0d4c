"""Which metrics of DPO and KTO are differences of nearly equal numbers, and the sizes of their terms.

- a reward is beta (logp - ref_logp), and ref_logp follows from the reward and logp;
- a margin is a difference of two rewards;
- the mean of the logits over the vocabulary is a sum of numbers of both signs, of order one in the tiny model;
- KTO's kl is a difference of two mean log-probabilities of completions as long as those whose `logps` are logged.
"""

from collections.abc import Callable
from functools import partial

from trainer_harness import Entry

__all__ = ["BETA", "differences"]

BETA = 0.1
ANSWERS = ("chosen", "rejected")


def differences(prefix: str = "") -> dict[str, Callable[[Entry], float]]:
    """For `harness.compare`. prefix: `eval_` for the metrics of `evaluate()`."""
    found: dict[str, Callable[[Entry], float]] = {
        f"{prefix}rewards/margins": lambda entry: sum(reward_terms(entry, prefix, answer) for answer in ANSWERS),
        f"{prefix}kl": lambda entry: sum(abs(entry[f"{prefix}logps/{answer}"]) for answer in ANSWERS),
    }
    for answer in ANSWERS:
        found[f"{prefix}rewards/{answer}"] = partial(reward_terms, prefix=prefix, answer=answer)
        found[f"{prefix}logits/{answer}"] = lambda entry: 1.0
    return found


def reward_terms(entry: Entry, prefix: str, answer: str) -> float:
    """The sizes of the two terms of a reward."""
    logp, reward = abs(entry[f"{prefix}logps/{answer}"]), abs(entry[f"{prefix}rewards/{answer}"])
    return BETA * 2 * logp + reward
