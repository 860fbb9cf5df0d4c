"""What a report says: plain numbers and texts, which the terminal and the page show alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radixtrain.data.division import Division


@dataclass(frozen=True, kw_only=True)
class TreeNode:
    """A run of tokens that the same sequences share, up to the place where they part.

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
    """What a run would be with these settings.

    r: tokens of the rows per computed token. whole_r: tokens of the whole chats per computed token, which is less; None
        if no chat is split into its turns.
    best_r: `least_r` if every step were one micro-batch.
    activation_checkpointing: the share of the decoder layers that recompute.
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
    activation_checkpointing: float = 0.0

    @property
    def least_r(self) -> float:
        """Against the baseline that computes less."""
        return self.r if self.whole_r is None else self.whole_r

    @property
    def least_speedup(self) -> float | None:
        """Against the same baseline; None if nothing was predicted."""
        return self.speedup if self.whole_speedup is None else self.whole_speedup


class Splitting(NamedTuple):
    """What splitting chats into their turns does.

    turns: 0 if no chat is split. changed: turns of which the whole chat has other tokens; templates leave out the
        thinking of earlier turns, for instance.
    whole_share: tokens of whole chats for each token of the rows.
    """

    turns: int = 0
    changed: int = 0
    whole_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row at the place where it parts from the others.

    where: `file:line`. before: the text just before. value: what differs. after: the text that follows it.
    """

    where: str
    before: str
    value: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Break:
    """Why near-identical prompts part early.

    cause: a date, a UUID, a name, the order of tools, white space, several prompts, the order of the examples ...
    num_sequences: that it touches. num_values: different values there, none included.
    at_token: where they part, the median.
    tokens_saved: computed tokens of an epoch that are saved if it stood at the end of the prompt; for an order, white
        space or a stray version: if all rows had the same. tokens_with_others: if the other breaks are fixed already.
    advice: what to do about it, a sentence.
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
    settings: a grid of batch sizes and max_tokens; best: one of them, None if nothing was predicted; command: it as a
        command to paste.
    num_epoch_tokens: of an epoch, in which sources with a weight come more or less often; 0 if each row comes once.
    environment: machine and versions, for the foot of the page.
    divisions: of the steps of the current setting on several devices, every branch taken; sent_bytes are of all layers.
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
    divisions: tuple[Division, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def times(self) -> tuple[float, ...]:
        """Divide predicted seconds of each division by those of data parallel on as many devices."""
        parallel = {each.num_ranks: each.seconds for each in self.divisions if each.sp_size == 1}
        return tuple(each.seconds / parallel[each.num_ranks] for each in self.divisions)
