"""What a user copies, at its smallest: a table of commands, as their docstrings show them, and of what they print."""

import io
import json
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import demo
import pytest
import tiny

from tests.support import FULL, cases
from tests.support.models import tiny_model
from tests.support.trainers import llava_processor

ROOT = Path(__file__).resolve().parents[2] / "recipes"
SHARED = r"calls shared: .*, r = (1\.[5-9]|[2-9])"
LEARNED = r"loss'?:? '?[0-4]\."  # 7.6 or more before the first step
ANY_TRAINER = [f"any_trainer/{path.name}" for path in sorted((ROOT / "any_trainer").glob("*.py"))]
IMAGES = " --model=seeing"
COMMANDS = {
    **{f"{name} --max_steps=2{IMAGES if 'images' in name else ''}": SHARED for name in ANY_TRAINER},
    "hf_trainer.py --max_steps=20": LEARNED,
    "hf_trainer_metrics.py --max_steps=20": LEARNED,
    f"hf_trainer_images.py{IMAGES} --max_steps=12 --learning_rate=0.01": r"loss': '?[012]\.",
    "trl_sft.py --max_steps=20": LEARNED,
    "peft_lora.py --max_steps=20": LEARNED,
    "accelerate_loop.py --epochs=6": LEARNED,
    "lightning_module.py --max_steps=11": LEARNED,
    "lightning_trainer.py --max_steps=11": LEARNED,
    "plain_loop.py --max_steps=11": LEARNED,
    "generate.py --max_new_tokens=4": r"(?s)answer: .*sample: .*\d choices .*% are right.*, [1-9]\d+ of them cached",
    "demo.py --output_dir=new --rows=60": "new/model: Qwen3ForCausalLM, 533,248 random weights",
    "banking77.py --data_dir=bank --max_epochs=1": r"exact match before: 0\.0%(.|\n)*exact match after: \d",
    "qwen3_5.py --output_dir=newer --rows=60": "newer/model: Qwen3_5",
}
QUICK = ["any_trainer/dpo.py --max_steps=2", "hf_trainer.py --max_steps=20"]
NOTEBOOKS = {
    "sft": [r"unique: r = [5-9]", r"float64 .* equal"],
    "grpo": [r"3 calls shared: .*, r = [4-9]", "of generation"],
    "report": [r"computed:\s+r = 1\.0", r"computed:\s+r = [5-9]", "a date or time", "Nothing was found that breaks"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `make fit` writes, and with a tiny LLaVA in `seeing`."""
    folder = tmp_path_factory.mktemp("made")
    start = folder / "runs" / "demo"
    demo.write_demo(start, rows=96, validation_rows=12)
    for name in ("bank", "runs/demo/sft"):
        (folder / name).mkdir()
    (start / "sft" / "model").symlink_to(start / "model")
    for name, rows in (("train", "train"), ("test", "validation")):
        (folder / "bank" / f"banking77_{name}.jsonl").symlink_to(start / f"{rows}.jsonl")
    texts = ["red", "green", "blue", "yellow", "What color is the circle?"]
    words = tiny.train_tokenizer(texts, 300, [*tiny.SPECIAL_TOKENS, "<image>"])
    processor = llava_processor(words)
    sizes = {"vocab_size": 320, "pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    token = {"image_token_id": processor.image_token_id}
    model = tiny_model("LlavaForConditionalGeneration", **token, text_config=sizes)
    for each in (model, processor):
        each.save_pretrained(folder / "seeing")
    return folder


@pytest.mark.parametrize(
    "command", cases(COMMANDS, ["any_trainer/dpo.py --max_steps=2", "hf_trainer.py --max_steps=20"])
)
def test_a_command_runs(command: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has the trainers imported already."""
    name, *flags = command.split()
    recipe = ROOT / name
    monkeypatch.chdir(made)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.syspath_prepend(str(recipe.parent))
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(recipe), run_name="__main__")
    assert re.search(COMMANDS[command], printed.getvalue()), printed.getvalue()
    if COMMANDS[command] == LEARNED and recipe.stem != "plain_loop":
        assert list((made / "runs" / "demo" / recipe.stem).glob("*model.safetensors"))
    if COMMANDS[command] == SHARED:
        assert recipe.read_text("utf-8").count("# <-") == 1, "one line differs from an ordinary script"


@FULL
def test_two_ranks(made: Path) -> None:
    command = ["torch.distributed.run", "--nproc_per_node", "2", str(ROOT / "sequence_parallel.py"), "--epochs=6"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=made, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(LEARNED, done.stdout), done.stderr


@pytest.mark.parametrize("executed", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks(
    name: str, executed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is stored in a notebook, and what its cells print, one after the other."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    cells = [each for each in json.loads(path.read_text(encoding="utf-8"))["cells"] if each["cell_type"] == "code"]
    said = "".join(line for cell in cells for output in cell["outputs"] for line in output["text"])
    if executed:
        monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebooks write their demo
        monkeypatch.chdir(path.parent)
        exec(compile("\n\n".join("".join(cell["source"]) for cell in cells), name, "exec"), {"__name__": "__main__"})
        said = capsys.readouterr().out
    assert [text for text in NOTEBOOKS[name] if not re.search(text, said)] == []
