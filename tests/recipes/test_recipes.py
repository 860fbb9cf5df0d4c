"""What a user copies, once each at its smallest: it trains and shares, and teaches by the lines that differ."""

import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import demo
import pytest

import radixtrain
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL, cases
from tests.support.processes import on_ranks

ROOT = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted((ROOT / "any_trainer").glob("*.py"))
LOSS = re.compile(r"(?<!_)loss'?:? '?(-?\d[\d.]*(?:e-?\d+)?)")
STEPS = 2
# What bounds the length, and what is left in --output_dir, if it has one; a Trainer logs every ten steps.
WITH_COLLATOR = {
    "hf_trainer": ("--max_steps=20", "model.safetensors"),
    "hf_trainer_metrics": ("--max_steps=20", "model.safetensors"),
    "trl_sft": ("--max_steps=20", "model.safetensors"),
    "peft_lora": ("--max_steps=20", "adapter_model.safetensors"),
    "accelerate_loop": ("--epochs=6", "model.safetensors"),
    "lightning_module": ("--max_steps=11", "model.safetensors"),
    "plain_loop": ("--max_steps=11", None),
    "lightning_trainer": ("--max_steps=11", "model.safetensors"),
}
NOTEBOOKS = {
    "sft": [r"unique: r = [5-9]", r"float64 .* equal"],
    "grpo": [r"3 calls shared: .*, r = [4-9]", "of generation"],
    "report": [r"computed:\s+r = 1\.0", r"computed:\s+r = [5-9]", "a date or time", "Nothing was found that breaks"],
}


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory) -> Path:
    demo.write_demo(folder := tmp_path_factory.mktemp("demo") / "demo", rows=96, validation_rows=12)
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    """The folder of a tiny LLaVA and its processor, whose tokens are those of a few words."""
    import tiny

    from tests.support.models import tiny_model
    from tests.support.trainers import llava_processor

    folder, colors = tmp_path_factory.mktemp("seeing"), ["red", "green", "blue", "yellow"]
    words = tiny.train_tokenizer([*colors, "What color is the circle?"], 300, [*tiny.SPECIAL_TOKENS, "<image>"])
    processor = llava_processor(words)
    sizes = {"vocab_size": 320, "pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    token = {"image_token_id": processor.image_token_id}
    tiny_model("LlavaForConditionalGeneration", **token, text_config=sizes).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def in_float64(monkeypatch):
    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__
    doubled = classmethod(lambda cls, *names, **options: load(cls, *names, **options).double())
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", doubled)
    with float64_arithmetic():
        yield


@pytest.fixture
def run(shop, monkeypatch) -> Callable[..., str]:
    """What a recipe prints, in this process, which has the trainers imported already. files: flags that name others."""

    def run_it(recipe: Path, *flags: str, files: tuple[str, ...] = ()) -> str:
        files = files or files_of(shop)
        monkeypatch.setattr(sys, "argv", [recipe.name, *files, *flags])
        monkeypatch.syspath_prepend(str(recipe.parent))
        for each in RECIPES:  # a recipe may import another one, which then has the `share_prefixes` of its first run
            sys.modules.pop(each.stem, None)
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(recipe), run_name="__main__")
        return printed.getvalue()

    return run_it


def files_of(folder: Path) -> tuple[str, ...]:
    return f"--model={folder / 'model'}", f"--train_file={folder / 'train.jsonl'}"


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in LOSS.findall(printed)]


@pytest.mark.parametrize("recipe", cases(RECIPES, [ROOT / "any_trainer" / "dpo.py"]), ids=lambda recipe: recipe.stem)
def test_shares_and_trains_as_the_ordinary_script(recipe, run, seeing, tmp_path, in_float64, monkeypatch):
    """In float64, beside the same script with a `share_prefixes` that does nothing: the printed losses agree."""
    share_prefixes, sharing_report, models = radixtrain.share_prefixes, radixtrain.sharing_report, list[Any]()
    given = (f"--output_dir={tmp_path}", f"--max_steps={STEPS}")
    files = (f"--model={seeing}",) if recipe.stem == "grpo_images" else ()

    def share(model: Any, **options: Any) -> Any:
        models.append(model)
        return share_prefixes(model, **options)

    monkeypatch.setattr(radixtrain, "share_prefixes", share, raising=False)
    shared = losses_in(run(recipe, *given, files=files))
    assert models, "the line that differs was not reached"
    for model in models:
        report = sharing_report(model)
        assert report.num_shared >= STEPS and report.compression_ratio > 1.5, report
    monkeypatch.setattr(radixtrain, "sharing_report", lambda model: "nothing is shared", raising=False)
    monkeypatch.setattr(radixtrain, "share_prefixes", lambda model, **_: model)
    assert len(shared) >= STEPS
    assert shared == pytest.approx(losses_in(run(recipe, *given, files=files)), rel=2e-3, abs=1e-3), (
        "as they are printed"
    )


@pytest.mark.parametrize("recipe", cases(WITH_COLLATOR, ["hf_trainer"]))
def test_trains_and_saves(recipe, run, small_demo, tmp_path, monkeypatch):
    length, left = WITH_COLLATOR[recipe]
    monkeypatch.chdir(tmp_path)
    flags = [length, *([f"--output_dir={tmp_path / 'out'}"] if left else [])]
    losses = losses_in(run(ROOT / f"{recipe}.py", *flags, files=files_of(small_demo)))
    assert losses and losses[-1] < 5, losses  # 7.6 or more before the first step
    assert left is None or (tmp_path / "out" / left).is_file()


@FULL
def test_images_by_hugging_faces_trainer(run, seeing, tmp_path):
    flags = (f"--output_dir={tmp_path}", "--max_steps=12", "--learning_rate=0.01")
    losses = losses_in(run(ROOT / "hf_trainer_images.py", *flags, files=(f"--model={seeing}",)))
    assert len(losses) >= 12 and losses[11] < 0.6 * losses[0], losses
    assert (tmp_path / "processor_config.json").is_file()


@FULL
def test_two_ranks_print_the_losses_of_one(run, in_float64):
    """torchrun's variables are those of `on_ranks`."""
    recipe = ROOT / "sequence_parallel.py"
    two, one = (on_ranks(number, lambda rank: run(recipe, "--epochs=2"), has_group=False)[0] for number in (2, 1))
    assert losses_in(two) == pytest.approx(losses_in(one), abs=2e-4), "four digits are printed"
    assert len(losses_in(two)) == 4 and losses_in(two)[-1] < losses_in(two)[0]


@FULL
def test_generate(run, shop):
    """An answer to each of 5 prompts, 4 samples of 2, the scores of choices, two turns; and every use shares."""
    files = (f"--model={shop / 'model'}", f"--file={shop / 'validation.jsonl'}")
    printed = run(ROOT / "generate.py", "--max_new_tokens=4", files=files)
    assert (printed.count("answer: "), printed.count("sample: ")) == (5, 8)
    [counts] = re.findall(r"num_tokens=(\d+), .*num_computed=(\d+)", printed)
    turns = re.findall(r"turn of (\d+) tokens, (\d+) of them cached", printed)
    assert int(counts[0]) > 2 * int(counts[1]) and int(turns[1][1]) > 0.8 * int(turns[0][0])
    assert re.search(r"\d choices for each prompt: [\d.]+% are right", printed)


@pytest.mark.parametrize("executed", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks(name, executed, tmp_path, monkeypatch, capsys):
    """What is stored in a notebook, and what its cells print, one after the other."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    cells = [each for each in json.loads(path.read_text(encoding="utf-8"))["cells"] if each["cell_type"] == "code"]
    said = "".join(line for cell in cells for output in cell["outputs"] for line in output["text"])
    assert "/tmp" not in said, "no path of the machine on which it ran"
    if executed:
        monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebooks write their demo
        monkeypatch.chdir(path.parent)
        exec(compile("\n\n".join("".join(cell["source"]) for cell in cells), name, "exec"), {"__name__": "__main__"})
        said = capsys.readouterr().out
    assert [text for text in NOTEBOOKS[name] if not re.search(text, said)] == []


def test_teaches_by_the_lines_that_differ():
    """They are marked, and a recipe is read on one screen. The demo's weights are random: a command for a checkpoint of
    the user's own names a rate for fine-tuning.
    """
    others = [ROOT / f"{name}.py" for name in (*WITH_COLLATOR, "sequence_parallel", "generate")]
    for recipe in (*RECIPES, *others):
        text = recipe.read_text(encoding="utf-8")
        simple = recipe in RECIPES
        assert f" recipes/{recipe.relative_to(ROOT)}" in text and len(text.splitlines()) <= (45 if simple else 72)
        if recipe.stem not in ("generate", "lightning_trainer"):
            assert text.count("# <-") == 1 if simple else text.count("# <-") >= 2, recipe
        for command in re.findall(r"^python recipes/.*--model .*--learning_rate (\S+)$", text, re.MULTILINE):
            assert float(command) <= 2e-4
