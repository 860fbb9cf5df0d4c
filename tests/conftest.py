"""What all tests share: generated cases, a tiny Qwen3, a demo in miniature, and the figures printed after the run.

Generated cases are the same in every run, so that red is a change's doing; RADIXTRAIN_FUZZ=1 draws new ones.
"""

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny
import torch
from hypothesis import settings
from tqdm import tqdm

from tests.claims.equivalence.families_page import write_families_table
from tests.support import models
from tests.support.processes import NOT_OURS, Run, Server

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = "You name the shelf of a thing in the shop. Fruit is on shelf one, tools on shelf two, paper on shelf three."
THINGS = {"apple": "one", "pear": "one", "plum": "one", "hammer": "two", "saw": "two", "file": "two", "card": "three"}

# A fork collects nothing that tests left: a store or a group waits for its threads, which it has not, and aborts.
os.register_at_fork(after_in_child=gc.freeze)
settings.register_profile("fixed", derandomize=True)
settings.load_profile("default" if os.environ.get("RADIXTRAIN_FUZZ") else "fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Tokenised rows of only this run, shared by its workers and the commands that it starts.

    And no thread of tqdm, which may hold its lock while ranks are forked: they would wait for it without end.
    """
    tqdm.monitor_interval = 0
    if "RADIXTRAIN_CACHE" not in os.environ:
        folder = os.environ["RADIXTRAIN_CACHE"] = tempfile.mkdtemp(prefix="radixtrain-cache-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Garbage is looked for in what tests make, not in the 600,000 objects that imports made: 1 s less of every 21."""
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_deterministic_is_left() -> Iterator[None]:
    """`trainer.deterministic: true` sets it for the whole process."""
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """PEFT's BOFT cannot build its kernel without CUDA and then leaves CXX=gcc, which links no C++ library."""
    before = dict(os.environ)
    yield
    if {**os.environ, "PYTEST_CURRENT_TEST": ""} != {**before, "PYTEST_CURRENT_TEST": ""}:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def hooks_that_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of tests in a model, by which one call waits for another, fails or counts, counts as of a known package."""
    from radixtrain.hf.guards import code

    monkeypatch.setattr(code, "KNOWN", code.KNOWN | {"tests"})


@pytest.fixture
def free_forks() -> Iterator[None]:
    """Recurrent layers fork wherever they can, in rows as short as those of tests."""
    from radixtrain.testing import free_forks

    with free_forks():
        yield


@pytest.fixture
def without_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is not tried before it is shared, so that the comparison itself has to see a mistake."""
    monkeypatch.setattr("radixtrain.hf.guards.model._tried", lambda *_, **__: None)


@pytest.fixture(scope="session")
def tiny_qwen3() -> "Callable[..., Qwen3ForCausalLM]":
    """`tiny_qwen3(seed=0, **changes)`: two layers, grouped heads, random weights of order one."""
    return models.tiny_qwen3


@pytest.fixture(scope="session")
def tiny_hybrid() -> Callable[..., Any]:
    """`tiny_hybrid(kind)`, of "Qwen3.5", "Bamba" or "LFM2": a layer with a recurrent state and one that attends."""
    return models.tiny_hybrid


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
    folder = tmp_path_factory.mktemp("shop")
    rows = chats(25)
    for name, part in (("train", rows[:20]), ("validation", rows[20:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")
    texts = {message["content"] for row in rows for message in row["messages"]}
    tokenizer = tiny.train_tokenizer(sorted(texts), 400)
    tiny.tiny_qwen3(tokenizer, layers=1, hidden=64, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="session")
def heavy_model(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1.7 million parameters, 20 MB in a checkpoint, with the tokenizer of the shop."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("heavy") / "model"
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    tiny.tiny_qwen3(tokenizer, layers=2, hidden=256, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process draw no `loss.png`, which takes as long as all else in a short run."""
    from radixtrain.training.results.record import Record

    monkeypatch.setattr(Record, "_draw", lambda self: None)


@pytest.fixture
def draws() -> None:
    """For a test that looks at `loss.png`: then `arguments` leaves drawing as it is."""


@pytest.fixture
def arguments(shop: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """The command line of a short run; keyword arguments become flags, `__` a dot. It draws nothing: see `draws`."""
    if "draws" not in request.fixturenames:
        request.getfixturevalue("no_picture")

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


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """What commands in processes of their own are forked from."""
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def server_without_ours() -> Iterator[Server]:
    with Server(NOT_OURS) as server:
        yield server


@pytest.fixture
def fresh(server_without_ours: Server, tmp_path: Path) -> Callable[[str], tuple[int, Run]]:
    """`fresh(code)`: runs Python code where torch and Hugging Face's models are imported, and nothing of radixtrain is.

    The exit code, and the run with what it has printed.
    """
    count = 0

    def run(code: str) -> tuple[int, Run]:
        nonlocal count
        count += 1
        run = server_without_ours.start_code(code, tmp_path / f"fresh_{count}")
        return run.wait(), run

    return run


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Callable[..., Run]:
    """`start(arguments)`: the run of a command line in a process of its own, without a picture.

    Its temporary files go to `tmp_path / "temporary"`.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    count = 0

    def run(arguments: list[str], environment: dict[str, str] | None = None, **options: Any) -> Run:
        nonlocal count
        count += 1
        variables = {"TMPDIR": str(temporary), **(environment or {})}
        return server.start(arguments, tmp_path / f"stderr_{count}", variables, **{"draws": False, **options})

    return run


@pytest.fixture
def printed_by(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`printed_by("fit", "--help")`: what a command that ends by itself prints, run in the project's folder.

    In this process, which has imported what takes a new one seconds; `tests/radixtrain/test_main.py` starts a new one.
    """

    def run(*arguments: str) -> str:
        from radixtrain.__main__ import main

        monkeypatch.chdir(ROOT)
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        assert code in (None, 0), captured.err
        return captured.out

    return run


@pytest.fixture
def print_after(record_property: Callable[[str, Any], None]) -> Callable[[str, str], None]:
    """`print_after(section, line)`: a line of the summary after the run, with every number of workers."""
    return lambda section, line: record_property("print_after", json.dumps([section, line]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    recorded = [
        (name, json.loads(value))
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name in ("print_after", "family")
    ]
    lines = sorted(value for name, value in recorded if name == "print_after")
    for section, group in groupby(lines, key=lambda entry: entry[0]):
        terminalreporter.section(section)
        for _, line in group:
            terminalreporter.write_line(line)
    families = [value for name, value in recorded if name == "family"]
    if os.environ.get("RADIXTRAIN_WRITE_TABLE"):
        for group in sorted({each for _, each, *_ in families}):
            found = [(name, said) for _, each, name, said in families if each == group]
            write_families_table(group, found, whole=len(families) == families[0][0])


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights & Biases writes to disk, and its run is over afterwards: another logger would go on with it."""
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.finish()
