"""100 AdamW steps through the real command line: on unique tokens the losses are those of the ordinary trainer.

All runs compute in float64, so one bar holds on every processor, and no rounding of 100 steps hides an error of the
same sign in each. The initial weights are fractions of powers of two that NumPy draws as integers, equal on every
processor too. So the committed losses of a release are those of the next one:

    RADIXTRAIN_WRITE_GOLDEN=1 python -m pytest tests/claims/test_trajectory.py -k golden

writes them anew; what made that necessary has to be said in the change that does it.
"""

import json
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer

from radixtrain.collators.steps import StepCollator
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL
from tests.support.runs import logged

pytestmark = FULL

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "qwen3_tiny_100_steps.txt"
REGENERATE = "RADIXTRAIN_WRITE_GOLDEN=1 python -m pytest tests/claims/test_trajectory.py -k golden"
NUM_STEPS, BATCH_SIZE = 100, 8
LEARNING_RATE = 1e-3
# Relative, of each step's loss and norm of the gradient. AdamW divides each difference by the size of its gradient, so
# 100 steps raise the 1e-16 of a sum in another order; a learning rate off by 2e-7 is found.
BAR = 1e-9

SYSTEM = (
    "You keep the shop and name the shelf of a thing. Fruit is on shelf one, tools on shelf two, paper on shelf three."
)
MANNERS = {" Say the shelf.": "Shelf {}.", " One word.": "{}"}
THINGS = {"apple": "one", "plum": "one", "hammer": "two", "saw": "two", "card": "three"}

Curves = dict[str, npt.NDArray[np.float64]]


def chats() -> list[dict[str, Any]]:
    """Five optimizer steps of eight chats that fork in the system prompt, at the thing and at its number."""
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM + manner},
                {"role": "user", "content": f"Where is the {thing}, number {number}?"},
                {"role": "assistant", "content": answer.format(shelf)},
            ]
        }
        for number in range(4)
        for thing, shelf in THINGS.items()
        for manner, answer in MANNERS.items()
    ]


def shuffled_inside_steps(rows: list[Any]) -> list[Any]:
    """The same rows in every optimizer batch, in another order."""
    draw = random.Random(0)
    steps = [rows[first : first + BATCH_SIZE] for first in range(0, len(rows), BATCH_SIZE)]
    return [row for step in steps for row in draw.sample(step, len(step))]


@dataclass(frozen=True)
class Arm:
    """One run. `max_tokens` is the budget of a micro-batch: 0 for the longest row, so each row has its own."""

    dedup: bool
    shuffled: bool = False
    max_tokens: int = 4096
    learning_rate: float = LEARNING_RATE


ORDINARY = Arm(dedup=False)
UNIQUE = Arm(dedup=True)


@dataclass(frozen=True)
class Shop:
    """A folder with model/, train.jsonl and shuffled.jsonl, and what the rows are in tokens."""

    folder: Path
    rows: list[list[int]]

    def flags(self, arm: Arm, output_dir: Path) -> list[str]:
        longest = max(map(len, self.rows))
        flags = {
            "output_dir": output_dir,
            "dedup": str(arm.dedup).lower(),
            "model.model_name_or_path": self.folder / "model",
            "model.dtype": "float64",
            "model.learning_rate": repr(arm.learning_rate),
            "model.lr_scheduler_type": "constant",  # a decay would shrink the differences that are looked for
            "data.train_file": self.folder / ("shuffled.jsonl" if arm.shuffled else "train.jsonl"),
            "data.assistant_only_loss": "false",  # loss on every token, the shared ones too
            "data.shuffle_dataset": "false",
            "data.batch_size": BATCH_SIZE,
            "data.max_length": longest,
            "data.max_tokens": arm.max_tokens or longest,
            "data.dataloader_num_workers": 0,
            "trainer.max_epochs": NUM_STEPS * BATCH_SIZE // len(self.rows),
            "trainer.log_every_n_steps": 1,
            "trainer.enable_progress_bar": "false",
        }
        return [f"--{name}={value}" for name, value in flags.items()]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The golden file holds a checksum of the tokens."""
    import tiny

    folder = tmp_path_factory.mktemp("trajectory")
    rows = chats()
    for name, part in (("train", rows), ("shuffled", shuffled_inside_steps(rows))):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")
    texts = {message["content"] for row in rows for message in row["messages"]}
    tokenizer = tiny.train_tokenizer(sorted(texts), 400)
    model = tiny.tiny_qwen3(tokenizer, layers=1, hidden=64, seed=0)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.from_numpy(rng.integers(-(2**12), 2**12, parameter.shape) / 2**16))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return Shop(folder, [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows])


@pytest.fixture
def run(shop: Shop, tmp_path: Path, no_picture: None) -> Callable[[Arm], Curves]:
    """`run(arm)`: the columns of its log by step. The command runs in this process, where its arithmetic is float64."""
    from radixtrain.__main__ import main

    def curves(arm: Arm) -> Curves:
        out = tmp_path / f"{arm}"
        with float64_arithmetic():
            assert main(["fit", *shop.flags(arm, out)]) == 0
        found = {name: np.array([*logged(out, name).values()]) for name in ("loss", "grad_norm", "r")}
        assert len(found["loss"]) == NUM_STEPS
        return found

    return curves


def differences(found: Curves, expected: Curves) -> float:
    """The largest relative difference of a step's loss or norm of the gradient."""
    return max(float(np.abs(found[name] / expected[name] - 1).max()) for name in ("loss", "grad_norm"))


def test_the_rows_have_all_that_can_go_wrong(shop: Shop) -> None:
    """Nested forks, loss on shared tokens, several labels after one row; and a budget of one row."""
    features = [{"input_ids": ids, "labels": ids} for ids in shop.rows[:BATCH_SIZE]]
    (batch,) = StepCollator()(features).micro_batches
    assert batch["radix"].loss_weights.max() == BATCH_SIZE
    assert batch["radix"].prediction_rows.bincount().max() > 2
    assert len(batch["radix"].prediction_rows.bincount().nonzero()) < len(batch["radix"].prediction_rows)
    separate = StepCollator(max_tokens=max(map(len, shop.rows)))(features)
    assert [len(members) for members in separate.members] == [1] * BATCH_SIZE


def test_every_way_has_the_losses_of_the_ordinary_trainer(
    run: Callable[[Arm], Curves], print_after: Callable[[str, str], None]
) -> None:
    ordinary = run(ORDINARY)
    assert ordinary["r"].max() <= 1
    assert ordinary["loss"][-1] < 0.5 * ordinary["loss"][0]
    ways = {
        "two ordinary runs, rows in another order": replace(ORDINARY, shuffled=True),
        "unique tokens": UNIQUE,
        "unique tokens, rows in another order": replace(UNIQUE, shuffled=True),
        "a micro-batch for each row": replace(UNIQUE, max_tokens=0),
    }
    curves = {name: run(arm) for name, arm in ways.items()}
    assert curves["unique tokens"]["r"].min() > 2
    assert (curves["a micro-batch for each row"]["r"] == 1).all(), "two rows in one would share their prompt"
    for name, found in curves.items():
        worst = differences(found, ordinary)
        print_after("100 steps in float64: largest difference of a loss or gradient norm", f"{name}: {worst:.1e}")
        assert worst <= BAR, name


def test_a_learning_rate_that_is_two_ten_millionths_higher_is_found(run: Callable[[Arm], Curves]) -> None:
    assert differences(run(replace(UNIQUE, learning_rate=LEARNING_RATE * (1 + 2e-7))), read_golden()) > 10 * BAR


def test_the_losses_are_the_golden_ones(run: Callable[[Arm], Curves], shop: Shop) -> None:
    found = run(UNIQUE)
    tokens = zlib.crc32(json.dumps(shop.rows).encode())
    if os.environ.get("RADIXTRAIN_WRITE_GOLDEN"):
        write_golden(found, tokens)
    assert f"# tokens {tokens}\n" in GOLDEN.read_text(encoding="utf-8"), f"other rows or tokenizer: {REGENERATE}"
    assert differences(found, read_golden()) <= BAR


def write_golden(curves: Curves, tokens: int) -> None:
    columns = zip(curves["loss"].tolist(), curves["grad_norm"].tolist(), strict=True)
    lines = [
        f"# {NUM_STEPS} AdamW steps of a tiny Qwen3 on unique tokens: float64, learning rate {LEARNING_RATE}",
        f"# regenerate: {REGENERATE}",
        f"# tokens {tokens}",
        "# step loss grad_norm",
        *(f"{step} {loss!r} {norm!r}" for step, (loss, norm) in enumerate(columns)),
    ]
    GOLDEN.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_golden() -> Curves:
    steps, loss, grad_norm = np.loadtxt(GOLDEN).T
    assert (steps == np.arange(NUM_STEPS)).all()
    return {"loss": loss, "grad_norm": grad_norm}
