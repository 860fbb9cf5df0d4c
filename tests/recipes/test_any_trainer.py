"""The recipes of `share_prefixes`, each a whole script in one screen: it differs from an ordinary one by one line.

Run twice on a shop in miniature, in float64, as it is and with a `share_prefixes` that does nothing: the printed losses
agree.
"""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import FULL, cases

import radixtrain
from radixtrain.verification.oracle import float64_arithmetic

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "any_trainer"
RECIPES = sorted(FOLDER.glob("*.py"))
QUICK = [FOLDER / "dpo.py"]
LOSS = re.compile(r"(?<!_)loss'?:? '?(-?\d[\d.]*(?:e-?\d+)?)")
STEPS = 2


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    """The folder of a tiny LLaVA and its processor, whose tokens are those of a few words."""
    import tiny
    from image_processors import llava_processor
    from tiny_models import tiny_model

    folder, colors = tmp_path_factory.mktemp("seeing"), ["red", "green", "blue", "yellow"]
    words = tiny.train_tokenizer([*colors, "What color is the circle?"], 300, [*tiny.SPECIAL_TOKENS, "<image>"])
    processor = llava_processor(words)
    sizes = {"vocab_size": 320, "pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    token = {"image_token_id": processor.image_token_id}
    tiny_model("LlavaForConditionalGeneration", **token, text_config=sizes).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def run(shop, seeing, tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """What a recipe prints, when `share_prefixes` is this function."""

    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__
    in_float64 = classmethod(lambda cls, *names, **options: load(cls, *names, **options).double())
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", in_float64)

    def run_it(recipe: Path, share: Callable[..., Any]) -> str:
        files = [f"--model={shop / 'model'}", f"--train_file={shop / 'train.jsonl'}"]
        files = [f"--model={seeing}"] if recipe.stem == "grpo_images" else files
        monkeypatch.setattr(sys, "argv", [recipe.name, *files, f"--output_dir={tmp_path}", f"--max_steps={STEPS}"])
        monkeypatch.setattr(radixtrain, "share_prefixes", share, raising=False)
        monkeypatch.syspath_prepend(str(recipe.parent))
        for each in RECIPES:  # a recipe may import another one, which then has the `share_prefixes` of its first run
            sys.modules.pop(each.stem, None)
        with float64_arithmetic():
            runpy.run_path(str(recipe), run_name="__main__")
        return capsys.readouterr().out

    return run_it


@pytest.mark.parametrize("recipe", cases(RECIPES, QUICK), ids=lambda recipe: recipe.stem)
def test_shares_and_trains_as_the_ordinary_script(recipe, run, monkeypatch):
    share_prefixes, sharing_report = radixtrain.share_prefixes, radixtrain.sharing_report
    models: list[Any] = []

    def share(model: Any, **options: Any) -> Any:
        models.append(model)
        return share_prefixes(model, **options)

    shared = run(recipe, share)
    assert models, "the line that differs was not reached"
    for model in models:
        report = sharing_report(model)
        assert report.num_shared >= STEPS and report.compression_ratio > 1.5, report
    monkeypatch.setattr(radixtrain, "sharing_report", lambda model: "nothing is shared", raising=False)
    losses, ordinary = (
        [float(loss) for loss in LOSS.findall(text)] for text in (shared, run(recipe, lambda m, **_: m))
    )
    assert len(losses) >= STEPS
    assert losses == pytest.approx(ordinary, rel=2e-3, abs=1e-3), "four digits are printed"


@FULL
def test_images_by_hugging_faces_trainer(seeing, tmp_path, monkeypatch, capsys):
    path = ROOT / "recipes" / "hf_trainer_images.py"
    arguments = [f"--model={seeing}", f"--output_dir={tmp_path}", "--max_steps=12", "--learning_rate=0.01"]
    monkeypatch.setattr(sys, "argv", [path.name, *arguments])
    runpy.run_path(str(path), run_name="__main__")
    losses = [float(loss) for loss in LOSS.findall(capsys.readouterr().out)]
    assert len(losses) >= 12 and losses[11] < 0.6 * losses[0], losses
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "processor_config.json").is_file()


def test_teaches_by_one_line():
    assert {"dpo", "kto", "reward", "sft"} <= {recipe.stem for recipe in RECIPES}
    for recipe in RECIPES:
        text = recipe.read_text(encoding="utf-8")
        assert text.count("# <-") == 1 and len(text.splitlines()) <= 45, recipe.name
        assert f"python recipes/any_trainer/{recipe.name}" in text
