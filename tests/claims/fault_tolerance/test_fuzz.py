"""Random configurations and random data files: exit code 0, 1 or 2, and one line that says why, never a traceback.

The same in every run; RADIXTRAIN_FUZZ=1 draws others. RADIXTRAIN_TRIES scales their number: 10 configurations and 15
files in `make test-full`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from radixtrain.__main__ import main
from radixtrain.commands.help import all_keys
from tests.support import FULL, tries
from tests.support.runs import errors_in

pytestmark = FULL
CONFIGS, FILES = tries(10, 1000), tries(15, 1000)
DRAWN = settings(
    derandomize=not os.environ.get("RADIXTRAIN_FUZZ"),
    phases=[Phase.generate],  # a run takes too long to look for a shorter example
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
# Paths stay in the test's folder, and a run stays short.
NOT_DRAWN = {"config", "print_config", "output_dir", "data.cache_dir", "data.train_file", "data.dataset_num_proc"}
KEYS = [key for key in all_keys("fit") if key.help and key.name not in NOT_DRAWN]

TEXTS = st.sampled_from(
    ["", "auto", "x", "1", "\x00", "\ud800", "é\u2028ß", "<|im_end|>", "{% for x in y %}", "a" * 5000]
)
NUMBERS = st.integers(-2, 5) | st.integers(-(2**70), 10**40) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "text", "role"]), inner),
    max_leaves=4,
)
SPOILERS = ["\t", "\x00", ": ", "*a", "&a ", "[", "{", "'", "!!python/object:os.system ", "---\n", "\ufeff", "\n\r\n"]


@st.composite
def spoilt(draw: Any, texts: st.SearchStrategy[str]) -> str:
    """As drawn, or one in three cut, doubled, or with a character that does not belong there."""
    text = draw(texts)
    place = draw(st.integers(0, len(text)))
    found = [text[:place], text + text, text[:place] + draw(st.sampled_from(SPOILERS)) + text[place:]]
    return draw(st.sampled_from([text] * 6 + found))


@st.composite
def configs(draw: Any) -> str:
    """The text of a YAML file with one to four keys; half of the values are such as the key takes."""
    tree: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)):
        *sections, name = key.name.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        taken = [yaml.safe_load(key.default), *key.kind.split(", ")] if key.default else [None]
        inside[name + draw(st.sampled_from([""] * 19 + ["x"]))] = draw(st.sampled_from(taken) | VALUES)
    return yaml.safe_dump(tree, allow_unicode=True)


TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": TEXTS}), min_size=1
)
GOOD = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    *({"prompt": "a", "completion": "b"}, {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}),
]


# Rows that could be used, and some with up to two entries of another kind.
OTHERS = st.dictionaries(
    st.sampled_from(["messages", "labels", "input_ids", "prompt", "text"]), TURNS | TEXTS | VALUES, max_size=2
)
ROWS = st.builds(dict.__or__, st.sampled_from(GOOD), OTHERS)


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """The exit code of a command. Fails if it ends by anything but a code, or an error is not one line."""
    code = main(argv)
    said = capsys.readouterr().err
    assert code in (0, 1, 2) and len(errors_in(said)) == (code != 0) and "Traceback" not in said, (code, said)
    return code


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of `trainer` that outlive a run in its process."""
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def test_random_configurations(arguments: Callable[..., list[str]], tmp_path: Path, capsys: Any) -> None:
    codes: list[int] = []

    @settings(DRAWN, max_examples=CONFIGS)
    @given(spoilt(configs()))
    def try_one(text: str) -> None:
        path = tmp_path / f"{len(codes)}.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        ends = ["--trainer.max_steps=1", "--trainer.max_time=00:00:00:20"]
        # What the file says comes last, but for the ends of the run.
        line = [*arguments(output_dir=tmp_path / f"out{len(codes)}"), f"--config={path}", *ends]
        codes.append(run(line, capsys))

    try_one()
    assert {0, 2} <= set(codes) or CONFIGS < 10, "the draws reach no run, or no refusal"


def test_random_data_files(arguments: Callable[..., list[str]], tmp_path: Path, capsys: Any) -> None:
    codes: list[int] = []
    lines = st.lists(ROWS.map(json.dumps), min_size=1, max_size=4).map("\n".join)

    @settings(DRAWN, max_examples=FILES)
    @given(spoilt(lines), st.sampled_from(["inspect", "inspect", "inspect", "fit"]), st.sampled_from(["raise", "skip"]))
    def try_one(text: str, command: str, on_bad_row: str) -> None:
        path = tmp_path / f"{len(codes)}.jsonl"
        path.write_text(text, encoding="utf-8")
        short = {"trainer__max_steps": 1} if command == "fit" else {}
        named = {"data__train_file": path, "output_dir": tmp_path / f"out{len(codes)}"}
        codes.append(run(arguments(command, **named, data__on_bad_row=on_bad_row, **short), capsys))

    try_one()
    assert {0, 1} <= set(codes) or FILES < 10, "the draws are all good, or all bad"
