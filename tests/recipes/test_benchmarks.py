"""The benchmarks on generated numbers: of head and loss, of trainers. A time is printed only if both
arms agree.
"""

import os
import subprocess
import sys
from pathlib import Path

import head_and_loss
import pytest
import torch
from tiers import FULL

BENCHMARKS = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"


class TestHeadAndLoss:
    TINY = head_and_loss.Shape(num_predictions=40, hidden_size=4, vocab_size=30)

    @FULL
    def test_what_a_user_types(self):
        sizes = {"vocab_size": 30, "hidden_size": 4, "predictions": 40, "repeats": 1, "chunk_rows": 8}
        options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        ran = subprocess.run(
            [sys.executable, str(BENCHMARKS / "head_and_loss.py"), *options, "--dtype", "bfloat16"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        first, second, _, *table = ran.stdout.splitlines()
        assert "1 threads" in first and f"bfloat16, torch {torch.__version__}" in first
        assert second.startswith("V = 30, D = 4, P = 40: the logits are 0.0 MB")
        arms = [line.split("|")[1].strip() for line in table[2:]]
        assert arms == ["plain", "fused, 40 rows a chunk", "fused, about 8"]
        assert {line.count("|") for line in table} == {7}
        assert ran.stderr == ""

    @pytest.mark.parametrize("wrong", ["loss", "d_hidden", "d_weight"])
    def test_what_differs_is_not_timed(self, wrong, monkeypatch):
        def damaged(hidden, weight, labels):
            """The right value with a wrong gradient, or the other way round."""
            values = {"d_hidden": hidden.sum(), "d_weight": weight.sum(), "loss": torch.ones(())}
            extra = values[wrong]
            return head_and_loss.plain_loss(hidden, weight, labels) + (
                extra if wrong == "loss" else extra - extra.detach()
            )

        monkeypatch.setattr(head_and_loss, "fused_loss", damaged)
        with pytest.raises(RuntimeError, match=f"and plain differ in {wrong}"):
            head_and_loss.run(self.TINY, torch.float32, 1, [])


@FULL
@pytest.mark.parametrize("way", ["`RadixCollator`", "`share_prefixes`, GRPO with generation"])
def test_a_part_of_r(tmp_path: Path, way: str) -> None:
    """any_trainer.py --ranges: both arms run, and r is that of the rows."""
    import any_trainer

    _, tokenizer = any_trainer.made_model(tmp_path, layers=1, hidden=64)
    r, folds = any_trainer.part_of_r(any_trainer.WAYS[way], any_trainer.Bench(tmp_path, 4, tokenizer, 128), 2)
    assert r > 1.9 and len(folds) == 2 and min(folds) > 0


@FULL
def test_loss_on_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """any_trainer.py --every_token: each arm trains in the process that measures it."""
    import any_trainer

    monkeypatch.setattr(any_trainer, "LARGE_VOCABULARY", 64)
    assert all(min(any_trainer.one_of_every_token(name)) > 0 for name in any_trainer.EVERY_TOKEN)
