"""Which setting to take: the command to paste, and what other settings would bring that change more than the speed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from radixtrain.report.contents import Setting
from radixtrain.report.formatting import duration, ratio

__all__ = ["best_setting", "command_to_paste", "hints"]

OWN_KEYS = ("--max_seconds",)  # of `report`, which `fit` does not know
USABLE = 0.9  # part of the free memory that a setting may take
CLEARLY = 1.05  # a setting is better than the user's own if it is faster by more than the noise of timings
WORTH_A_HINT = 1.1


def best_setting(own: Setting, settings: Iterable[Setting], free_bytes: float) -> Setting:
    """The fastest of those that leave the optimization as it is: only `max_tokens` differs from the user's own.

    free_bytes: memory that a run can have. The user's own if nothing was predicted, or none is clearly faster.
    """
    if own.seconds_per_epoch is None:
        return own
    same = (each for each in settings if _optimization(each) == _optimization(own))
    fitting = [each for each in same if (each.memory_bytes or 0) <= USABLE * free_bytes]
    fastest = min(fitting, key=_seconds, default=own)
    fits = own in fitting
    return own if fits and _seconds(own) < CLEARLY * _seconds(fastest) else fastest


def command_to_paste(typed: Sequence[str], own: Setting, best: Setting) -> str:
    """`python -m radixtrain fit` with what was typed, and the keys of the best setting that differ.

    typed: the command line after `report`, whose own keys are left out. A key that is there twice has its last value.
    """
    typed = _without_own_keys(typed)
    changed = [f"--data.max_tokens={best.max_tokens}"] if best.max_tokens != own.max_tokens else []
    return shlex.join(["python", "-m", "radixtrain", "fit", *typed, *changed])


def _without_own_keys(typed: Sequence[str]) -> list[str]:
    """Without `OWN_KEYS`, as `--key=value` or as `--key value`."""
    kept, words = [], iter(typed)
    for word in words:
        if word in OWN_KEYS:
            next(words, None)
        elif word.partition("=")[0] not in OWN_KEYS:
            kept.append(word)
    return kept


NO_GAIN = 1.05  # speed-up below which sharing does not pay


def hints(own: Setting, settings: Sequence[Setting]) -> Iterator[str]:
    """Sentences: that nothing is gained; what a larger batch or `group_by_prefix` would bring.

    Both change the steps, so neither is chosen.
    """
    if own.speedup is not None and own.speedup < NO_GAIN:
        yield (
            f"as they are, these rows gain nothing: a step takes {1 / own.speedup:.2f} of the ordinary time. "
            f"--dedup=false is the ordinary trainer; what follows, and fewer breaks, may change that"
        )
    budget = [each for each in settings if each.max_tokens == own.max_tokens]
    grouped = [each for each in budget if each.group_by_prefix and each.batch_size == own.batch_size]
    larger = [
        each for each in budget if each.group_by_prefix == own.group_by_prefix and each.batch_size > own.batch_size
    ]
    if grouped and not own.group_by_prefix and grouped[0].r >= WORTH_A_HINT * own.r:
        yield (
            f"--data.group_by_prefix=true: {_gain(own, grouped[0])}. Rows of one prompt then meet in a step; an epoch "
            f"is still every row once, but steps are less mixed"
        )
    if larger:
        most = max(larger, key=lambda each: each.r)
        enough = min((each for each in larger if each.r >= 0.9 * most.r), key=lambda each: each.batch_size)
        if enough.r >= WORTH_A_HINT * own.r:
            yield (
                f"--data.batch_size={enough.batch_size}: {_gain(own, enough)}. An epoch then has fewer optimizer "
                f"steps, each over more rows, so the learning rate may need to change"
            )


def _gain(own: Setting, other: Setting) -> str:
    text = f"r = {ratio(other.r)} in place of {ratio(own.r)}"
    if own.seconds_per_epoch is None or other.seconds_per_epoch is None:
        return text
    return (
        f"{text}, an epoch in about {duration(other.seconds_per_epoch)} in place of {duration(own.seconds_per_epoch)}"
    )


def _optimization(setting: Setting) -> tuple[int, bool]:
    return setting.batch_size, setting.group_by_prefix


def _seconds(setting: Setting) -> float:
    assert setting.seconds_per_epoch is not None
    return setting.seconds_per_epoch
