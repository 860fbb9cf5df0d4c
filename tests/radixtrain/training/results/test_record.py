"""The record of a run: its last lines and `summary.json`, however it ends, `save_best` and `early_stopping`.

The files are written by runs of the real command line; what is decided is asked of a `Record`.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from radixtrain.__main__ import main
from radixtrain.errors import Stopped, UserError
from radixtrain.training.module import RadixModule
from radixtrain.training.results.record import Progress, Record, read_curves, status_of_run
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL
from tests.support.runs import logged, rows_in, summary, write_rows

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
        self.folder, self.last, self.keep = folder, folder, folder
        self.on_saved: list[Callable[[Path], None]] = []
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True


def record_in(folder: Path, step: int = 0, **options: Any) -> Record:
    """Of a run of 3 epochs of 10 steps that has taken so many. options: its limits, and arguments of `Record`."""
    limits = {name: options.pop(name, value) for name, value in {"max_steps": -1, "max_epochs": 3}.items()}
    skipped, saver = options.pop("skipped", 0), Saver(folder)
    module = SimpleNamespace(position=SimpleNamespace(num_batches=step), last_step={}, speed=None)
    ends = [limits["max_steps"], 10 * limits["max_epochs"]]
    num_steps = min((end for end in ends if end >= 0), default=-1)
    record = Record(folder, saver, **options)  # type: ignore[arg-type]
    record.begin(SimpleNamespace(**limits, global_step=step - skipped, num_steps=num_steps, length=10, module=module))
    return record


@pytest.mark.parametrize(
    ("step", "options", "reason", "text"),
    [
        (30, {}, "max_epochs", "step 30 of 30: trainer.max_epochs 3 reached"),
        (30, {"skipped": 2}, "max_epochs", "step 28 of 30: trainer.max_epochs 3 reached"),
        (12, {"max_steps": 12}, "max_steps", "step 12 of 12: trainer.max_steps 12 reached"),
        (12, {"max_steps": 12, "max_epochs": -1}, "max_steps", "step 12 of 12: trainer.max_steps 12 reached"),
        (
            20,
            {"patience": 3},
            "early_stopping",
            "stopped early at step 20 of 30: eval_loss did not improve in 3",
        ),
        (18, {}, "max_time", "stopped by trainer.max_time at step 18 of 30; resume with --ckpt_path last"),
        (18, {"max_epochs": -1}, "max_time", "stopped by trainer.max_time at step 18; "),
    ],
)
def test_why_a_run_ended(tmp_path: Path, step: int, options: dict[str, Any], reason: str, text: str) -> None:
    """With a step taken in this process, and, if nothing was left to do, without one."""
    record = record_in(tmp_path, step, **options)
    record.progress.num_worse, record.first_step = 3, step - 5
    ended = status_of_run(record.loop, record)
    assert ended["reason"] == reason and ended["text"].startswith(text), ended
    assert ended["complete"] == (reason != "max_time")
    record.first_step = step
    again = status_of_run(record.loop, record)
    assert {**again, "text": ""} == {**ended, "text": ""}
    assert again["text"].startswith("nothing left to do: ") == again["complete"]


def test_a_run_of_no_steps_or_without_a_checkpoint(tmp_path: Path) -> None:
    for name in ("max_steps", "max_epochs"):
        record = record_in(tmp_path, **{name: 0})
        assert status_of_run(record.loop, record)["text"] == f"no step to take: trainer.{name} is 0"
    record = record_in(tmp_path, 18)
    record.saver.last = None
    assert status_of_run(record.loop, record)["text"].endswith("; no checkpoint was written to resume from")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("one\ntwo"), "one"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_a_run_that_an_error_ends(tmp_path: Path, monkeypatch: Any, error: BaseException, text: str) -> None:
    monkeypatch.setattr(Record, "_write", lambda self: None)
    record = record_in(tmp_path)
    record.failed(error)
    assert record.ended == {"reason": type(error).__name__, "text": text, "complete": False}


VALIDATIONS = [
    # save_best, patience, the metric at each step; steps whose checkpoint becomes the best; those at which the run ends
    ("eval_loss", None, [3.0, 2.0, 2.0, 2.5, 1.0], [1, 2, 5], []),
    ("eval_exact_match", None, [0.1, 0.3, 0.3, 0.2, 0.4], [1, 2, 5], []),
    ("eval_token_perplexity", 2, [9.0, None, 8.0], [1, 3], []),
    ("eval_loss", 2, [3, 2, 2.5, 1, 1, 1.5], [1, 2, 4], [6]),
    (None, 1, [3, 4], [], [2]),
]


@pytest.mark.parametrize(("metric", "patience", "values", "best", "ends"), VALIDATIONS)
def test_what_a_validation_decides(
    tmp_path: Path, monkeypatch: Any, metric: str | None, patience: int | None, values: Any, best: Any, ends: Any
) -> None:
    """The previous best checkpoint is kept until the new one is written."""
    monkeypatch.setattr(Record, "_write", lambda self, with_picture: None)
    record, keep = record_in(tmp_path, save_best=metric, patience=patience), tmp_path
    asked, stopped = list[int](), list[int]()
    for step, value in enumerate(values, 1):
        record.loop.global_step, record.saver.is_asked = step, False  # type: ignore[attr-defined]
        record.validated({} if value is None else {metric or "eval_loss": value})
        assert record.saver.keep == keep
        stopped += [step] if record.why_stop else []
        if record.saver.is_asked:  # type: ignore[attr-defined]
            assert record.state()["best_path"] is None  # it is the checkpoint that this state is written into
            asked.append(step)
            keep = tmp_path / f"step={step}"
            keep.mkdir()
            record.saved(keep)
    assert (asked, stopped) == (best, ends) and record.saver.keep == keep
    if metric:
        assert (tmp_path / "best").resolve() == keep
        assert record.state()["best"] == {"step": best[-1], metric: values[best[-1] - 1]}


BEST = {"step": 3, "eval_loss": 1.0}


def test_a_best_checkpoint_that_cannot_be_read_is_not_exported(tmp_path: Path, caplog: Any) -> None:
    """It is not read if the last step was the best one."""
    for step, weights, validation in ((9, "last", None), (3, "best", BEST)):
        record = record_in(tmp_path, step, save_best="eval_loss")
        record.progress.best, record.progress.best_path = BEST, "step=3"
        record.choose_weights()
        assert record.exported == {"path": "model", "weights": weights, "step": step, "validation": validation}
    assert caplog.text.count("no such checkpoint") == 1
    assert "model/ will hold the last weights, not the best" in caplog.text


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({}, {}, ""),
        ({}, {"save_best": "eval_loss"}, "the best so far, eval_loss 1.0000 at step 3, is lost, and starts over: "),
        ({"best_path": ""}, {"save_best": "eval_loss"}, ""),
        ({}, {"save_best": "eval_contains"}, "the best so far was by eval_loss, and starts over"),
    ],
)
def test_a_checkpoint_of_other_settings(
    tmp_path: Path, caplog: Any, changes: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    """Or whose best one is gone. In another folder, the logs are where they were."""
    state = {**asdict(Progress(metric="eval_loss", best=BEST, num_worse=2, best_path="step=3")), **changes}
    state["logs"] = [["logs/version_0", 0]]
    for folder, log in (("run", "logs/version_0"), ("other", str(tmp_path / "run" / "logs" / "version_0"))):
        caplog.clear()
        record = record_in(tmp_path / folder, **options)
        record.restore(state, str(tmp_path / "run" / "checkpoints" / "step=5"))
        assert record.progress.logs == [[log, 0]]
        assert (
            (record.progress.best is None) == bool(options) and told in caplog.text and bool(told) == bool(caplog.text)
        )
        assert record.progress.num_worse == (0 if "was by" in told else 2)


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
def test_a_run_that_is_cut_short_and_goes_on(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics have its last step, and those of both parts are one curve."""
    train = RadixModule.take_step

    def take_step(self: Any, *arguments: Any) -> Any:
        if self.global_step == 6:
            raise Stopped("stopped by SIGTERM after step 6", 143)
        return train(self, *arguments)

    flags = {"trainer__max_steps": 9, "trainer__max_epochs": 9, "trainer__log_every_n_steps": 4, "save_every_steps": 5}
    with monkeypatch.context() as patch:
        patch.setattr(RadixModule, "take_step", take_step)
        assert main(arguments(**flags)) == 143
    out = tmp_path / "out"
    found = summary(out)
    assert [*logged(out)] == [1, 4, 6]
    ended = {"reason": "Stopped", "text": "stopped by SIGTERM after step 6", "complete": False}
    assert found["ended"] == ended and found["exported"] is None
    assert found["steps"] == 6 and (out / "loss.png").exists()
    (out / "loss.png").unlink()
    assert main(arguments(**flags, ckpt_path="last")) == 0
    parts = [(out / each["path"], each["first_step"]) for each in summary(out)["logs"]]
    assert len(parts) == 2 and [*read_curves(parts)["loss"]][-2:] == [8, 9]
    assert summary(out)["loss"]["first"] == found["loss"]["first"] and (out / "loss.png").exists()


def test_what_a_killed_run_leaves(arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every checkpoint the metrics until then are on the disk, and the summary does not say that the run ended."""
    seen = []

    def look(self: Any, path: Path) -> None:
        self._write(with_picture=False)
        seen.append(([*logged(tmp_path / "out")], summary(tmp_path / "out")))

    monkeypatch.setattr(Record, "saved", look)
    assert main(arguments(save_every_steps=2, trainer__max_steps=4)) == 0
    (first, record), *_ = seen
    assert first == [1, 2] and record["steps"] == 2
    assert record["ended"] is record["exported"] is None and record["last"] == "checkpoints/step=2"


@pytest.fixture(scope="module")
def contrary(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validation rows with an answer that the training makes less and less likely."""
    rows = rows_in(shop / "validation.jsonl")
    for row in rows:
        row["messages"][-1]["content"] = ANSWER
    return write_rows(tmp_path_factory.mktemp("contrary") / "validation.jsonl", rows)


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


def test_a_run_that_is_over_has_nothing_left_to_do(again: Any, tmp_path: Path, capsys: Any) -> None:
    """Also in a folder that was moved, as the logs say."""
    before = summary(tmp_path / "out")
    weights = (tmp_path / "out" / "model" / "model.safetensors").read_bytes()
    shutil.move(tmp_path / "out", tmp_path / "moved")
    capsys.readouterr()
    assert main(again(output_dir=tmp_path / "moved", ckpt_path="last")) == 0
    after, said = summary(tmp_path / "moved"), capsys.readouterr().out
    assert "ended        nothing left to do: stopped early at step" in said and "raise early_stopping" in said
    assert f"logs         {tmp_path}/moved/logs/version_0\n" in said
    assert {**before, "ended": 0, "last": 0, "r": 0}.keys() == after.keys()
    assert all(after[name] == before[name] for name in ("steps", "loss", "seconds", "logs", "exported", "best"))
    assert (tmp_path / "moved" / "model" / "model.safetensors").read_bytes() == weights


def test_it_goes_on_in_another_folder(again: Any, tmp_path: Path) -> None:
    """Whose link is to the best checkpoint of before, until there is a better one."""
    best = summary(tmp_path / "out")["best"]
    resumed = tmp_path / "out" / "checkpoints" / "last"
    assert main(again(output_dir=tmp_path / "second", ckpt_path=resumed, early_stopping=3)) == 0
    found = summary(tmp_path / "second")
    assert (tmp_path / "second" / "checkpoints" / "best").resolve() == tmp_path / "out" / best["path"]
    assert found["best"] == {**best, "path": str(tmp_path / "out" / best["path"])}
    assert found["exported"]["step"] == best["step"]


@FULL
@float64_arithmetic()
def test_of_lora_only_the_adapters_are_kept_and_put_back(again: Any, tmp_path: Path, capsys: Any) -> None:
    """The exported weights have the merged adapters of the best checkpoint, which is not the last one."""
    pytest.importorskip("peft", reason="pip install peft")
    shutil.rmtree(tmp_path / "out")
    precision = {"model__dtype": "float64", "trainer__precision": "64-true"}
    assert main(again(model__use_peft=True, model__learning_rate=0.1, trainer__max_epochs=3, **precision)) == 0
    found = summary(tmp_path / "out")
    kept = load_file(tmp_path / "out" / found["best"]["path"] / "model.safetensors")
    assert kept and all("lora_" in name for name in kept)
    assert found["steps"] > found["best"]["step"] and found["validation"]["eval_loss"] > 1.01 * found["best"]["value"]
    capsys.readouterr()
    assert main(again("validate", model__model_name_or_path=tmp_path / "out" / "model", **precision)) == 0
    shown = float(capsys.readouterr().out.split("eval_loss")[1].split()[0])
    assert shown == pytest.approx(found["best"]["value"], rel=1e-10)
