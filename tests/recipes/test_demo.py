"""The demo: what it writes, that its seed decides every byte, that its template renders as the stock Qwen3's does."""

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
from tiers import FULL

ROOT = Path(__file__).resolve().parents[2]
ROWS, VALIDATION_ROWS = 1200, 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_demo(tmp_path_factory.mktemp("demo") / "runs" / "demo", "0")


def run_demo(folder: Path, hash_seed: str) -> Path:
    """Run the script as a user does; it says what it wrote in three lines."""
    command = [sys.executable, "recipes/demo.py", "--output_dir", str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 and "tokens" in done.stdout
    return folder


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


@FULL
class TestFolder:
    def test_chats_with_one_system_prompt(self, folder: Path) -> None:
        train, validation = read_chats(folder / "train.jsonl"), read_chats(folder / "validation.jsonl")
        assert (len(train), len(validation)) == (ROWS, VALIDATION_ROWS)
        chats = train + validation
        assert all([message["role"] for message in chat] == ["system", "user", "assistant"] for chat in chats)
        assert len({chat[0]["content"] for chat in chats}) == 1
        assert len({chat[1]["content"] for chat in chats}) == ROWS + VALIDATION_ROWS, "a question appears twice"
        codes = {line.split()[0] for line in chats[0][0]["content"].splitlines() if line[1:2] == "-"}
        answers = {chat[2]["content"].split("code: ")[1] for chat in chats}
        assert len(codes) == 60 and answers == codes

    def test_only_what_the_config_names_is_left(self, folder: Path) -> None:
        assert [path.name for path in folder.parent.iterdir()] == ["demo"]
        config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
        named = [config["model"]["model_name_or_path"], config["data"]["train_file"], config["data"]["validation_file"]]
        assert sorted(named) == sorted(f"runs/demo/{path.name}" for path in folder.iterdir())

    def test_same_seed_same_bytes(self, folder: Path, tmp_path: Path) -> None:
        again = run_demo(tmp_path / "again", "1")
        files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        assert len(files) == sum(path.is_file() for path in again.rglob("*"))
        assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in files)

    def test_model_and_lengths(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        config = AutoModelForCausalLM.from_pretrained(folder / "model").config
        assert config.vocab_size % 64 == 0 and len(tokenizer) <= config.vocab_size <= 2048
        assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
        chats = read_chats(folder / "validation.jsonl")
        rows = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
        first, *_, last = sorted(rows)
        shared = next(number for number, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
        assert 500 <= shared <= 700 and all(20 <= len(row) - shared <= 60 for row in rows)
        for chat, row in zip(chats, rows, strict=True):
            prompt = tokenizer.apply_chat_template(chat[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
            assert row[: len(prompt)] == prompt and len(row) > len(prompt)
            assert tokenizer.decode(row).endswith(f"<think>\n\n</think>\n\n{chat[2]['content']}<|im_end|>\n")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="suffice for"):
        demo.make_chats(demo.MAX_CHATS + 1, seed=0)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="already there"):
        demo.write_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_interrupted_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted:
        def save_pretrained(self, *_: object, **__: object) -> None:
            raise KeyboardInterrupt

    make: Any = lambda *_, **__: Interrupted()  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        demo.write_demo(tmp_path / "demo", rows=60, validation_rows=6, make_model=make)
    assert not list(tmp_path.iterdir())


def test_template_refuses_what_it_does_not_know() -> None:
    with pytest.raises(Exception, match="no role tool"):
        demo.train_tokenizer(["a", "b"], 300).apply_chat_template(
            [turn("user", "u"), turn("tool", "t")], tokenize=False
        )


def turn(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


CHATS = {
    "one turn": [turn("system", "s"), turn("user", "u"), turn("assistant", "a")],
    "no system": [turn("user", "u"), turn("assistant", "a")],
    "two turns": [turn("user", "u"), turn("assistant", "a"), turn("user", "u"), turn("assistant", "b")],
    "open": [turn("system", "s"), turn("user", "u")],
    "thinking now": [turn("user", "u"), turn("assistant", "<think>\nhm\n</think>\n\na")],
    "thinking before": [turn("user", "u"), turn("assistant", "<think>\nhm\n</think>\n\na"), turn("user", "v")],
    "thinking apart": [turn("user", "u"), turn("assistant", "a", reasoning_content="\nhm\n")],
    "two answers": [turn("user", "u"), turn("assistant", "\na"), turn("assistant", "b")],
    "late system": [turn("user", "u"), turn("system", "s"), turn("user", "v"), turn("assistant", "a")],
}
OPTIONS: list[dict[str, bool]] = [{}, {"add_generation_prompt": True}]
THINKING = [{"enable_thinking": value, "add_generation_prompt": True} for value in (False, True)]
NO_LATE_SYSTEM = CHATS.keys() - {"no system", "late system"}


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
