"""The drop-in recipes run on the demo in miniature, the loss falls, and they leave what their trainers leave."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from forked_ranks import on_ranks
from tiers import FULL, cases

from radixtrain.verification.oracle import float64_arithmetic

ROOT = Path(__file__).resolve().parents[2]
LOSS = re.compile(r"(?<!_)loss'?:? '?(\d[\d.e-]*)")

# What bounds the length, and what is left in --output_dir, if it has one; a Trainer logs at steps 10 and 20.
RECIPES = {
    "hf_trainer": ("--max_steps=20", "model.safetensors"),
    "hf_trainer_metrics": ("--max_steps=20", "model.safetensors"),
    "trl_sft": ("--max_steps=20", "model.safetensors"),
    "peft_lora": ("--max_steps=20", "adapter_model.safetensors"),
    "accelerate_loop": ("--epochs=2", "model.safetensors"),
    "lightning_module": ("--max_steps=11", "model.safetensors"),
    "plain_loop": ("--max_steps=11", None),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["demo.py", f"--output_dir={folder}", "--rows=192", "--validation_rows=12"])
        patch.syspath_prepend(str(ROOT / "recipes"))
        runpy.run_path(str(ROOT / "recipes" / "demo.py"), run_name="__main__")
    return folder


@pytest.mark.parametrize("recipe", cases(RECIPES, ["hf_trainer"]))
def test_trains_and_saves(demo, tmp_path, recipe, monkeypatch, capsys):
    """In this process, which has the trainers imported already: half the time."""
    length, left = RECIPES[recipe]
    files = [f"--model={demo / 'model'}", f"--train_file={demo / 'train.jsonl'}"]
    files += [f"--output_dir={tmp_path / 'out'}"] if left else []
    monkeypatch.setattr(sys, "argv", [recipe, *files, length])
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")
    losses = [float(loss) for loss in LOSS.findall(capsys.readouterr().out)]
    assert len(losses) > 1 and losses[-1] < 0.6 * losses[0], losses
    assert left is None or (tmp_path / "out" / left).is_file()


@FULL
def test_sequence_parallel(demo, monkeypatch, capfd):
    """Two ranks print the losses of one, in float64; torchrun's variables are those of `on_ranks`."""
    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__
    in_float64 = classmethod(lambda cls, *names, **options: load(cls, *names, **options).double())
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", in_float64)
    flags = [f"--model={demo / 'model'}", f"--train_file={demo / 'train.jsonl'}", "--epochs=1"]
    monkeypatch.setattr(sys, "argv", ["sequence_parallel.py", *flags])

    def work(rank):
        with float64_arithmetic():
            runpy.run_path(str(ROOT / "recipes" / "sequence_parallel.py"), run_name="__main__")

    losses = []
    for ranks in (2, 1):
        on_ranks(ranks, work, has_group=False)
        losses.append([float(loss) for loss in LOSS.findall(capfd.readouterr().out)])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4), "four digits are printed"
    assert len(losses[0]) == 12 and losses[0][-1] < 0.6 * losses[0][0], losses


@pytest.mark.parametrize("recipe", [*RECIPES, "sequence_parallel"])
def test_teaches_by_difference(recipe):
    """The lines that differ are marked, and a recipe is read on one screen. The demo's weights are random: a command
    for a checkpoint of the user's own names a rate for fine-tuning.
    """
    text = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    assert text.count("# <-") >= 2 and f" recipes/{recipe}.py" in text
    assert len(text.splitlines()) <= 72
    assert '"--learning_rate"' in text
    for command in re.findall(r"^python recipes/.*--model .*$", text, re.MULTILINE):
        assert float(command.split("--learning_rate ")[1]) <= 2e-4


@FULL
def test_the_module_of_fit_in_lightnings_trainer(demo, tmp_path, monkeypatch, capsys):
    files = [f"--model={demo / 'model'}", f"--train_file={demo / 'train.jsonl'}", f"--output_dir={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["lightning_trainer", *files, "--max_steps=11"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "recipes" / "lightning_trainer.py"), run_name="__main__")
    assert float(LOSS.findall(capsys.readouterr().out)[-1]) < 5
    assert (tmp_path / "out" / "model.safetensors").is_file()
