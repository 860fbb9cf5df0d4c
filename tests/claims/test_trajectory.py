"""100 AdamW steps through the real command line: on unique tokens the losses are those of the ordinary trainer.

The order of a float32 sum changes its last digits, so the bar is the drift of two ordinary runs that differ only in the
order of the rows: at each step a difference of at most 3x that drift, or of 2e-6. A bound per step does not see a small
error that always has the same sign, so the mean of the differences is tested as well.

    RADIXTRAIN_WRITE_GOLDEN=1 python -m pytest tests/claims/test_trajectory.py -k golden

writes the committed losses anew; what made that necessary has to be said in the change that does it.
"""

import csv
import json
import os
import platform
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from filelock import FileLock
from transformers import AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.collators.steps import StepCollator
from radixtrain.data.datamodule import SFTData
from radixtrain.data.resume import checksum
from radixtrain.training.results.summary import RunSummary

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "qwen3_tiny_100_steps.txt"
REGENERATE = "RADIXTRAIN_WRITE_GOLDEN=1 python -m pytest tests/claims/test_trajectory.py -k golden"
NUM_STEPS, BATCH_SIZE = 100, 8
LEARNING_RATES = (1e-4, 1e-3)
GOLDEN_LEARNING_RATE = 1e-3
FLOOR = 2e-6
# Student's t of 20 block means, 19 degrees of freedom: exceeded by chance in 0.1 % of runs without a drift.
NUM_BLOCKS, T_LIMIT = 20, 3.883

SYSTEM = (
    "You keep the shop and name the shelf of a thing. Fruit is on shelf one, tools on shelf two, paper on shelf three."
)
MANNERS = {" Say the shelf.": "Shelf {}.", " One word.": "{}"}
THINGS = {"apple": "one", "plum": "one", "hammer": "two", "saw": "two", "card": "three"}

Curve = npt.NDArray[np.float64]


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
    learning_rate: float = GOLDEN_LEARNING_RATE

    def at(self, learning_rate: float) -> "Arm":
        return replace(self, learning_rate=learning_rate)


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
    """Tokenizer and weights come from a seed; the golden file holds a checksum of the tokens."""
    import tiny

    folder = tmp_path_factory.mktemp("trajectory")
    rows = chats()
    for name, part in (("train", rows), ("shuffled", shuffled_inside_steps(rows))):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")
    texts = {message["content"] for row in rows for message in row["messages"]}
    tokenizer = tiny.train_tokenizer(sorted(texts), 400)
    tiny.tiny_qwen3(tokenizer, layers=1, hidden=64, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return Shop(folder, [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows])


@pytest.fixture(scope="module")
def run(shop: Shop, server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Arm], Path]:
    """Runs an arm once, whichever test or pytest-xdist worker asks first; the folder that it left."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trajectories"
    shared.mkdir(exist_ok=True)

    def folder_of(arm: Arm) -> Path:
        words = (arm.dedup, arm.shuffled, arm.max_tokens, repr(arm.learning_rate))
        out = shared / "-".join(map(str, words))
        with FileLock(f"{out}.lock"):
            if not (out / "model").exists():  # written last
                if arm == UNIQUE:
                    fit_in_a_process(server, shop.flags(arm, out), Path(f"{out}.stderr"))
                else:
                    fit(shop.flags(arm, out))
        return out

    return folder_of


def fit(flags: list[str]) -> None:
    """`radixtrain fit` in this process, without a picture. On one thread: their number decides how sums are cut."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunSummary, "_draw", lambda self: None)
            assert main(["fit", *flags]) == 0
    finally:
        torch.set_num_threads(threads)


def fit_in_a_process(server: Any, flags: list[str], stderr: Path) -> None:
    """`python -m radixtrain fit` in a process of its own, also on one thread. The others are compared with this one."""
    run = server.start(["fit", *flags], stderr, {"HF_HUB_OFFLINE": "1"}, draws=False, before=on_one_thread)
    assert run.wait() == 0, run.said()[-2000:]


def on_one_thread() -> None:
    torch.set_num_threads(1)


def curve(folder: Path, column: str = "loss") -> Curve:
    """Per step, from the CSV logger, which writes every digit of the float32."""
    with (folder / "logs" / "version_0" / "metrics.csv").open() as file:
        values = [float(row[column]) for row in csv.DictReader(file) if row[column]]
    assert len(values) == NUM_STEPS
    return np.array(values)


@dataclass(frozen=True)
class Bar:
    """How far a column may be from another run's: the drift of two ordinary runs decides."""

    drift: float

    @classmethod
    def of(cls, run: Callable[[Arm], Path], learning_rate: float, column: str = "loss") -> "Bar":
        ordinary = replace(ORDINARY, learning_rate=learning_rate)
        one, other = (curve(run(arm), column) for arm in (ordinary, replace(ordinary, shuffled=True)))
        drift = float(np.abs(one - other).max())
        assert drift > 0, "the two ordinary runs are one run, so their drift is no yardstick"
        return cls(drift)

    @property
    def bound(self) -> float:
        return max(FLOOR, 3 * self.drift)

    def check(self, actual: Curve, expected: Curve) -> None:
        """The bound at every step, and no drift to one side."""
        self.check_steps(actual, expected)
        drift = drift_t(actual - expected)
        assert abs(drift) <= T_LIMIT, f"one-sided: {self.describe(actual - expected)}"

    def check_steps(self, actual: Curve, expected: Curve) -> None:
        print(self.describe(actual - expected))
        assert np.abs(actual - expected).max() <= self.bound, f"outside the bound: {self.describe(actual - expected)}"

    def describe(self, residual: Curve) -> str:
        largest, step = float(np.abs(residual).max()), int(np.abs(residual).argmax())
        return (
            f"largest difference {largest:.2e} at step {step}; bound {self.bound:.2e}, drift of two ordinary runs "
            f"{self.drift:.2e}; mean {residual.mean():+.1e}, t {drift_t(residual):+.2f}"
        )


def drift_t(residual: Curve) -> float:
    """Student's t of the block means of a residual: how far its mean is from zero, in standard errors.

    The steps follow one another, so their residuals are not independent, and a test that takes them for it sees drifts
    that are not there: after step 30 at a learning rate of 1e-3 the weights of any two runs are a little apart, and a
    difference of 1e-8 keeps its sign for many steps. Means of blocks of five steps, which is one pass over the rows,
    are nearly independent and nearly normal, and the last digits of the large losses outweigh such a tail. 0 for two
    equal runs; infinite for a constant difference.
    """
    means = residual.reshape(NUM_BLOCKS, -1).mean(axis=1)
    if not means.any():
        return 0.0
    error = float(means.std(ddof=1)) / NUM_BLOCKS**0.5
    return float(means.mean()) / error if error else float("inf")


class TestTheYardstick:
    """Synthetic residuals in units of their own noise, white and with half of each step left in the next."""

    @pytest.fixture(params=[0.0, 0.5], ids=["white", "autocorrelated"])
    def noise(self, request: pytest.FixtureRequest) -> Curve:
        """(2000 runs, 100 steps), standard deviation 1, rounded to thirds as losses are to their last place."""
        rng, keep = np.random.default_rng(0), request.param
        runs = rng.standard_normal((2000, NUM_STEPS))
        for step in range(1, NUM_STEPS):
            runs[:, step] = keep * runs[:, step - 1] + (1 - keep**2) ** 0.5 * runs[:, step]
        return np.round(runs * 3) / 3

    def caught(self, residuals: Curve) -> float:
        """Share of runs in which a drift is seen."""
        return float(np.mean([abs(drift_t(residual)) > T_LIMIT for residual in residuals]))

    def test_no_drift_is_no_alarm(self, noise):
        assert self.caught(noise) <= 0.005  # stated: 0.001 for independent blocks

    def test_a_drift_of_the_size_of_the_noise_is_caught(self, noise):
        assert self.caught(noise + 1) >= 0.97
        assert self.caught(noise - 1) >= 0.97

    def test_one_that_grows_from_nothing_is_caught(self, noise):
        """The same on average, and harder: it counts as noise of the blocks too. The usual power of a test, 80 %."""
        assert self.caught(noise + np.linspace(0, 2, NUM_STEPS)) >= 0.8

    def test_equal_runs_have_no_drift_and_a_constant_offset_has(self):
        assert drift_t(np.zeros(NUM_STEPS)) == 0
        assert drift_t(np.full(NUM_STEPS, 2.0**-22)) == float("inf")


def test_the_rows_have_all_that_can_go_wrong(shop):
    """Nested forks, loss on shared tokens, several labels after one row; and a budget of one row."""
    features = [{"input_ids": ids, "labels": ids} for ids in shop.rows[:BATCH_SIZE]]
    (batch,) = StepCollator()(features).micro_batches
    assert batch["radix_loss_weights"].max() == BATCH_SIZE
    assert batch["radix_prediction_rows"].bincount().max() > 2
    assert len(batch["radix_prediction_rows"].bincount().nonzero()) < len(batch["radix_prediction_rows"])
    separate = StepCollator(max_tokens=max(map(len, shop.rows)))(features)
    assert [len(members) for members in separate.members] == [1] * BATCH_SIZE


@pytest.mark.full
@pytest.mark.parametrize("learning_rate", LEARNING_RATES)
class TestTrajectory:
    def test_deduplicated_and_not(self, run, learning_rate):
        unique, ordinary = run(UNIQUE.at(learning_rate)), run(ORDINARY.at(learning_rate))
        assert curve(unique, "r").min() > 2
        assert curve(ordinary, "r").max() <= 1
        assert curve(unique)[-1] < 0.5 * curve(unique)[0]
        Bar.of(run, learning_rate).check(curve(unique), curve(ordinary))

    def test_one_micro_batch_of_eight_rows_and_eight_of_one(self, run, learning_rate):
        whole = UNIQUE.at(learning_rate)
        cut = run(replace(whole, max_tokens=0))
        assert (curve(cut, "r") == 1).all()  # two rows in one micro-batch would share their prompt
        Bar.of(run, learning_rate).check(curve(cut), curve(run(whole)))

    def test_another_order_of_the_rows(self, run, learning_rate):
        """Not even the rounding differs: the collator sorts the rows of an optimizer batch."""
        one = UNIQUE.at(learning_rate)
        other = replace(one, shuffled=True)
        Bar.of(run, learning_rate).check(curve(run(other)), curve(run(one)))
        assert (curve(run(other)) == curve(run(one))).all()


@pytest.mark.full
class TestTheTestItself:
    """Wrong runs of the real command line: each half of the check sees one that the other does not."""

    def test_a_learning_rate_that_is_a_thousandth_higher(self, run):
        wrong, ordinary = curve(run(UNIQUE.at(1e-4 * (1 + 1e-3)))), curve(run(ORDINARY.at(1e-4)))
        with pytest.raises(AssertionError, match="outside the bound"):
            Bar.of(run, 1e-4).check(wrong, ordinary)

    def test_one_that_is_two_ten_millionths_higher(self, run):
        """No step leaves the bound, and together they lie on one side."""
        wrong, ordinary = curve(run(UNIQUE.at(1e-4 * (1 + 2e-7)))), curve(run(ORDINARY.at(1e-4)))
        with pytest.raises(AssertionError, match="one-sided"):
            Bar.of(run, 1e-4).check(wrong, ordinary)


class TestGolden:
    """The losses of a release are those of the next one.

    Not bit for bit, since another CPU sums in another order, and not the mean: it draws the random weights with another
    last digit, which shifts all steps alike.
    """

    @pytest.mark.full
    def test_losses_are_the_golden_ones(self, run):
        folder = run(UNIQUE)
        if os.environ.get("RADIXTRAIN_WRITE_GOLDEN"):
            write_golden(folder)
        golden = read_golden()
        assert golden["tokens"] == token_checksum(folder), f"other rows or another tokenizer: {REGENERATE}"
        for column in ("loss", "grad_norm"):
            Bar.of(run, UNIQUE.learning_rate, column).check_steps(curve(folder, column), golden[column])

    def test_the_file_says_what_it_is(self):
        golden = read_golden()
        assert len(golden["loss"]) == len(golden["grad_norm"]) == NUM_STEPS
        assert REGENERATE in GOLDEN.read_text()


def token_checksum(folder: Path) -> int:
    """Of the token ids of the rows that a run trained on, by the settings in its checkpoint."""
    settings = read_checkpoint(folder / "checkpoints" / "last")["datamodule_hyper_parameters"]
    data = SFTData(**{name: value for name, value in settings.items() if not name.startswith("_")})
    data.setup("fit")
    return checksum(data.conversations["train"])


def write_golden(folder: Path) -> None:
    columns = zip(curve(folder), curve(folder, "grad_norm"), strict=True)
    lines = [
        f"# {NUM_STEPS} AdamW steps of a tiny Qwen3 on unique tokens: float32, learning rate {UNIQUE.learning_rate}",
        f"# regenerate: {REGENERATE}",
        f"# written with torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        f"# tokens {token_checksum(folder)}",
        "# step loss grad_norm",
        *(f"{step} {loss:.9g} {grad_norm:.9g}" for step, (loss, grad_norm) in enumerate(columns)),
    ]
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_golden() -> dict[str, Any]:
    """`loss` and `grad_norm`, (100,), and `tokens`, the checksum of the rows."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    tokens = next(line for line in lines if line.startswith("# tokens ")).split()[-1]
    rows = np.array([line.split() for line in lines if not line.startswith("#")], dtype=np.float64)
    assert (rows[:, 0] == np.arange(NUM_STEPS)).all()
    loss, grad_norm = rows[:, 1:].astype(np.float32).astype(np.float64).T  # nine digits name a float32, as it was
    return {"tokens": int(tokens), "loss": loss, "grad_norm": grad_norm}
