"""`save_best` and `early_stopping`: which checkpoint is kept, which weights are exported, what counts after a resume.

The files are written by runs of the real command line; what they decide is asked of the callbacks themselves.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outcomes import summary
from safetensors.torch import load_file
from tiers import FULL

from radixtrain.__main__ import main
from radixtrain.training.results.best import Best, StopEarly
from radixtrain.verification.oracle import float64_arithmetic

Arguments = Callable[..., list[str]]
ANSWER = "You name the hammer, the saw and the file: where is fruit?"  # to no question of the training
# With it, the loss of the validation rises from the first epoch of 5 steps on: 7, 9, 10, 11.
RISING = {
    "data__min_shared_tokens": 1,
    "model__lr_scheduler_type": "constant",
    "model__learning_rate": 0.03,
    "trainer__max_epochs": 9,
}


class Saver:
    """What `SaveCheckpoints` offers, without a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: Path | None = None
        self.on_saved: list[Callable[[Path], None]] = []
        self.keep: Path | None = None
        self.num_asked = 0

    def ask(self) -> None:
        self.num_asked += 1

    def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.last = path
        for told in self.on_saved:
            told(path)


def trainer_at(step: int, **metrics: float) -> Any:
    state = {"sanity_checking": False, "state": SimpleNamespace(fn="fit")}
    return SimpleNamespace(**state, global_step=step, callback_metrics={n: torch.tensor(v) for n, v in metrics.items()})


def validated(best: Best, saver: Saver, folder: Path, values: list[float], metric: str = "eval_loss") -> list[int]:
    """The steps whose checkpoints the callback asked for. values: of the metric after steps 1, 2, ..."""
    asked = []
    for step, value in enumerate(values, 1):
        before = saver.num_asked
        best.on_validation_end(trainer_at(step, **{metric: value}), torch.nn.Module())
        if saver.num_asked > before:
            asked.append(step)
            saver.save(folder / f"step={step}")
    return asked


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("metric", "values", "asked"),
    [
        ("eval_loss", [3.0, 2.0, 2.0, 2.5, 1.0], [1, 2, 5]),
        ("eval_exact_match", [0.1, 0.3, 0.3, 0.2, 0.4], [1, 2, 5]),
        ("eval_loss", [NAN, 2.0, NAN, 1.0, -INF], [2, 4]),
        ("eval_contains", [INF, 0.2, NAN], [2]),
        ("eval_token_perplexity", [9.0, 8.0], [1, 2]),
    ],
)
def test_it_asks_for_the_best_so_far(tmp_path: Path, metric: str, values: list[float], asked: list[int]) -> None:
    saver = Saver(tmp_path)
    best = Best(metric, saver)
    assert validated(best, saver, tmp_path, values, metric) == asked
    assert best.validation is not None and best.validation.step == asked[-1]
    assert best.path == tmp_path / f"step={asked[-1]}" == (tmp_path / "best").resolve()
    assert saver.keep == best.path


def test_the_previous_best_is_kept_until_the_new_one_is_written(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    best = Best("eval_loss", saver)
    validated(best, saver, tmp_path, [3.0])
    best.on_validation_end(trainer_at(2, eval_loss=1.0), torch.nn.Module())
    assert saver.keep == tmp_path / "step=1"
    assert best.state_dict()["path"] is None  # it is the checkpoint that this state is written into


def test_a_best_checkpoint_that_cannot_be_read_is_not_exported(tmp_path: Path, caplog: Any) -> None:
    saver = Saver(tmp_path)
    best = Best("eval_loss", saver)
    assert not best.load_into(torch.nn.Linear(2, 2))  # before the first validation
    validated(best, saver, tmp_path, [3.0])
    assert not best.load_into(torch.nn.Linear(2, 2))
    assert f"save_best: {best.path}: checksums.txt is missing" in caplog.text
    assert "model/ will hold the last weights, not the best" in caplog.text


class TestStopEarly:
    def states(self, values: list[float], patience: int) -> list[bool]:
        stop = StopEarly("eval_loss", patience)
        return [bool(self.seen(stop, value)) for value in values]

    def seen(self, stop: StopEarly, value: float) -> str:
        trainer = trainer_at(1, eval_loss=value)
        trainer.strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
        trainer.should_stop, trainer.current_epoch = False, 0
        stop.on_validation_end(trainer, torch.nn.Module())
        assert trainer.should_stop == bool(stop.why)
        return stop.why

    def test_after_so_many_validations(self) -> None:
        assert self.states([3, 2, 2.5, 1, 1, 1.5], patience=2) == [False, False, False, False, False, True]
        assert self.states([3, 4], patience=1) == [False, True]
        assert self.states([3, NAN], patience=5) == [False, True]

    def test_it_says_why(self) -> None:
        stop = StopEarly("eval_loss", 2)
        assert [self.seen(stop, value) for value in (1, 2, 3)][-1] == "eval_loss did not improve in 2 validations"
        assert self.seen(StopEarly("eval_loss", 2), NAN) == "eval_loss was not finite"


def shown_loss(printed: str) -> float:
    """Of the line that `validate` prints."""
    return float(printed.split("eval_loss")[1].split()[0])


@pytest.fixture(scope="module")
def contrary(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validation rows with an answer that the training makes less and less likely."""
    rows = [json.loads(line) for line in (shop / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["messages"][-1]["content"] = ANSWER
    path = tmp_path_factory.mktemp("contrary") / "validation.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stopped(shop: Path, contrary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that stopped early; not to be changed."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    flags = {"output_dir": out, "data__batch_size": 4, "data__max_tokens": 4096, "data__dataloader_num_workers": 0}
    flags |= {"model__model_name_or_path": shop / "model", "data__train_file": shop / "train.jsonl"}
    flags |= {"data__validation_file": contrary, "trainer__enable_progress_bar": False, **RISING}
    flags |= {"save_best": "eval_loss", "early_stopping": 2, "trainer__log_every_n_steps": 10}
    assert main(["fit", *(f"--{name.replace('__', '.')}={value}" for name, value in flags.items())]) == 0
    return out


@pytest.fixture
def again(arguments: Arguments, contrary: Path, stopped: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of that run in a copy of its folder, `tmp_path / "out"`."""
    shutil.copytree(stopped, tmp_path / "out", symlinks=True)
    base = {"data__validation_file": contrary, "save_best": "eval_loss", "early_stopping": 2, **RISING}
    return lambda command="fit", **flags: arguments(command, **{**base, **flags})


def test_the_best_weights_are_exported_and_the_last_ones_kept(stopped: Path) -> None:
    found = summary(stopped)
    best, last = found["best"], found["last"]
    assert found["ended"]["reason"] == "early_stopping" and found["ended"]["complete"]
    assert found["steps"] == best["step"] + 10  # two epochs without a better loss
    assert best["path"] == f"checkpoints/step={best['step']}" and last == f"checkpoints/step={found['steps']}"
    assert (stopped / "checkpoints" / "best").resolve() == stopped / best["path"]
    assert (stopped / "checkpoints" / "last").resolve() == stopped / last
    assert found["exported"]["weights"] == "best" and found["exported"]["step"] == best["step"]
    assert found["exported"]["validation"]["eval_loss"] == best["value"] < found["validation"]["eval_loss"]
    exported, kept = load_file(stopped / "model" / "model.safetensors"), stopped / best["path"] / "model.safetensors"
    of_checkpoint = {name.removeprefix("model."): tensor for name, tensor in load_file(kept).items()}
    assert all(torch.equal(tensor, of_checkpoint[name]) for name, tensor in exported.items())
    assert f"{best['value']:.4f} at step {best['step']}" in (stopped / "model" / "README.md").read_text()
    steps = [f"step={step}" for step in (best["step"], found["steps"] - 5, found["steps"])]  # pruning spares the best
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == sorted(["best", "last", *steps])


def test_a_run_that_stopped_early_has_nothing_left_to_do(again: Any, tmp_path: Path, capsys: Any) -> None:
    before = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert main(again(ckpt_path="last")) == 0
    printed = capsys.readouterr().out
    assert "ended        nothing left to do: stopped early at step" in printed and "raise early_stopping" in printed
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@FULL
def test_with_more_patience_it_goes_on_and_knows_the_best_of_before(again: Any, tmp_path: Path) -> None:
    before = summary(tmp_path / "out")
    assert main(again(ckpt_path="last", early_stopping=3)) == 0
    found = summary(tmp_path / "out")
    assert found["steps"] == before["steps"] + 5
    assert found["best"] == before["best"] and found["exported"] == before["exported"]
    assert [part["first_step"] for part in found["logs"]] == [0, before["steps"]]
    assert found["loss"]["first"] == before["loss"]["first"] and found["seconds"] > before["seconds"]


def test_it_goes_on_in_another_folder(again: Any, tmp_path: Path) -> None:
    """Whose link is to the best checkpoint of before, until there is a better one."""
    best = summary(tmp_path / "out")["best"]
    resumed = tmp_path / "out" / "checkpoints" / "last"
    assert main(again(output_dir=tmp_path / "second", ckpt_path=resumed, early_stopping=3)) == 0
    found = summary(tmp_path / "second")
    assert (tmp_path / "second" / "checkpoints" / "best").resolve() == tmp_path / "out" / best["path"]
    assert found["best"] == {**best, "path": str(tmp_path / "out" / best["path"])}
    assert found["exported"]["step"] == best["step"]


def damage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


@FULL
@pytest.mark.parametrize("lose", [shutil.rmtree, damage])
def test_a_best_checkpoint_that_is_lost(
    again: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, lose: Callable[[Path], None]
) -> None:
    best = summary(tmp_path / "out")["best"]
    lose(tmp_path / "out" / best["path"])
    with caplog.at_level(logging.WARNING):
        assert main(again(ckpt_path="last", early_stopping=3)) == 0
    assert f"the best so far, eval_loss {best['value']:.4f} at step {best['step']}, is lost" in caplog.text
    assert summary(tmp_path / "out")["best"]["step"] > best["step"]


@FULL
def test_another_metric_starts_anew(again: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = {"save_best": "eval_contains", "evaluate_generation__metric": "contains", "early_stopping": None}
    limits = {"trainer__max_epochs": 4, "evaluate_generation__max_new_tokens": 2}
    with caplog.at_level(logging.WARNING):
        assert main(again(ckpt_path="last", **flags, **limits)) == 0
    assert "save_best: the best so far was by eval_loss, and starts over" in caplog.text
    assert summary(tmp_path / "out")["best"]["metric"] == "eval_contains"


@FULL
@float64_arithmetic()
def test_of_lora_only_the_adapters_are_kept_and_put_back(again: Any, tmp_path: Path, capsys: Any) -> None:
    """The exported weights have the merged adapters of the best checkpoint."""
    pytest.importorskip("peft", reason="pip install peft")
    shutil.rmtree(tmp_path / "out")
    precision = {"model__dtype": "float64", "trainer__precision": "64-true"}
    assert main(again(model__use_peft=True, model__learning_rate=0.1, trainer__max_epochs=3, **precision)) == 0
    best = summary(tmp_path / "out")["best"]
    kept = load_file(tmp_path / "out" / best["path"] / "model.safetensors")
    assert kept and all("lora_" in name for name in kept)
    assert summary(tmp_path / "out")["steps"] > best["step"]
    capsys.readouterr()
    assert main(again("validate", model__model_name_or_path=tmp_path / "out" / "model", **precision)) == 0
    assert shown_loss(capsys.readouterr().out) == pytest.approx(best["value"], rel=1e-10)


def test_what_is_refused_before_a_row_is_read(arguments: Arguments, tmp_path: Path, capsys: Any) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"save_best": "eval_los"}, "save_best: no metric 'eval_los', did you mean eval_loss?"),
        ({"save_best": "loss"}, "save_best: no metric 'loss'"),
        ({"save_best": "eval_contains"}, "save_best: eval_contains is not measured: set evaluate_generation.metric"),
        ({"data__validation_file": None}, "save_best: eval_loss needs rows for it: set data.validation_file"),
        ({"data__validation_file": None, "save_best": None}, "early_stopping: eval_loss needs rows for it"),
        ({"early_stopping": 0}, "early_stopping must be at least 1, or null; got 0"),
        ({"trainer__limit_val_batches": 0}, "save_best needs validations, and trainer.limit_val_batches is 0"),
        ({"trainer__enable_checkpointing": False}, "save_best needs checkpoints, and trainer.enable_checkpointing is"),
    ]
    for flags, error in refusals:
        given = {"data__validation_file": "none.jsonl", "save_best": "eval_loss", "early_stopping": 2, **flags}
        assert main(arguments(data__train_file="none.jsonl", **given)) == 1
        assert capsys.readouterr().err.startswith(f"error: {error}")
        assert not (tmp_path / "out").exists()
