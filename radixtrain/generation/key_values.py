"""What a `RadixCache` stores for a prompt: the keys and values of its tokens, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray


class LayerRows(NamedTuple):
    """Keys and values of some tokens in one layer, (n, K, H) each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class KeyValues:
    """The keys and values of some tokens of a sequence, in order.

    layers: of a whole forward pass, by the number of the attention call in it. Shared by all tokens of that pass.
    rows: (n,), int64. which of its rows these tokens are.
    """

    layers: list[LayerRows]
    rows: IntArray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> KeyValues:
        return KeyValues(self.layers, self.rows[part])

    def of_layer(self, number: int) -> LayerRows:
        """Return keys and values of one layer: views if the tokens are consecutive rows."""
        keys, values = self.layers[number]
        first, end = int(self.rows[0]), int(self.rows[-1]) + 1
        if end - first == len(self.rows):  # a row below another comes later
            return LayerRows(keys[first:end], values[first:end])
        rows = torch.from_numpy(self.rows).to(keys.device, non_blocking=True)
        return LayerRows(keys.index_select(0, rows), values.index_select(0, rows))

    def free(self, number: int) -> None:
        """Free the memory of one layer of the whole pass."""
        keys, values = self.layers[number]
        self.layers[number] = LayerRows(keys.new_empty(0), values.new_empty(0))

    def alone(self) -> KeyValues:
        """Return these tokens in memory of their own, so that the rest of the pass may be freed."""
        if len(self.rows) == len(self.layers[0].keys):
            return self
        layers = [LayerRows(*(x.clone() for x in self.of_layer(number))) for number in range(len(self.layers))]
        return KeyValues(layers, np.arange(len(self.rows)))
