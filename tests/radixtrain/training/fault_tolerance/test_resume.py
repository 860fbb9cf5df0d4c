"""What a run that goes on takes from its checkpoint: settings are applied, or refused by name; nothing is ignored."""

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_checkpoint, read_run
from radixtrain.training.fault_tolerance import run_state
from radixtrain.training.loop import Loop
from tests.support import FULL, cases
from tests.support.runs import EXACT, assert_same_run, contents, metrics

pytestmark = FULL


@pytest.fixture
def ran(arguments: Any, tmp_path: Path) -> Any:
    """`ran("name", flag=...)`: trains into that folder, and gives it back."""

    def run(name: str, **flags: Any) -> Path:
        assert main(arguments(output_dir=tmp_path / name, **flags)) == 0
        return tmp_path / name

    return run


@pytest.fixture
def refused(arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """`refused(flag=...)`: the one line that a run ends with instead of training. It leaves nothing, also no logs."""

    def run(**flags: Any) -> str:
        capsys.readouterr()
        assert main(arguments(**{"output_dir": tmp_path / "refused", **flags})) == 1
        assert not (tmp_path / "refused").exists()
        return capsys.readouterr().err.splitlines()[-1]

    return run


def column(folder: Path, name: str = "loss") -> dict[int, float]:
    """Per step, over all parts of the run."""
    return {step: value for (_, step), value in metrics(folder, name).items()}


def at(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step={step}"


EVERY = {"save_every_steps": 1, "save_total_limit": 99}


def test_a_run_with_another_end_goes_on(ran):
    """Again and again. With a constant learning rate, that it had fewer steps leaves no trace."""
    flags = {"model__lr_scheduler_type": "constant", **EXACT}
    whole = ran("whole", **flags)
    ran("short", **flags, trainer__max_steps=3)
    for stop in ({"trainer__max_epochs": 1}, {"trainer__max_steps": 8}, {}):
        short = ran("short", ckpt_path="last", **flags, **stop)
    assert_same_run(short, whole)


def end_time_after(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """The time of every run from now on is up after so many steps."""
    look = Loop._look_at_the_clock

    def looking(loop: Loop) -> None:
        if loop.global_step == num_steps:
            loop._started -= 4000
        look(loop)

    monkeypatch.setattr(Loop, "_look_at_the_clock", looking)


def test_a_run_that_max_time_has_stopped_goes_on(ran, monkeypatch, capsys):
    """Each start has the whole time again. One without a step names the checkpoint from which it went on."""
    whole, time = ran("whole", **EXACT), {"trainer__max_time": "00:01:00:00"}
    end_time_after(monkeypatch, 5)
    short = ran("short", **time, **EXACT)
    monkeypatch.undo()
    said = "stopped by trainer.max_time at step 5 of 10; resume with --ckpt_path last"
    assert len(column(short)) == 5 and said in capsys.readouterr().out
    ran("short", ckpt_path="last", trainer__max_time="00:00:00:00", **EXACT)
    printed = capsys.readouterr().out
    assert said in printed and str(at(short, 5)) in printed
    ran("short", ckpt_path="last", **time, **EXACT)
    assert_same_run(short, whole)


@pytest.fixture
def template(shop: Path, tmp_path: Path) -> Path:
    """Llama 3 and gpt-oss write the date into every prompt."""
    dated = "{{- 'Today is ' + strftime_now('%d %B %Y') + '. ' }}"
    (tmp_path / "dated.jinja").write_text(dated + AutoTokenizer.from_pretrained(shop / "model").chat_template)
    return tmp_path / "dated.jinja"


def test_a_template_sees_the_day_on_which_its_run_began(ran, refused, arguments, template, shop, tmp_path, monkeypatch):
    """When the run goes on, and when its checkpoint and the folder of its model are evaluated."""
    flags = {"data__chat_template_path": template}
    monkeypatch.setattr(run_state, "date", type("Then", (), {"today": lambda: date(2020, 2, 29)}))
    folder = ran("then", trainer__max_steps=2, **flags)
    monkeypatch.undo()
    ran("then", trainer__max_steps=4, ckpt_path="last", **flags)
    assert {read_run(at(folder, step))["data"]["template_date"] for step in (2, 4)} == {"2020-02-29"}
    told = refused(trainer__max_steps=6, ckpt_path=at(folder, 4), data__template_date="2020-03-01", **flags)
    assert "belongs to other steps or rows: digest was " in told
    assert "must be a date such as 2026-11-27; got '2020-02-30'" in refused(data__template_date="2020-02-30", **flags)

    def predicted(**flags: Any) -> str:
        given = {"data__predict_file": shop / "train.jsonl", "output_dir": tmp_path / "predicted", **flags}
        assert main(arguments("predict", **given)) == 0
        return (tmp_path / "predicted" / "predictions.jsonl").read_text(encoding="utf-8")

    model = {"model__model_name_or_path": folder / "model"}
    then, today = (predicted(data__template_date=day, **model) for day in ("2020-02-29", date.today().isoformat()))
    assert predicted(**model) == predicted(ckpt_path=at(folder, 4), **flags) == then != today


@pytest.mark.parametrize("due", [False, True])
def test_max_time_adds_no_validation(ran, monkeypatch, due):
    """One that is due at the step where the time is up takes place. An epoch has five steps."""
    end_time_after(monkeypatch, 4)
    flags = {"data__val_size": 4, "trainer__val_check_interval": 2, "save_best": "eval_loss"}
    every = {"data__batch_size": 2, "trainer__val_check_interval": 4} if due else {"trainer__val_check_interval": 3}
    run = ran("run", trainer__max_time="00:01:00:00", **{**flags, **every})
    losses, validations = column(run), column(run, "eval_loss")
    assert max(losses) == 4
    assert set(validations) == ({4} if due else {3})


def test_new_hyperparameters_are_applied(ran, monkeypatch):
    """As if the run had had them from there on: the losses are not those of the old settings any more."""
    flags = {"model__lr_scheduler_type": "constant", **EXACT}
    old = ran("old", **flags, **EVERY)
    new = {"model__learning_rate": 1e-3, "model__adam_beta1": 0.5, "model__weight_decay": 0.1, "data__max_tokens": 999}
    loops, fit = [], Loop.fit
    monkeypatch.setattr(Loop, "fit", lambda loop, *given, **named: [loops.append(loop), fit(loop, *given, **named)])
    resumed = ran("resumed", ckpt_path=at(old, 4), data__max_length=512, **{**flags, **new})
    assert list(column(resumed, "learning_rate").values()) == pytest.approx([1e-3] * 6)
    group = loops[0].optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (1e-3, (0.5, 0.999), 0.1)
    assert read_run(at(resumed, 10))["model"]["learning_rate"] == 1e-3
    assert column(resumed)[5] == column(old)[5] and column(resumed)[7] != column(old)[7]


def test_a_run_that_is_extended_takes_no_step_at_learning_rate_zero(ran):
    run = ran("out", trainer__max_epochs=1, model__lr_scheduler_type="linear")
    ran("out", trainer__max_epochs=2, model__lr_scheduler_type="linear", ckpt_path="last")
    rates = column(run, "learning_rate")
    assert len(rates) == 10 and min(rates.values()) > 0
    assert rates[6] == pytest.approx(1e-2 * 5 / 10)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model__lora_alpha": 8}, "model.lora_alpha was 32 and is 8, which would change the model"),
    ({"model__lora_r": 8}, "model.lora_r was 4 and is 8"),
    ({"model__optimizer": "muon"}, "model.optimizer was adamw and is muon, which keeps other moments; set adamw"),
    ({"model__use_peft": "false"}, "model.use_peft was true and is false"),
    ({"data__batch_size": 5}, "data.batch_size was 4 and is 5, which would change the steps"),
    ({"data__val_size": 4}, "data.val_size was 0.0 and is 4"),
    ({"seed_everything": 7}, "seed_everything was 42 and is 7"),
    ({"data__assistant_only_loss": "false"}, "ckpt_path: the checkpoint belongs to other steps or rows: digest was"),
]


def test_what_would_be_another_run_is_refused(ran, refused, tmp_path):
    """And leaves its folder as it was, also the logs. What the settings show is said before rows are read."""
    pytest.importorskip("peft", reason="pip install peft")
    flags = {"model__use_peft": "true", "model__lora_r": 4}
    run = ran("old", trainer__max_steps=3, **flags)
    before = contents(run)
    for changed, told in WRONG:
        assert told in refused(ckpt_path=run, **{**flags, **changed})
        if "data__assistant_only_loss" not in changed:
            missing = {"data__train_file": tmp_path / "missing.jsonl"}
            assert told in refused(ckpt_path="last", output_dir=run, **{**flags, **changed, **missing})
        assert contents(run) == before, changed
        assert [path for path in run.rglob("*") if path.is_dir() and not any(path.iterdir())] == []


def test_another_configuration_of_the_model_is_refused(ran, refused, shop, tmp_path):
    """The weights have the same names and shapes; the head would compute something else."""
    old = ran("old", trainer__max_steps=3)
    config = shutil.copytree(shop / "model", tmp_path / "changed") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-2}))
    message = refused(ckpt_path=old, model__model_name_or_path=tmp_path / "changed")
    assert "a model with another configuration: rms_norm_eps was 1e-06 and is 0.01" in message


def test_a_checkpoint_before_the_first_step_keeps_the_random_generators(ran, tmp_path, monkeypatch):
    """As one after the validation that was pending: the process has drawn other numbers since."""
    old = ran("old", trainer__max_steps=3)

    def save_at_once(loop):
        torch.rand(3)
        loop.save_checkpoint(tmp_path / "x")

    monkeypatch.setattr(Loop, "_train", save_at_once)
    ran("resumed", ckpt_path=old)
    assert read_run(tmp_path / "x")["generators"] == read_run(at(old, 3))["generators"]


@pytest.mark.parametrize("precision", cases(["32-true", "bf16-true"], ["bf16-true"]))
def test_adapters_go_on_only_beside_their_own_weights(ran, refused, shop, tmp_path, precision, capsys):
    """Whatever precision the run has converted them to; `export` merges them into no others either."""
    pytest.importorskip("peft", reason="pip install peft")
    base = shutil.copytree(shop / "model", tmp_path / "base")
    flags = {"model__use_peft": "true", "model__lora_r": 4, "trainer__precision": precision}
    flags["model__model_name_or_path"] = base
    old = ran("old", trainer__max_steps=3, **flags)
    state = read_checkpoint(at(old, 3))
    assert state.run["base"] and all("lora_" in name for name in state.weights)
    file = shutil.copytree(shop / "model", tmp_path / "other") / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(weights, file, {"format": "pt"})
    message = refused(ckpt_path=old, **{**flags, "model__model_name_or_path": tmp_path / "other"})
    assert "are not those of the run; give the model that it started from" in message
    ran("resumed", ckpt_path=old, **flags)
    assert main(["export", f"--ckpt_path={old}", f"--output_dir={tmp_path / 'exported'}"]) == 0
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert main(["export", f"--ckpt_path={old}", f"--output_dir={tmp_path / 'again'}"]) == 1
    assert "are not those of the run" in capsys.readouterr().err
