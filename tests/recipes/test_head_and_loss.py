"""The benchmark of head and loss: a time is printed only if both have one loss and one gradient."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixtrain.kernels import loss_chunks

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks" / "head_and_loss.py"
import head_and_loss as benchmark  # noqa: E402

TINY = benchmark.Shape(num_predictions=40, hidden_size=4, vocab_size=30)


def test_what_a_user_types():
    options = ["--vocab_size", "30", "--hidden_size", "4", "--predictions", "40", "--repeats", "1", "--chunk_rows", "8"]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--dtype", "bfloat16"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    first, second, _, *table = ran.stdout.splitlines()
    assert f"1 threads, bfloat16, torch {torch.__version__}" in first
    assert second.startswith("V = 30, D = 4, P = 40: the logits are 0.0 MB")
    assert [line.split("|")[1].strip() for line in table[2:]] == ["plain", "fused, 40 rows a chunk", "fused, about 8"]
    assert {line.count("|") for line in table} == {7}
    assert ran.stderr == ""


def test_ratios_are_those_of_the_fused_ones_and_the_chunks_are_put_back(capsys):
    before = loss_chunks.CHUNK_ROWS, loss_chunks.MIN_CHUNK_ELEMENTS
    assert len(benchmark.run(TINY, torch.float32, 1, [4, 8])) == 3
    after = loss_chunks.CHUNK_ROWS, loss_chunks.MIN_CHUNK_ELEMENTS
    assert after == before
    assert capsys.readouterr().out.splitlines()[3].startswith("| plain |")


@pytest.mark.parametrize("wrong", ["loss", "d_hidden", "d_weight"])
def test_what_differs_is_not_timed(wrong, monkeypatch):
    def damaged(hidden, weight, labels):
        """The right value with a wrong gradient, or the other way round."""
        values = {"d_hidden": hidden.sum(), "d_weight": weight.sum(), "loss": torch.ones(())}
        extra = values[wrong]
        return benchmark.plain_loss(hidden, weight, labels) + (extra if wrong == "loss" else extra - extra.detach())

    monkeypatch.setattr(benchmark, "fused_loss", damaged)
    with pytest.raises(RuntimeError, match=f"and plain differ in {wrong}"):
        benchmark.run(TINY, torch.float32, 1, [])


def test_memory_is_counted_beyond_the_heads_gradient():
    """By hand, V = 4,096 and D = 2 in one chunk: the logits, and the gradient of the hidden rows."""
    shape = benchmark.Shape(num_predictions=128, hidden_size=2, vocab_size=4096)
    given = benchmark.inputs(shape, torch.float32)
    peaks = benchmark.peaks(benchmark.Arm("fused", benchmark.fused_loss), given)
    assert peaks == pytest.approx([128 * 4096 * 4 / 1e6] * 2, rel=0.02)
    plain = benchmark.peaks(benchmark.Arm("plain", benchmark.plain_loss), given)
    assert min(plain) > 1.9 * max(peaks)
