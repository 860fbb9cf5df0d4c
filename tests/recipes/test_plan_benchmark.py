"""The benchmark of the plan: its rows are the paper's, and a time is printed only if both agree."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
import plan as benchmark  # noqa: E402


def fold(ids, positions, cu_seqlens):
    """What `radix_mlp.compute_fold_and_scatter` returns: rows are numbered as they come."""
    rows, scatter, gather = {}, [], []
    for start, end in pairwise(cu_seqlens.tolist()):
        history = ()
        for token in range(start, end):
            history = (*history, int(ids[token]), int(positions[token]))
            if history not in rows:
                rows[history] = len(rows)
                gather.append(token)
            scatter.append(rows[history])
    scatter, gather = np.array(scatter, dtype=np.uint32), np.array(gather, dtype=np.uint32)
    return ids[gather], positions[gather], scatter, gather


def small_rows():
    rng = np.random.default_rng(0)
    yield benchmark.Row("first", "shared", benchmark.shared(rng, 5, 8, 0.5))
    yield benchmark.Row("first", "comb", benchmark.comb(rng, 6))
    yield benchmark.Row("second", "prefixes", benchmark.prefixes(rng, 5))


def test_the_rows_are_the_papers():
    rows = list(benchmark.table5(np.random.default_rng(0)))
    shapes = [(len(row.sequences), *{len(sequence) for sequence in row.sequences}) for row in rows]
    assert shapes == [
        *((batch_size, 512) for batch_size in (4, 8, 16, 32, 64, 256, 2048)),
        *((32, length) for length in (128, 256, 512, 1024, 2048)),
        *[(32, 512)] * 5,
        (1, 512),
        *[(32, 512)] * 2,
    ]
    for row, ratio in zip(rows[12:17], (0.0, 0.25, 0.5, 0.75, 1.0), strict=True):
        prompt = int(512 * ratio)
        assert len({tuple(sequence[:prompt]) for sequence in row.sequences}) == 1
        assert prompt == 512 or len({tuple(sequence[: prompt + 2]) for sequence in row.sequences}) == 32


def test_the_larger_rows_reach_a_million_tokens_and_65536_sequences():
    rows = [benchmark.pack(row.sequences) for row in benchmark.larger(np.random.default_rng(0))]
    assert max(len(row.ids) for row in rows) == 1_000_000
    assert max(len(row.cu_seqlens) - 1 for row in rows) == 65_536


@pytest.mark.parametrize("damage", [None, "fold", "scatter", "positions", "number"])
def test_what_differs_is_not_timed(damage, monkeypatch):
    def damaged(*batch):
        ids, positions, scatter, gather = (array.copy() for array in fold(*batch))
        if damage == "number":
            return ids[:-1], positions[:-1], scatter, gather[:-1]
        if damage is not None:
            array = {"fold": gather, "scatter": scatter, "positions": positions}[damage]
            array[-1] = array[-1] - 1
        return ids, positions, scatter, gather

    monkeypatch.setattr(benchmark, "compute_fold_and_scatter", damaged)
    if damage is None:
        assert len(benchmark.run(small_rows(), 1)) == 3
    else:
        with pytest.raises(RuntimeError, match="differ"):
            benchmark.run(small_rows(), 1)


def test_the_table_with_the_comparison(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "compute_fold_and_scatter", fold)
    ratios = benchmark.run(small_rows(), 1)
    printed = capsys.readouterr().out.splitlines()
    assert "| shared | 40 | 24 | 1.67 |" in printed[4]
    assert f"| **{ratios[0]:.2f}** | " in printed[4]
    groups = [line for line in printed if line.startswith("| *")]
    assert groups == ["| *first* | | | | | | | | | |", "| *second* | | | | | | | | | |"]
    assert {line.count("|") for line in printed if line} == {11}


def test_both_are_timed_on_the_same_four_arrays():
    for row in small_rows():
        batch = benchmark.pack(row.sequences)
        ids, positions, inverse, gather = benchmark.plan_and_unique_ids(batch)
        assert ids[inverse].tolist() == batch.ids.tolist()
        assert positions[inverse].tolist() == batch.theirs[1].tolist()
        assert batch.ids[gather].tolist() == ids.tolist()


def test_the_ratio_is_that_of_the_fastest_calls(monkeypatch):
    """Theirs takes 2 s, ours 1 s and now and then, as on a busy machine, ten times as long."""
    batch = benchmark.pack(next(small_rows()).sequences)
    times = iter([1.0, 1.0, 1.0, 10.0, 3.0, 2.0, 1.0, 30.0, 20.0, 10.0, 3.0, 2.0])
    monkeypatch.setattr(benchmark, "seconds", lambda call, num_calls: next(times))
    timing = benchmark.measure(batch, 3, fold)
    assert (timing.ours, timing.theirs, timing.layout, timing.ratio) == (1.0, 2.0, 3.0, 2.0)


def test_without_radix_mlp_it_says_so_and_times_ours(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "compute_fold_and_scatter", None)
    benchmark.header()
    assert benchmark.run(small_rows(), 1) == []
    printed = capsys.readouterr().out
    assert "radix-mlp is not installed, so its columns are empty: pip install radix-mlp==0.0.2" in printed
    assert "| prefixes | 15 | 5 | 3.00 |" in printed
