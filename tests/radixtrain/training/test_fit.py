"""`fit` through the real command line, in process: what it writes, what it equals, how it resumes and stops."""

import json
import re
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from radixtrain.__main__ import main
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL, cases
from tests.support.runs import errors_in, logged, rows_in, summary, write_rows

FLOAT64 = {"model__dtype": "float64", "trainer__precision": "64-true"}
BAR = 1e-10  # of ten steps with AdamW in float64


@pytest.fixture
def arguments(arguments: Any) -> Any:
    """Of runs that share every token that they can."""
    return lambda *command, **flags: arguments(*command, **{"data__min_shared_tokens": 1, **flags})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_bit_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_fit_learns_and_leaves_a_hugging_face_folder(arguments, shop, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    assert main(arguments(data__validation_file=shop / "validation.jsonl")) == 0
    curve = logged(out)
    assert list(curve) == [*range(1, 11)] and curve[10] < 0.5 * curve[1]
    for column in ("grad_norm", "learning_rate", "r", "best_r", "tokens_per_second", "computed_tokens_per_second"):
        assert len(logged(out, column=column)) == 10
    assert logged(out, column="best_r")[1] >= logged(out, column="r")[1] > 1.5
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.config._attn_implementation == "sdpa"
    assert AutoTokenizer.from_pretrained(out / "model").chat_template
    closing = capsys.readouterr().out
    for word in ("eval_loss", "73,984 of 73,984 parameters", "per computed token", "effective", out / "model"):
        assert str(word) in closing
    assert not list(out.glob(".*partial"))


def test_every_command_takes_the_configuration_of_a_run_and_none_discards_the_run(arguments, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(overwrite=True, trainer__max_steps=1)) == 0
    (saved,) = out.rglob("fit.yaml")
    for command in (["inspect"], ["report", "--max_seconds=0"]):
        assert main([*command, f"--config={saved}"]) == 0, command
    assert main(["fit", f"--config={saved}"]) == 1
    assert f"{out} holds another run" in capsys.readouterr().err


@float64_arithmetic()
def test_neither_sharing_nor_the_cut_into_micro_batches_changes_a_run(arguments, tmp_path):
    """Losses and trained weights, in float64; also with activation checkpointing."""
    runs: dict[str, dict[str, Any]] = {
        "ordinary": {"dedup": "false"},
        "ordinary, cut": {"dedup": "false", "data__max_tokens": 120, "data__max_length": 120},
        "cut": {"data__max_tokens": 120, "data__max_length": 120, "model__activation_checkpointing": "true"},
        "whole": {},
    }
    for name, flags in runs.items():
        flags = {"data__batch_size": 10, "trainer__max_epochs": 4, **flags}
        assert main(arguments(output_dir=tmp_path / name, **FLOAT64, **flags)) == 0
    curve, trained = logged(tmp_path / "ordinary"), weights(tmp_path / "ordinary")
    assert len(curve) == 8
    for name in runs:
        assert logged(tmp_path / name) == pytest.approx(curve, rel=BAR), name
        for parameter, tensor in weights(tmp_path / name).items():
            assert (tensor - trained[parameter]).norm() <= BAR * trained[parameter].norm(), (name, parameter)
    r = {name: logged(tmp_path / name, column="r")[1] for name in runs}
    best = {name: logged(tmp_path / name, column="best_r")[1] for name in ("cut", "whole")}
    assert best["whole"] == best["cut"] >= r["whole"] > 1.2 * r["cut"] and r["ordinary"] <= 1.0


@FULL
def test_workers_change_nothing_and_end_with_the_run(arguments, tmp_path):
    """Not whenever Python finds the circle that holds their loader, which then waits 5 s for each of them."""
    others = set(active_children())
    for name, workers in (("none", 0), ("two", 2)):
        flags = {"data__dataloader_num_workers": workers, "trainer__max_steps": 7}
        assert main(arguments(output_dir=tmp_path / name, **flags)) == 0
        assert set(active_children()) <= others
    assert_bit_equal(weights(tmp_path / "none"), weights(tmp_path / "two"))


def test_lora_trains_adapters_and_exports_merged_weights(arguments, shop, tmp_path, capsys):
    pytest.importorskip("peft", reason="pip install peft")
    assert main(arguments(model__use_peft="true", model__lora_r=4)) == 0
    before, after = load_file(shop / "model" / "model.safetensors"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert (tmp_path / "out" / "model" / "adapter" / "adapter_model.safetensors").is_file()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    checkpoint = tmp_path / "out" / "checkpoints" / "last"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output_dir={tmp_path / 'exported'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"model        {tmp_path / 'exported'}"
    assert_bit_equal(load_file(tmp_path / "exported" / "model.safetensors"), after)


def test_what_cannot_be_resumed(arguments, tmp_path, capsys):
    assert main(arguments(trainer__max_epochs=2)) == 0  # ten steps
    saved = tmp_path / "out" / "checkpoints" / "last"
    for flags, message in (
        ({"trainer__max_epochs": 1}, "2 epochs were begun, and trainer.max_epochs is 1; raise it to continue"),
        ({"trainer__max_steps": 9}, "10 steps were begun, and trainer.max_steps is 9"),
    ):
        assert main(arguments(output_dir=tmp_path / "other", ckpt_path=saved, **flags)) == 1
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_loss_that_is_not_finite_stops_before_the_step(arguments, shop, tmp_path, capsys, caplog):
    assert main(arguments(model__learning_rate=1e30, model__max_grad_norm=0)) == 1
    [said] = errors_in(capsys.readouterr().err)
    assert re.match(rf"loss .*are not both finite; the weights were not changed.*{shop}/train\.jsonl:", said)
    assert f"resume it with --ckpt_path {tmp_path / 'out' / 'checkpoints' / 'step=1'}" in caplog.text
    assert not (tmp_path / "out" / "model").exists()


def evaluated(capsys: Any, line: list[str]) -> float:
    """The loss that the command prints."""
    capsys.readouterr()
    assert main(line) == 0
    return next(float(word) for word in capsys.readouterr().out.split() if re.fullmatch(r"\d+\.\d+", word))


@float64_arithmetic()
@pytest.mark.parametrize(
    ("command", "split"), cases([("validate", "validation"), ("test", "test")], [("test", "test")])
)
def test_validation_is_the_mean_over_tokens(arguments, shop, tmp_path, capsys, command, split):
    """The same however it is batched: minus the mean of the log-probabilities that `predict` writes for each row."""
    file = shop / "validation.jsonl"
    assert main(arguments("predict", data__predict_file=file, data__train_file=None, **FLOAT64)) == 0
    records = rows_in(tmp_path / "out" / "predictions.jsonl")
    assert [record["row"] for record in records] == [f"{file}:{line}" for line in range(1, 6)]
    logprobs = [logprob for record in records for logprob in record["logprobs"]]
    for batch_size in (1, 5):
        flags = {f"data__{split}_file": file, "data__train_file": None, "data__batch_size": batch_size, **FLOAT64}
        mean = -sum(logprobs) / len(logprobs)
        assert evaluated(capsys, arguments(command, **flags)) == pytest.approx(mean, rel=1e-12)


@float64_arithmetic()
@pytest.mark.parametrize("use_peft", cases([False, True], [True]))
def test_a_trained_model_is_evaluated_as_it_was_trained(arguments, shop, tmp_path, capsys, use_peft):
    """The rows that were held out, from their columns, with the template of the run; the results beside the model."""
    if use_peft:
        pytest.importorskip("peft", reason="pip install peft")
    texts = [[turn["content"] for turn in row["messages"]] for row in rows_in(shop / "train.jsonl")]
    named = [dict(zip(("rule", "ask", "shelf"), row, strict=True)) for row in texts]
    data, out, template = tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "template.jinja"
    write_rows(data, named)
    turns = "{{ m.role }} {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    template.write_text("{% for m in messages %}" + turns + "{% endfor %}")
    reading = {
        "data__columns": json.dumps({"system": "rule", "user": "ask", "assistant": "shelf"}),
        **{"data__chat_template_path": template, "data__completion_only_loss": "false", "seed_everything": 7},
    }
    held_out = {"data__train_file": data, "data__val_size": 4, **FLOAT64}
    lora = {"model__use_peft": use_peft, "model__lora_r": 4}
    assert main(arguments(**held_out, **reading, **lora, trainer__max_epochs=1)) == 0
    measured = summary(out)["exported"]["validation"]["eval_loss"]
    again = evaluated(capsys, arguments("validate", **held_out, **reading, **lora, ckpt_path="last"))
    model = {"model__model_name_or_path": out / "model", "output_dir": None}
    trained = evaluated(capsys, arguments("validate", **held_out, **model))
    assert (again, trained) == (pytest.approx(measured, rel=1e-9), pytest.approx(measured, rel=1e-9))
    assert main(arguments("predict", **{**model, "data__train_file": None, "data__predict_file": data, **FLOAT64})) == 0
    assert len(rows_in(out / "predictions.jsonl")) == 20


@FULL
def test_max_steps_alone_means_that_many_steps(arguments, tmp_path):
    """More than the three epochs that are the default; and a run shorter than the log interval logs each of them."""
    for steps, interval in ((16, 1), (2, 10)):
        flags = {"trainer__max_steps": steps, "trainer__log_every_n_steps": interval}
        assert main(arguments(output_dir=tmp_path / str(steps), trainer__max_epochs=None, **flags)) == 0
        assert list(logged(tmp_path / str(steps))) == list(range(1, steps + 1))
