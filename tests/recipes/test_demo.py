"""The demo and the one with a tiny Qwen3.5: the files, their bytes, and templates that render as the stock ones."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo
import pytest
import qwen3_5
import yaml

from tests.support import FULL

ROOT = Path(__file__).resolve().parents[2]


@FULL
@pytest.mark.parametrize("name", ["demo", "qwen3_5"])
def test_what_a_user_types(name: str, tmp_path: Path) -> None:
    """The seed decides every byte; what the config names is all that is left; every code of the prompt is asked for."""
    folders = [tmp_path / seed / name for seed in ("0", "1")]
    for folder in folders:
        command = [sys.executable, f"recipes/{name}.py", f"--output_dir={folder}", "--rows=60", "--validation_rows=6"]
        environment = {**os.environ, "PYTHONHASHSEED": folder.parent.name}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stderr
    files = [path.relative_to(folders[0]) for path in folders[0].rglob("*") if path.is_file()]
    assert all((folders[0] / path).read_bytes() == (folders[1] / path).read_bytes() for path in files)
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    named = [config["model"]["model_name_or_path"], config["data"]["train_file"], config["data"]["validation_file"]]
    assert sorted(named) == sorted(f"runs/{name}/{path.name}" for path in folders[0].iterdir())
    chats = [json.loads(line)["messages"] for line in (folders[0] / "train.jsonl").read_text().splitlines()]
    codes = {line.split()[0] for line in chats[0][0]["content"].splitlines() if line[1:2] == "-"}
    assert len(codes) == 60 and {chat[2]["content"].split("code: ")[1] for chat in chats} <= codes


def turn(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


CHATS = {
    "two turns": [turn("user", "u"), turn("assistant", "a"), turn("user", "u"), turn("assistant", "b")],
    "open": [turn("system", "s"), turn("user", "u")],
    "thinking before": [turn("user", "u"), turn("assistant", "<think>\nhm\n</think>\n\na"), turn("user", "v")],
    "thinking apart": [turn("user", "u"), turn("assistant", "a", reasoning_content="\nhm\n")],
    "two answers": [turn("user", "u"), turn("assistant", "\na"), turn("assistant", "b")],
    "late system": [turn("user", "u"), turn("system", "s"), turn("user", "v"), turn("assistant", "a")],
}
OPTIONS: list[dict[str, bool]] = [{}, {"add_generation_prompt": True}]
THINKING = [{"enable_thinking": value, "add_generation_prompt": True} for value in (False, True)]
NO_LATE_SYSTEM = CHATS.keys() - {"late system"}


@pytest.mark.parametrize(
    ("make", "stock", "chats", "options"),
    [
        (demo.train_tokenizer, "qwen3", CHATS.keys(), [*OPTIONS, THINKING[0]]),
        (qwen3_5.tiny_tokenizer, "qwen3_5_nothink", NO_LATE_SYSTEM, [*OPTIONS, THINKING[1]]),
    ],
    ids=["demo", "qwen3_5"],
)
def test_template_renders_as_the_stock_one(make: Any, stock: str, chats: Any, options: Any) -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL carries the stock template: pip install -e '.[dev]'")
    template = (Path(spec.origin).parent / "chat_templates" / f"{stock}.jinja").read_text(encoding="utf-8")
    tokenizer = make(["a", "b"], 300)
    for name in chats:
        for each in options:
            ours = tokenizer.apply_chat_template(CHATS[name], tokenize=False, **each)
            assert ours == tokenizer.apply_chat_template(CHATS[name], tokenize=False, chat_template=template, **each), (
                name,
                each,
            )
