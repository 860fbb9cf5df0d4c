"""The demo: what it writes, that its seed decides every byte, that its template renders as the stock Qwen3's does."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
ROWS, VALIDATION_ROWS = 1200, 120


@pytest.fixture(scope="module")
def demo_module() -> Any:
    """`recipes/demo.py` as a module, with its folder on the path as when it runs as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "recipes")
        yield importlib.import_module("demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_demo(tmp_path_factory.mktemp("demo") / "runs" / "demo", "0")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder / "model")


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


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_writes_chats_with_one_system_prompt(folder: Path) -> None:
    train, validation = read_chats(folder / "train.jsonl"), read_chats(folder / "validation.jsonl")
    assert (len(train), len(validation)) == (ROWS, VALIDATION_ROWS)
    chats = train + validation
    assert all([message["role"] for message in chat] == ["system", "user", "assistant"] for chat in chats)
    assert len({chat[0]["content"] for chat in chats}) == 1
    assert len({chat[1]["content"] for chat in chats}) == ROWS + VALIDATION_ROWS, "a question appears twice"


def test_every_answer_is_a_code_of_the_prompt(folder: Path) -> None:
    chats = read_chats(folder / "train.jsonl")
    codes = {line.split()[0] for line in chats[0][0]["content"].splitlines() if line[1:2] == "-"}
    answers = {chat[2]["content"].split("code: ")[1] for chat in chats}
    assert len(codes) == 60 and answers == codes


def test_only_the_folder_is_left(folder: Path) -> None:
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]
    assert sorted(path.name for path in folder.iterdir()) == ["model", "train.jsonl", "validation.jsonl"]


def test_the_config_names_what_is_written(folder: Path) -> None:
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    named = [config["model"]["model_name_or_path"], config["data"]["train_file"], config["data"]["validation_file"]]
    assert sorted(named) == sorted(f"runs/demo/{path.name}" for path in folder.iterdir())


def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert files_of(run_demo(tmp_path / "again", "1")) == files_of(folder)


def test_seed_decides(demo_module: ModuleType) -> None:
    assert demo_module.make_chats(60, seed=0) == demo_module.make_chats(60, seed=0)
    assert demo_module.make_chats(60, seed=0) != demo_module.make_chats(60, seed=1)


def test_more_chats_than_wordings_are_refused(demo_module: ModuleType) -> None:
    with pytest.raises(SystemExit, match="suffice for"):
        demo_module.make_chats(demo_module.MAX_CHATS + 1, seed=0)


def test_refuses_a_folder_in_use(demo_module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="already there"):
        demo_module.write_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_interrupted_leaves_nothing(demo_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "write_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo_module.write_demo(tmp_path / "demo", rows=60, validation_rows=6)
    assert not list(tmp_path.iterdir())


def test_model_loads_and_generates(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    config = model.config
    assert config.model_type == "qwen3" and config.tie_word_embeddings and config.max_position_embeddings == 4096
    assert config.vocab_size % 64 == 0 and len(tokenizer) <= config.vocab_size <= 2048
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    inputs = tokenizer("Where is my lamp?", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=2, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_tokenizer_is_lossless_and_knows_its_special_tokens(folder: Path, tokenizer: Any) -> None:
    text = "Grüße, 北京! \t 3.14\n\n  <b>don't</b>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    for token in ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]:
        assert len(tokenizer(token)["input_ids"]) == 1


def test_lengths_are_as_promised(folder: Path, tokenizer: Any) -> None:
    chats = read_chats(folder / "train.jsonl")
    rows = sorted(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats)
    shared = next(number for number, (a, b) in enumerate(zip(rows[0], rows[-1], strict=False)) if a != b)
    assert 500 <= shared <= 700
    assert all(20 <= len(row) - shared <= 60 for row in rows)


def test_generation_prompt_is_a_prefix(folder: Path, tokenizer: Any) -> None:
    for chat in read_chats(folder / "validation.jsonl"):
        prompt = tokenizer.apply_chat_template(chat[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
        full = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        assert full[: len(prompt)] == prompt and len(full) > len(prompt)
        assert tokenizer.decode(full).endswith(f"<think>\n\n</think>\n\n{chat[2]['content']}<|im_end|>\n")


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


@pytest.mark.parametrize("generation", [{}, {"add_generation_prompt": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_template_renders_as_the_stock_one(tokenizer: Any, chat: list[dict[str, str]], generation: dict) -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL carries the stock template: pip install -e '.[dev]'")
    stock = (Path(spec.origin).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    options = {"tokenize": False, "add_generation_prompt": "enable_thinking" in generation, **generation}
    ours = tokenizer.apply_chat_template(chat, **options)
    assert ours == tokenizer.apply_chat_template(chat, chat_template=stock, **options)


def test_template_refuses_what_it_does_not_know(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="no role tool"):
        tokenizer.apply_chat_template([turn("user", "u"), turn("tool", "t")], tokenize=False)
