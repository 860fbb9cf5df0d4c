"""`radixtrain inspect`: a micro-batch as numbers and as a tree, with the text and the weights of its rows."""

import shutil
from collections import Counter
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from rich.cells import cell_len
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from radixtrain.__main__ import main
from radixtrain.collators.token_row import TokenRow
from radixtrain.commands.explain import inspect
from radixtrain.data.datamodule import SFTData
from radixtrain.explain.micro_batch import BatchTree, MicroBatch, draw
from radixtrain.testing import labelled_features
from tests.support.runs import rows_in

Build, Part, Print = Callable[..., TokenRow], Callable[..., MicroBatch], Callable[..., str]


def test_text_and_weights_of_rows(tokenizer: PreTrainedTokenizerBase, sample_of: Build, part_of: Part) -> None:
    """A character that branches inside is whole in each branch; weights add up; a label that is no token is not one."""
    tree = BatchTree(part_of([sample_of("5 ", "€"), sample_of("5 ", "₺")], pad_to_multiple_of=8), tokenizer)
    assert ["".join(token.text for token in tree.tokens[run.start : run.end]) for run in tree.runs] == ["5 ", "€", "₺"]
    part = part_of([sample_of("a", "b", weights=[0, 0.5]), sample_of("a", "b", weights=[0, 2])])
    assert BatchTree(part, tokenizer).tokens[1].weight == 2.5 and part.num_labels == 2
    tree = BatchTree(part_of([TokenRow(np.array([97, 98, 99]), np.array([-100, 98, 100]), "x:1")]), tokenizer)
    assert [token.bears_loss for token in tree.tokens] == [False, True, False]


@pytest.mark.parametrize("min_shared_tokens", [1, 3])
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(features=labelled_features(vocab_size=4))
def test_generated_batches(
    tokenizer: PreTrainedTokenizerBase, part_of: Part, min_shared_tokens: int, features: list[dict[str, list[int]]]
) -> None:
    """Each sequence is a path of runs, whose text is its text; the weights of the tokens are the labels of all."""
    columns = ((np.array(f["input_ids"], np.int64), np.array(f["labels"], np.int64)) for f in features)
    samples = [TokenRow(ids, np.where(labels == -100, -100, ids), f"x:{i}") for i, (ids, labels) in enumerate(columns)]
    part = part_of(samples, min_shared_tokens=min_shared_tokens)
    tree = BatchTree(part, tokenizer)
    for number, (sample, path) in enumerate(zip(part.samples, part.paths, strict=True)):
        assert "".join(tree.tokens[row].text for row in path.tolist()) == tokenizer.decode(sample.input_ids)
        own = [run for run in tree.runs if number in run.sequences]
        assert [row for run in own for row in range(run.start, run.end)] == path.tolist()
        assert [run.depth for run in own] == [sum(map(len, own[:n])) for n in range(len(own))]
        assert own[-1].ends.count(number) == 1 and tree.runs.index(own[0]) in tree.roots
        assert all(tree.runs.index(child) in run.children for run, child in pairwise(own))
    if min_shared_tokens == 1:  # otherwise copies of a row bear the loss of all
        labels = Counter(
            tuple(sample.input_ids[: place + 1].tolist())
            for sample in part.samples
            for place in range(1, len(sample.input_ids))
            if sample.labels[place] != -100
        )
        learned = [token.weight for token in tree.tokens if token.bears_loss]
        assert sorted(learned) == sorted(labels.values()) and sum(learned) == part.num_labels


# The tree in a terminal


@pytest.fixture
def drawn(tokenizer: PreTrainedTokenizerBase, part_of: Part, printed: Print) -> Print:
    def draw_it(samples: list[TokenRow], full: bool = False) -> str:
        part = part_of(samples)
        return printed(draw(BatchTree(part, tokenizer), [sample.where for sample in part.samples], full))

    return draw_it


def test_a_tree_of_two_levels(sample_of: Build, drawn: Print) -> None:
    answers = ("Yes", "Yes", "Yet", "No")
    samples = [sample_of("Is it?\n", answer, f"data/chats.jsonl:{n}") for n, answer in enumerate(answers, start=1)]
    assert drawn(samples).splitlines() == [
        "×4  tokens 0-6: 7",
        "Is it?↵",
        "├── ×3  tokens 7-8: 2, 2 with loss",
        "│   ⟦Ye⟧",
        "│   ├── ×2  token 9, 1 with loss; ends chats.jsonl:1, chats.jsonl:2",
        "│   │   ⟦s⟧",
        "│   └── ×1  token 10, 1 with loss; ends chats.jsonl:3",
        "│       ⟦t⟧",
        "└── ×1  tokens 11-12: 2, 2 with loss; ends chats.jsonl:4",
        "    ⟦No⟧",
    ]
    samples = [sample_of("a", "bc", "x:1"), sample_of("abc", "d", "x:2"), sample_of("abc", "e", "x:3")]
    assert drawn(samples).splitlines()[:2] == ["×3  tokens 0-2: 3, 2 with loss; ends x:1", "a⟦bc⟧×1"]


def test_a_deep_tree_stays_within_the_width(sample_of: Build, drawn: Print) -> None:
    """As deep as a conversation is long; and one that branches at every token, indented no further than some levels."""
    history = "".join(f"Where is thing {turn}? It is on shelf {turn}. " for turn in range(40))
    turns = [history[: history.index(f"thing {turn}?")] for turn in range(40)]
    lines = drawn([sample_of(prompt, f"thinking {turn}") for turn, prompt in enumerate(turns)]).splitlines()
    assert max(map(cell_len, lines)) <= 80 and sum(" after token " in line for line in lines) >= 25
    bushy = drawn([sample_of("", f"{number * 2654435761 % 2**14:014b}") for number in range(60)], full=True)
    for line in (*lines, *bushy.splitlines()):
        assert len(line) - len(line.lstrip("│├└─ ")) <= 4 * 9


def test_long_runs_and_many_branches_are_shortened(sample_of: Build, drawn: Print) -> None:
    samples = [sample_of("p" * 2000, chr(97 + n) + "x" * 99) for n in range(20)]
    shown = drawn(samples)
    assert "⋯ 1,760 characters ⋯" in shown.replace("\n", "")
    assert shown.splitlines()[-1] == "└── ⋯ 8 more branches ⋯"
    full = drawn(samples, full=True)
    assert "⋯" not in full and full.count("p") > 2000


# The command

LEGEND = "×3 sequences that pass   ⟦loss⟧×2 that learn it, if not all   ↵ line break   ⋯ left out"


@pytest.fixture(scope="module")
def model(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shop / "model" / name, folder)
    return folder


@pytest.fixture
def shown(shop: Path, model: Path, tmp_path: Path) -> Print:
    """What is printed in a width, without the command line. Arguments are those of `SFTData` and of `inspect`."""

    def run(width: int = 80, **options: Any) -> str:
        of_show = {name: options.pop(name) for name in ("step", "micro_batch", "row", "full") if name in options}
        files = {"train_file": str(shop / "train.jsonl"), "cache_dir": str(tmp_path), "dataset_num_proc": 1}
        data = SFTData(**{**files, "model_name_or_path": str(model), "batch_size": 4, **options})
        console = Console(width=width, file=StringIO())
        inspect(data, console, **of_show)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    return run


def test_the_command(
    arguments: Callable[..., list[str]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], shown: Print, shop: Path,
) -> None:  # fmt: skip
    """The answers of the rows of the step stand in the brackets."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(arguments("inspect", model__model_name_or_path=model, step=1)) == 0
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "step 1 of 5, micro-batch 0 of 1, counted from 0"
    numbers = {line[:17].strip(): line[17:].split()[0] for line in lines[1:6]}
    assert list(numbers) == ["sequences", "tokens", "computed tokens", "r", "labelled tokens"]
    assert numbers["sequences"] == "4"
    assert numbers["r"] == f"{int(numbers['tokens']) / int(numbers['computed tokens']):.2f}"
    tree = lines[lines.index(LEGEND) + 2 :]
    assert tree[0].startswith("×4  tokens 0-") and sum("; ends train.jsonl:" in line for line in tree) == 4
    answers = [row["messages"][-1]["content"] for row in rows_in(shop / "train.jsonl")]
    for line, text in pairwise(tree):
        if "; ends train.jsonl:" in line:
            assert text.endswith(f"{answers[int(line.rpartition(':')[2]) - 1]}<|im_end|>⟧")
    assert "\x1b" not in out and not (tmp_path / "out").exists()
    assert main(arguments("inspect", model__model_name_or_path=model, row="train.jsonl:7")) == 0
    out = capsys.readouterr().out
    assert "train.jsonl:7: row 7 of data.train_file" in " ".join(out.split()) and "in the first epoch" in out
    assert out.splitlines()[4:] == shown(200, row=7).splitlines()[4:]
    assert main(arguments("inspect", model__model_name_or_path=model, step=9)) == 1


def test_parts_of_a_step(shown: Print) -> None:
    parts = [shown(micro_batch=index, max_tokens=120, max_length=100) for index in range(2)]
    for index, part in enumerate(parts):
        assert part.startswith(f"step 0 of 5, micro-batch {index} of ") and max(map(cell_len, part.splitlines())) <= 80
    assert parts[0] != parts[1]
