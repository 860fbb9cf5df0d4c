"""What a run leaves and says when it ends, however it ends: its last lines, `summary.json`, metrics, `loss.png`."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outcomes import logged, summary
from tiers import FULL

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_run
from radixtrain.errors import Stopped, UserError
from radixtrain.training.module import RadixModule
from radixtrain.training.results.curves import LogPart, read_curves
from radixtrain.training.results.run_progress import weights_text
from radixtrain.training.results.summary import RunSummary

Arguments = Callable[..., list[str]]


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Raise it when this step, counted from 1, begins."""
    train = RadixModule.take_step

    def take_step(self: Any, *arguments: Any) -> Any:
        if self.global_step + 1 == step:
            raise error
        return train(self, *arguments)

    monkeypatch.setattr(RadixModule, "take_step", take_step)


@pytest.mark.usefixtures("draws")
def test_a_run_that_ends_between_two_logged_steps(
    arguments: Arguments, shop: Path, tmp_path: Path, capsys: Any
) -> None:
    flags = {"trainer__max_steps": 13, "trainer__max_epochs": 9, "trainer__log_every_n_steps": 5}
    assert main(arguments(data__validation_file=shop / "validation.jsonl", **flags)) == 0
    out, found, printed = tmp_path / "out", summary(tmp_path / "out"), capsys.readouterr().out
    assert [*logged(out)] == [1, 5, 10, 13]
    assert found["ended"] == {
        "reason": "max_steps",
        "text": "step 13 of 13: trainer.max_steps 13 reached",
        "complete": True,
    }
    assert found["steps"] == found["exported"]["step"] == 13 and found["exported"]["weights"] == "last"
    assert found["validation"]["step"] == 10 and found["last"] == "checkpoints/step=13"
    assert found["best"] is None and found["logs"] == [{"path": "logs/version_0", "first_step": 0}]
    assert found["r"] > 1 and found["tokens_per_second"] > found["computed_tokens_per_second"] > 0
    assert "ended        step 13 of 13: trainer.max_steps 13 reached" in printed
    assert f"{found['validation']['eval_loss']:.4f} at step 10, the last validation" in printed
    assert f"model        {out / 'model'} (the last weights, of step 13)" in printed
    for path in (out / "loss.png", out / "checkpoints" / "step=13", out / "logs" / "version_0"):
        assert f" {path}\n" in printed and path.exists()
    assert "at step 10, the last validation" in (out / "model" / "README.md").read_text()


@pytest.mark.usefixtures("draws")
@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (Stopped("stopped by SIGTERM after step 6", 143), 143, "Stopped"),
        pytest.param(UserError("loss nan at step 6"), 1, "UserError", marks=FULL),
    ],
)
def test_a_run_that_is_cut_short_and_goes_on(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, code: int, reason: str
) -> None:
    """The metrics have its last step, and those of both parts are one curve."""
    flags = {"trainer__max_steps": 9, "trainer__max_epochs": 9, "trainer__log_every_n_steps": 4, "save_every_steps": 5}
    with monkeypatch.context() as patch:
        stop_in_step(patch, 7, error)
        assert main(arguments(**flags)) == code
    out = tmp_path / "out"
    found = summary(out)
    assert [*logged(out)] == [1, 4, 6]
    assert found["ended"] == {"reason": reason, "text": str(error), "complete": False} and found["exported"] is None
    assert found["steps"] == 6 and (out / "loss.png").exists()
    (out / "loss.png").unlink()
    assert main(arguments(**flags, ckpt_path="last")) == 0
    parts = [LogPart(str(out / each["path"]), each["first_step"]) for each in summary(out)["logs"]]
    assert len(parts) == 2 and read_curves(parts)["loss"].steps.tolist()[-2:] == [8, 9]
    assert summary(out)["loss"]["first"] == found["loss"]["first"] and (out / "loss.png").exists()


def test_what_a_killed_run_leaves(arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every checkpoint the metrics until then are on the disk, and the summary does not say that the run ended."""
    seen = []

    def look(self: Any, path: Path) -> None:
        self._write(with_picture=False)
        seen.append(([*logged(tmp_path / "out")], summary(tmp_path / "out")))

    monkeypatch.setattr(RunSummary, "_on_saved", look)
    assert main(arguments(save_every_steps=2, trainer__max_steps=4)) == 0
    (first, record), *_ = seen
    assert first == [1, 2] and record["steps"] == 2
    assert record["ended"] is record["exported"] is None and record["last"] == "checkpoints/step=2"


@FULL
def test_a_validation_that_measures_nothing(arguments: Arguments, shop: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """`on_nonfinite: skip` may leave all of its rows out: then the metrics of the previous one do not stand for it."""

    evaluated = RadixModule.evaluated

    def evaluated_once(self: Any, name: str, step: Any) -> Any:
        return evaluated(self, name, step) if self.global_step == 5 else None

    monkeypatch.setattr(RadixModule, "evaluated", evaluated_once)
    flags = {"trainer__max_epochs": 4, "save_best": "eval_loss", "early_stopping": 1}
    assert main(arguments(data__validation_file=shop / "validation.jsonl", **flags)) == 0
    found = summary(tmp_path / "out")
    assert found["best"]["step"] == 5 and found["validation"] == {"step": 20} and found["steps"] == 20


@FULL
def test_a_best_checkpoint_that_is_the_last_one(arguments: Arguments, shop: Path, tmp_path: Path) -> None:
    """Is written once, and its weights are exported as they are."""
    flags = {"data__validation_file": shop / "validation.jsonl", "trainer__max_epochs": 1, "save_best": "eval_loss"}
    assert main(arguments(**flags)) == 0
    checkpoints = tmp_path / "out" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "last", "step=5"]
    assert read_run(checkpoints / "step=5")["sequence"] == 1
    assert summary(tmp_path / "out")["exported"] == {
        **{"path": "model", "weights": "best", "step": 5},
        "validation": summary(tmp_path / "out")["validation"],
    }


def test_a_run_that_is_over_has_nothing_left_to_do(arguments: Arguments, tmp_path: Path, capsys: Any) -> None:
    assert main(arguments(trainer__max_steps=3)) == 0
    before = summary(tmp_path / "out")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    capsys.readouterr()
    assert main(arguments(trainer__max_steps=3, output_dir=tmp_path / "moved", ckpt_path="last")) == 0
    after, said = summary(tmp_path / "moved"), capsys.readouterr().out
    assert "nothing left to do: step 3 of 3 was reached before" in said
    assert f"logs         {tmp_path}/moved/logs/version_0\n" in said
    assert [path.name for path in (tmp_path / "moved/logs").iterdir()] == ["version_0"]
    assert {**before, "ended": 0, "last": 0, "r": 0}.keys() == after.keys()
    assert all(after[name] == before[name] for name in ("steps", "loss", "seconds", "logs", "exported"))


@FULL
@pytest.mark.usefixtures("draws")
def test_another_logger_has_no_picture(arguments: Arguments, tmp_path: Path, caplog: Any, capsys: Any) -> None:
    with caplog.at_level(logging.INFO):
        assert main(arguments(trainer__max_steps=1, trainer__logger="none")) == 0
    assert "loss.png is drawn from the metrics of the CSV logger, which this run has none of" in caplog.text
    assert "picture" not in capsys.readouterr().out and not (tmp_path / "out" / "loss.png").exists()


@FULL
@pytest.mark.usefixtures("draws")
def test_a_picture_that_fails_is_no_reason_to_lose_a_run(
    arguments: Arguments, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("radixtrain.training.results.summary.write_curves", fail)
    assert main(arguments(trainer__max_steps=1)) == 0
    assert "loss.png cannot be drawn (RuntimeError: no fonts)" in caplog.text
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_which_weights_a_command_evaluates(tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert weights_text(str(model), None) == str(model)
    for record in ("", "{}", '{"exported": null}', '{"exported": {"path": "other"}}', "[1]"):
        (tmp_path / "summary.json").write_text(record)
        assert weights_text(str(model), None) == str(model)
    (tmp_path / "summary.json").write_text('{"exported": {"path": "model", "weights": "best", "step": 1200}}')
    assert weights_text(str(model), None) == f"{model} (the best weights of the run, of step 1,200)"
    assert weights_text(str(model), "old.ckpt") == "old.ckpt"
