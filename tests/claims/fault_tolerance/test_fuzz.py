"""Random configurations and random data files: exit code 0, 1 or 2, and one line that says why, never a traceback.

Drawn by a seed, so that every run tries the same ones; RADIXTRAIN_FUZZ=1 draws others. RADIXTRAIN_TRIES scales their
number: 10 configurations and 15 files in `make test-full`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiers import FULL, tries

from radixtrain.__main__ import main
from radixtrain.commands.help import all_keys
from radixtrain.settings.fields import Key

pytestmark = FULL
CONFIGS, FILES = tries(10, 1000), tries(15, 1000)
SEED = random.SystemRandom().randrange(2**32) if os.environ.get("RADIXTRAIN_FUZZ") else 14

# Paths stay in the test's folder, and a run stays short.
NOT_DRAWN = {"config", "print_config", "output_dir", "data.cache_dir", "data.train_file", "data.dataset_num_proc"}
NUMBERS = [-1, 0, 1, 2, 5, 0.5, 1.5, 1e30, float("inf"), float("nan"), 2**31, 2**63, 10**40, -(2**63)]
OTHERS = [
    True,
    False,
    None,
    "",
    "auto",
    "nonsense",
    "1",
    "\x00",
    "ü\u2028",
    "a" * 300,
    [],
    [1, "x"],
    {},
    {"a": {"b": []}},
]


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """The exit code of a command. Fails if it ends by anything but a code, or an error is not one line."""
    try:
        code = main(argv)
    except SystemExit as stop:
        pytest.fail(f"{argv}: SystemExit {stop.code}")
    except BaseException as error:
        pytest.fail(f"{argv}: {type(error).__name__}: {error}")
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code in (0, 1, 2) and len(errors) == (code != 0) and "Traceback" not in said, (code, said)
    return code


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of `trainer` that outlive a run in its process."""
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def a_value(draw: random.Random, key: Key) -> Any:
    """In half of the draws one that the key takes."""
    if draw.random() < 0.5 and key.default:
        return draw.choice([yaml.safe_load(key.default), *key.kind.split(", ")])
    return draw.choice(draw.choice([NUMBERS, OTHERS]))


def a_config(draw: random.Random) -> str:
    """The text of a YAML file with one to four random keys; one in six is damaged."""
    keys = [key for key in all_keys("fit") if key.help and key.name not in NOT_DRAWN]
    tree: dict[str, Any] = {}
    for key in draw.sample(keys, draw.randint(1, 4)):
        *sections, name = key.name.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name if draw.random() < 0.95 else name + "x"] = a_value(draw, key)
    text = yaml.safe_dump(tree, allow_unicode=True)
    return damaged(draw, text) if draw.random() < 1 / 6 else text


def damaged(draw: random.Random, text: str) -> str:
    """Cut, doubled, or with a character that does not belong there."""
    place = draw.randrange(len(text) + 1)
    inserted = draw.choice(
        ["\t", "\x00", ": ", "*a", "&a ", "[", "{", "'", "!!python/object:os.system ", "---\n", "\ufeff"]
    )
    return draw.choice([text[:place], text + text, text[:place] + inserted + text[place:]])


def test_random_configurations(arguments: Any, tmp_path: Path, capsys: Any) -> None:
    draw, codes = random.Random(SEED), []
    for number in range(CONFIGS):
        path = tmp_path / f"{number}.yaml"
        path.write_text(a_config(draw), encoding="utf-8", errors="surrogatepass")
        command, *given = arguments(output_dir=tmp_path / f"out{number}")
        ends = ["--trainer.max_steps=1", "--trainer.max_time=00:00:00:20"]
        # What the file says comes last, but for the ends of the run.
        codes.append(run([command, *given, f"--config={path}", *ends], capsys))
    assert {0, 2} <= set(codes) or CONFIGS < 10, "the draws reach no run, or no refusal"


def a_row(draw: random.Random) -> Any:
    """A row that could be used, with none to two of its parts replaced."""
    turns = [{"role": draw.choice(["system", "user", "assistant", "tool"]), "content": a_text(draw)} for _ in range(3)]
    good: list[Any] = [
        {"messages": [{"role": "user", "content": a_text(draw)}, {"role": "assistant", "content": a_text(draw)}]},
        {"messages": turns},
        {"prompt": a_text(draw), "completion": a_text(draw)},
        {"text": a_text(draw)},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    row = draw.choice(good)
    for _ in range(draw.choice([0, 0, 1, 2])):
        row = replaced(draw, row)
    return row


def a_text(draw: random.Random) -> str:
    return draw.choice(["", "Hello.", "<|im_end|>", "\ud800", "\x00", "é\u2028ß", "a" * 5000, "{% for x in y %}", "  "])


def replaced(draw: random.Random, value: Any) -> Any:
    """The value with one part of it gone or of another kind."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        part = draw.choice([lambda: {}, lambda: {key: replaced(draw, value[key])}, lambda: {key + "s": value[key]}])()
        return {**{name: each for name, each in value.items() if name != key}, **part}
    if isinstance(value, list) and value and draw.random() < 0.8:
        index = draw.randrange(len(value))
        return [*value[:index], replaced(draw, value[index]), *value[index + 1 :]]
    return draw.choice([None, True, -1, 1.5, 10**40, float("nan"), "", "x", [], [[]], {}, {"a": None}, nested(200)])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def a_file(draw: random.Random) -> bytes:
    lines = [json.dumps(a_row(draw), ensure_ascii=draw.random() < 0.8) for _ in range(draw.randint(0, 4))]
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    text = "\n".join([*lines, *[good] * draw.randint(0, 3)]).encode("utf-8", "surrogatepass")
    spoilers: list[Callable[[bytes], bytes]] = [
        lambda data: data,
        lambda data: data,
        lambda data: data[: draw.randrange(len(data) + 1)],
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\n\n\r\n"),
        lambda data: b"[" + data.replace(b"\n", b",") + b"]",
        lambda data: data.replace(b"a", bytes([draw.randrange(256)])),
    ]
    return draw.choice(spoilers)(text)


def test_random_data_files(arguments: Any, tmp_path: Path, capsys: Any) -> None:
    draw, codes = random.Random(SEED + 1), []
    for number in range(FILES):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(a_file(draw))
        command = draw.choice(["inspect", "inspect", "inspect", "fit"])
        flags = {"data__on_bad_row": draw.choice(["raise", "skip"]), "data__max_tokens": 16384}
        short = {"trainer__max_steps": 1} if command == "fit" else {}
        named = {"data__train_file": path, "output_dir": tmp_path / f"out{number}"}
        codes.append(run(arguments(command, **named, **flags, **short), capsys))
    assert {0, 1} <= set(codes) or FILES < 10, "the draws are all good, or all bad"
