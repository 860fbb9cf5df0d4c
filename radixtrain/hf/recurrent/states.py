"""The cache that a mixer talks to while it runs on a tree.

transformers has one protocol for all layers with a state, the methods of `transformers.cache_utils.Cache`. A mixer
reads its states by `get_conv_state` and `get_recurrent_state`, and leaves new ones by `update_conv_state`, which
returns the earlier columns with the new ones, and by `update_recurrent_state`. `ForkedStates` speaks it for one call on
several runs: it gives each run the state that it starts from and keeps the final ones, both with their gradients.
Nothing is written in place. Before transformers 5.21 a mixer reads its states as `cache.layers[layer_idx]` has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ForkedStates", "States"]

States = dict[tuple[str, int], Tensor]
"""The states of some runs, by kind (`conv` or `recurrent`) and number; the first axis counts the runs."""


@dataclass(frozen=True)
class StatesOfLayer:
    """What mixers read before transformers 5.21, by the number of the state; a state that is not there is None."""

    conv_states: Mapping[int, Tensor | None]
    recurrent_states: Mapping[int, Tensor | None]
    record_past: bool = True  # as `ForkedStates.is_recording_past`


class ForkedStates:
    """What stands in for Hugging Face's cache.

    past: the states that the runs start from; empty for runs that start from nothing.
    final: the states after the last row, those of padding included, so only calls without padding may be read.
    """

    def __init__(self, past: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        self.past: States = dict(past or {})
        self.final: States = {}

    @property
    def layers(self) -> Mapping[int, StatesOfLayer]:
        """The states that the runs start from, which are those of every layer that is asked for."""
        states = StatesOfLayer(self._past_of("conv"), self._past_of("recurrent"))
        return defaultdict(lambda: states)

    def _past_of(self, kind: str) -> Mapping[int, Tensor | None]:
        states: defaultdict[int, Tensor | None] = defaultdict(lambda: None)
        states.update({number: state for (of, number), state in self.past.items() if of == kind})
        return states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last columns of the inputs of a convolution: (runs, channels, width). None: start from nothing."""
        return self.past.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state: (runs, ...) in the shape and dtype that the mixer left. None: start from nothing."""
        return self.past.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Keep the last `conv_kernel_size` columns, with zeros before a sequence that has fewer.

        conv_states: (runs, channels, length). the new columns. Returns the earlier ones and these.
        """
        past = self.past.get(("conv", state_idx))
        columns = conv_states if past is None else torch.cat([past, conv_states], dim=-1)
        width = conv_kernel_size or conv_states.shape[-1]
        missing = max(0, width - columns.shape[-1])
        self.final["conv", state_idx] = nn.functional.pad(columns, (missing, 0))[..., -width:]
        return columns

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep a final state, (runs, ...), and return it."""
        self.final["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True keeps a mixer off the path for one generated token, which writes into the state in place."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the runs start from states."""
        return bool(self.past)
