"""Keys and values by slot: written by passes, copied between lanes, grown with the pool."""

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain.generation.slots import SlotPool
from radixtrain.generation.store import KeyValueStore
from radixtrain.tree.cached_layout import CachedLayout, Paths


def store(capacity: int = 6) -> KeyValueStore:
    pool = SlotPool()
    pool.allocate(capacity)
    return KeyValueStore(pool)


def layout(slots: list[int], rows: list[int] | None = None) -> CachedLayout:
    written = None if rows is None else torch.tensor(rows)
    return CachedLayout(3, 3, written, torch.tensor(slots), (), Paths(np.array([0, 3]), np.arange))


def rows_of(*values: float, heads: int = 2, head_dim: int = 4) -> Tensor:
    """Each row has one value."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None].expand(-1, heads, head_dim).clone()


def values(rows: Tensor) -> list[float]:
    """And what each row holds by now."""
    assert (rows == rows[:, :1, :1]).all()
    return rows[:, 0, 0].tolist()


def written(each: KeyValueStore, slots: list[int], *numbers: float) -> None:
    """In two layers, keys as given, values negative, those of the second layer ten times as large."""
    for call in range(2):
        rows = rows_of(*numbers) * 10**call
        each.write(call, rows, -rows, layout(slots))


class TestWrite:
    def test_tensors_appear_with_the_first_pass(self) -> None:
        each = store()
        assert (each.bytes_per_slot, each.num_bytes) == (0, 0)
        key, value = each.write(0, rows_of(1, 2, 3), rows_of(4, 5, 6, head_dim=3), layout([4, 0, 5]))
        assert (key.shape, value.shape, key.dtype) == ((6, 2, 4), (6, 2, 3), torch.float64)
        assert values(key) == [2, 0, 0, 0, 1, 3] and values(value) == [5, 0, 0, 0, 4, 6]

    def test_rows_that_were_there_stay(self) -> None:
        each = store()
        written(each, [0, 1, 2], 1, 2, 3)
        key, value = each.write(1, rows_of(7, 8, 9), rows_of(7, 8, 9), layout([3, 1, 5]))
        assert values(key) == [10, 8, 30, 7, 0, 9] and values(value) == [-10, 8, -30, 7, 0, 9]
        assert values(each.calls[0][0]) == [1, 2, 3, 0, 0, 0], "another layer has its own"

    def test_a_row_in_several_slots(self) -> None:
        """What is too short to be kept is computed once and goes to the lane of each sequence."""
        key, _ = store().write(0, rows_of(1, 2, 3), rows_of(1, 2, 3), layout([5, 0, 2, 4], rows=[2, 0, 0, 1]))
        assert values(key) == [1, 0, 1, 0, 2, 3]

    def test_a_row_in_no_slot(self) -> None:
        key, _ = store().write(0, rows_of(1, 2, 3), rows_of(1, 2, 3), layout([1], rows=[1]))
        assert values(key) == [0, 2, 0, 0, 0, 0]

    def test_grows_with_the_pool(self) -> None:
        each = store(3)
        written(each, [0, 1, 2], 1, 2, 3)
        last = int(each.pool.allocate(5)[-1])
        key, value = each.write(0, rows_of(7, 8, 9), -rows_of(7, 8, 9), layout([3, 4, last]))
        assert len(key) == len(value) == each.pool.capacity > 6
        assert values(key)[:5] == [1, 2, 3, 7, 8] and values(key)[last] == 9
        assert len(each.calls[1][0]) == 3, "the second layer grows when it is written"


class TestCopy:
    def test_in_every_layer(self) -> None:
        each = store()
        written(each, [0, 1, 2], 1, 2, 3)
        each.copy(np.array([0, 2]), np.array([5, 3]))
        assert values(each.calls[0][0]) == [1, 2, 3, 3, 0, 1] and values(each.calls[1][1]) == [
            -10,
            -20,
            -30,
            -30,
            0,
            -10,
        ]

    def test_to_slots_that_are_new_in_the_pool(self) -> None:
        """It was an IndexError: the first answer that was kept after a short prompt."""
        each = store(3)
        written(each, [0, 1, 2], 1, 2, 3)
        new = each.pool.allocate(3)
        each.copy(np.array([0, 1, 2]), new)
        for rows in (each.calls[0][0], -each.calls[0][1], each.calls[1][0] / 10):
            assert torch.tensor(values(rows))[new].tolist() == [1, 2, 3]

    def test_nothing(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        store().copy(none, none)
        store().copy(np.array([0]), np.array([1]))  # before the first pass
        each = store()
        written(each, [0, 1, 2], 1, 2, 3)
        each.copy(none, none)
        assert values(each.calls[0][0]) == [1, 2, 3, 0, 0, 0]


class TestZero:
    def test_in_every_layer(self) -> None:
        each = store()
        written(each, [0, 1, 2], 1, 2, 3)
        each.zero(np.array([0, 2, 4]))
        assert [values(rows) for stored in each.calls for rows in stored] == [
            [0, 2, 0, 0, 0, 0],
            [0, -2, 0, 0, 0, 0],
            [0, 20, 0, 0, 0, 0],
            [0, -20, 0, 0, 0, 0],
        ]

    def test_slots_that_are_new_in_the_pool(self) -> None:
        each = store(3)
        written(each, [0, 1, 2], 1, 2, 3)
        new = each.pool.allocate(4)
        each.zero(np.append(new, [1]))
        each.zero(new)
        assert values(each.calls[0][0]) == [1, 0, 3]

    def test_nothing(self) -> None:
        store().zero(np.array([0]))
        each = store()
        written(each, [0, 1, 2], 1, 2, 3)
        each.zero(np.zeros(0, dtype=np.int64))
        assert values(each.calls[0][0]) == [1, 2, 3, 0, 0, 0]

    def test_what_is_not_finite(self) -> None:
        """Zero, and not zero times what was there."""
        each = store()
        written(each, [0, 1, 2], float("nan"), float("inf"), 3)
        each.zero(np.array([0, 1]))
        assert values(each.calls[0][0]) == [0, 0, 3, 0, 0, 0]


class TestMemory:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_bytes(self, dtype: torch.dtype) -> None:
        each = store()
        for call in range(2):
            rows = rows_of(1, 2, 3).to(dtype)
            each.write(call, rows, rows, layout([0, 1, 2]))
        assert each.bytes_per_slot == 2 * 2 * 2 * 4 * dtype.itemsize  # layers, keys and values, heads, head dim
        assert each.num_bytes == 6 * each.bytes_per_slot and each.device == torch.device("cpu")

    def test_clear_gives_it_back(self) -> None:
        each = store()
        written(each, [0, 1, 2], 1, 2, 3)
        each.clear()
        assert each.num_bytes == 0
        key, _ = each.write(0, rows_of(1, 2, 3), rows_of(1, 2, 3), layout([0, 1, 2]))
        assert values(key) == [1, 2, 3, 0, 0, 0]
