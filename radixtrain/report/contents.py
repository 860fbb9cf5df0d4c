"""The contents of a report: numbers, and texts made of them, which the terminal and the page show alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class TreeNode:
    """A run of tokens that the same sequences share, up to where they diverge.

    text: the run decoded, shortened in its middle if it is long.
    num_tokens: of the run.
    num_sequences: that pass through it.
    children: what follows it, the most sequences first.
    num_hidden_children: children that are left out of the picture, and the sequences and tokens in them.
    """

    text: str
    num_tokens: int
    num_sequences: int
    children: tuple[TreeNode, ...] = ()
    num_hidden_children: int = 0
    num_hidden_sequences: int = 0
    num_hidden_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The predicted effect of a run with these settings.

    r: tokens of the rows per computed token. whole_r: tokens of the whole chats per computed token, which is less; None
        if no chat is split into its turns.
    best_r: `least_r` if every step were one micro-batch.
    speedup: predicted, of a training step, against the ordinary padded baseline on this machine; whole_speedup: against
        that of whole chats. None: not predicted.
    seconds_per_epoch: predicted. memory_bytes: predicted peak of a step, weights and optimizer included.
    """

    batch_size: int
    max_tokens: int
    group_by_prefix: bool
    r: float
    best_r: float
    whole_r: float | None = None
    speedup: float | None = None
    whole_speedup: float | None = None
    seconds_per_epoch: float | None = None
    memory_bytes: int | None = None

    @property
    def least_r(self) -> float:
        """Return r against the baseline that computes less."""
        return self.r if self.whole_r is None else self.whole_r

    @property
    def least_speedup(self) -> float | None:
        """Return the speed-up against the same baseline; None if nothing was predicted."""
        return self.speedup if self.whole_speedup is None else self.whole_speedup


class Splitting(NamedTuple):
    """The effect of splitting chats into their turns.

    turns: 0 if no chat is split. changed: turns that have other tokens in the whole chat; templates leave out the
        thinking of earlier turns, for instance.
    whole_share: tokens of whole chats for each token of the rows.
    """

    turns: int = 0
    changed: int = 0
    whole_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row at the place where it diverges from the others.

    where: `file:line`. before: the text just before. value: what differs. after: the text that follows it.
    """

    where: str
    before: str
    value: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Break:
    """Why near-identical prompts diverge early.

    cause: a date, a UUID, a name, the order of tools, white space, several prompts, the order of the examples ...
    num_sequences: sequences affected. num_values: distinct values there; no value counts as one.
    at_token: where they diverge, the median.
    tokens_saved: computed tokens of an epoch that moving it to the end of the prompt saves; for an order, white space
        or a stray version: that giving all rows the same saves. tokens_with_others: once other breaks are fixed.
    advice: a sentence on what to do about it.
    """

    cause: str
    num_sequences: int
    num_values: int
    at_token: int
    tokens_saved: int
    tokens_with_others: int
    advice: str
    examples: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Everything that `radixtrain report` found.

    length_quantiles: of the samples in tokens: `{"min": 12, "10 %": 40, "50 %": ..., "90 %", "99 %", "max"}`.
    num_prompts: shared prompts, each counted once. tree: its root has an empty text.
    splitting: of chats into their turns.
    settings: a grid of batch sizes and max_tokens; best: one of them, None if nothing was predicted; command: the best
        one as a command to paste.
    num_epoch_tokens: tokens of an epoch with weighted sources; 0 if each row occurs once.
    environment: machine and versions, for the foot of the page.
    notes: sentences: what was not predicted and why, what is estimated from a sample of how many rows.
    hints: sentences: what a larger batch or group_by_prefix would bring.
    """

    title: str
    model: str
    num_rows: int
    num_samples: int
    num_tokens: int
    num_unique_tokens: int
    num_labels: int
    num_prompts: int
    length_quantiles: dict[str, int]
    max_length: int | None
    num_over_length: int
    longest: int
    sources: dict[str, int]
    tree: TreeNode
    current: Setting
    settings: tuple[Setting, ...]
    best: Setting | None
    command: str
    breaks: tuple[Break, ...]
    splitting: Splitting
    environment: dict[str, str]
    num_epoch_tokens: int = 0
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


MINUTE, HOUR = 60, 3600


def ratio(value: float) -> str:
    """Format three digits without an exponent: `1.84`, `21`, `19.9`, `1,250`."""
    digits = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return digits if "." not in digits else digits.rstrip("0").rstrip(".")


def rounded(value: float) -> str:
    """Format an estimated count with three significant digits: `349,000`; an integer below 1,000 stays exact."""
    return f"{round(float(f'{value:.3g}')):,}"


def duration(seconds: float) -> str:
    """Format seconds: `< 1 s`, `1.4 s`, `45 s`, `12 min 5 s`, `3 h 20 min`, `30 h`."""
    if seconds < 1:
        return "< 1 s"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < HOUR - 0.5:
        large, small, names = *divmod(round(seconds), MINUTE), ("min", "s")
    else:
        large, small, names = *divmod(round(seconds / MINUTE), 60), ("h", "min")
    parts = [f"{number:,} {name}" for number, name in zip((large, small), names, strict=True) if number]
    return " ".join(parts)


def setting_name(setting: Setting) -> str:
    """Name a setting: `batch_size 64, max_tokens 8,192`, and `group_by_prefix` if it is on."""
    grouped = ", group_by_prefix" if setting.group_by_prefix else ""
    return f"batch_size {setting.batch_size:,}, max_tokens {setting.max_tokens:,}{grouped}"


def headline(report: DataReport) -> str:
    """Summarise the data in one sentence: what an epoch holds, and what the user's own settings leave to compute."""
    num_tokens, own = report.num_epoch_tokens or report.num_tokens, report.current
    tokens = f"{num_tokens:,} tokens{' in an epoch' if report.num_epoch_tokens else ''}"
    if own.r < 1.005:
        return f"{tokens}, none of them shared within a micro-batch: r = 1"
    computed = rounded(num_tokens / own.r)
    if own.whole_r is None:
        return f"{tokens}, of which about {computed} are computed: r = {ratio(own.r)}"
    whole = round(num_tokens * report.splitting.whole_share)
    return (
        f"{whole:,} tokens as whole chats, {tokens} as the {report.splitting.turns:,} turns of which about {computed} "
        f"are computed: {both_r(own)}"
    )


def speedup(setting: Setting) -> str:
    """Describe the predicted step in few words: `5.2x as fast`; without a prediction, r."""
    fold = setting.least_speedup
    return f"r = {ratio(setting.least_r)}" if fold is None else f"{ratio(fold)}x as fast"


def both_r(setting: Setting) -> str:
    """Describe r, against both baselines if chats are split."""
    if setting.whole_r is None:
        return f"r = {ratio(setting.r)}"
    of_chats = f"{ratio(setting.whole_r)} against whole chats, as TRL trains them"
    return f"r = {of_chats}, {ratio(setting.r)} against the same rows"


def split_turns(split: Splitting) -> str:
    """Describe the effect of splitting chats into turns, in a sentence; empty if none is split."""
    if not split.turns:
        return ""
    differ = f"{split.changed:,} of {split.turns:,} turns have" if split.changed else "No turn has"
    return (
        f"Chats are split, so each turn is what the model sees at inference. {differ} other tokens in the whole chat."
    )


def prediction(setting: Setting) -> str:
    """Describe the predicted gain of a training step with the setting, in a sentence."""
    if setting.speedup is None:
        return "The speed-up on this machine was not predicted."
    of_rows = f"{ratio(setting.speedup)}x the speed of an ordinary padded one"
    if setting.whole_speedup is None:
        return f"A training step is predicted to run at {of_rows} on this machine."
    of_chats = f"{ratio(setting.whole_speedup)}x the speed of one on whole chats"
    return f"A training step is predicted to run at {of_chats} on this machine, and {of_rows} of the same rows."


def with_others(each: Break) -> str:
    """Say what the fix saves on top of the other fixes, if that differs much from what it saves alone."""
    if 0.8 * each.tokens_with_others <= each.tokens_saved <= 1.25 * each.tokens_with_others:
        return ""
    return f"; {rounded(each.tokens_with_others)} once the others here are fixed"
