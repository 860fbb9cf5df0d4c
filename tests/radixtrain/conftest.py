"""A demo in miniature: chats that share a system prompt."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
SYSTEM = "You name the shelf of a thing in the shop. Fruit is on shelf one, tools on shelf two, paper on shelf three."
THINGS = {"apple": "one", "pear": "one", "plum": "one", "hammer": "two", "saw": "two", "file": "two", "card": "three"}


def chats(count: int) -> list[dict[str, Any]]:
    turns = [
        (f"Where is the {thing}, number {n}?", f"Shelf {shelf}.") for n in range(9) for thing, shelf in THINGS.items()
    ]
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in turns[:count]
    ]


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl (20 chats), validation.jsonl (5) and model/."""
    sys.path.insert(0, str(RECIPES))
    try:
        import tiny
    finally:
        sys.path.remove(str(RECIPES))
    folder = tmp_path_factory.mktemp("shop")
    rows = chats(25)
    for name, part in (("train", rows[:20]), ("validation", rows[20:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")
    texts = {message["content"] for row in rows for message in row["messages"]}
    tokenizer = tiny.train_tokenizer(sorted(texts), 400)
    tiny.tiny_qwen3(tokenizer, layers=1, hidden=64, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def arguments(shop: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a short run; keyword arguments become flags, `__` a dot."""

    def build(command: str = "fit", **flags: Any) -> list[str]:
        defaults = {
            "output_dir": tmp_path / "out",
            "model__model_name_or_path": shop / "model",
            "model__learning_rate": 1e-2,
            "data__train_file": shop / "train.jsonl",
            "data__batch_size": 4,
            "data__max_tokens": 4096,
            "data__dataloader_num_workers": 0,
            "trainer__max_epochs": 2,
            "trainer__log_every_n_steps": 1,
            "trainer__enable_progress_bar": False,
        }
        merged = {**defaults, **flags}
        given = [(name, value) for name, value in merged.items() if value is not None]
        return [command, *(f"--{name.replace('__', '.')}={value}" for name, value in given)]

    return build
