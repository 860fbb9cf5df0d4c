"""What the tests of this folder share: forked ranks, and rows of which some steps leave a rank without work."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoTokenizer

from tests.support.processes import Launched, Server
from tests.support.runs import EXACT

NUM_ROWS = 21  # five steps of four rows and one of a single row: three of four ranks have no sequence then
STEPS = 12  # two epochs
SETTINGS = {
    **{"data__max_tokens": 64, "data__max_length": 64, "trainer__max_epochs": None, "trainer__max_steps": STEPS},
    **{"model__learning_rate": 1e-4, "trainer__accelerator": "cpu", **EXACT},
}


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of tokens that fork at two depths and in a few places not at all, with 1 to 12 labels each."""
    draw = random.Random(0)
    system, questions = tokens(draw, 24), [tokens(draw, 8) for _ in range(4)]
    lines = []
    for number in range(NUM_ROWS):
        prompt = [*system, *questions[number % 4]] if number % 7 else tokens(draw, 20)
        answer = tokens(draw, draw.choice([1, 2, 5, 12]))
        lines.append(json.dumps({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}))
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(40, 200) for _ in range(count)]


@pytest.fixture(scope="session")
def deep_model(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, with the tokenizer of the shop."""
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    folder = tmp_path_factory.mktemp("deep") / "model"
    tiny.tiny_qwen3(tokenizer, layers=4, hidden=64, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def line(arguments: Callable[..., list[str]], rows: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`line("name", flag=...)`: the command line of a run that writes into that folder.

    Without flags: 12 steps of the tiny model on `rows`, deterministic, in micro-batches of at most 64 tokens.
    """

    def build(name: str | Path, command: str = "fit", strategy: str | None = None, **flags: Any) -> list[str]:
        given = {"data__train_file": rows, **SETTINGS, "trainer__strategy": strategy, **flags}
        return arguments(command, output_dir=tmp_path / name, **given)

    return build


@pytest.fixture
def launch(server: Server, line: Callable[..., list[str]], tmp_path: Path) -> Callable[..., Launched]:
    """`launch("name", ranks=2, strategy="fsdp2", flag=...)`: starts `line` on two ranks.

    ranks: 1 for a process without torchrun. of_last: more arguments, of the last rank only.
    before, environment: of `Server.start`.
    """
    import torch.distributed as dist

    temporary = tmp_path / "temporary"
    temporary.mkdir(exist_ok=True)  # the fixture `start` uses it, too
    count = 0

    def start(
        name: str | Path,
        ranks: int = 1,
        before: Sequence[Callable[[], object]] = (),
        environment: dict[str, str] | None = None,
        of_last: Sequence[str] = (),
        **options: Any,
    ) -> Launched:
        nonlocal count
        count += 1
        folder, arguments = tmp_path / f"said_{count}", line(name, **options)
        folder.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "test"}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        runs = []
        for rank in range(ranks):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            variables = {"TMPDIR": str(temporary), **own, **(environment or {})}
            typed = [*arguments, *of_last] if rank == ranks - 1 else arguments
            runs.append(server.start(typed, folder / f"stderr_{rank}", variables, draws=False, before=before))
        return Launched(runs, store)

    return start


@pytest.fixture
def train(launch: Callable[..., Launched], tmp_path: Path) -> Callable[..., Path]:
    """As `launch`, and waits for the end: the folder. AssertionError if a rank fails, or any but the first speaks."""

    def run(name: str | Path, **options: Any) -> Path:
        launched = launch(name, **options)
        codes = launched.wait()
        assert codes == [0] * len(codes), f"{codes}\n{launched.said()}"
        assert not [line for run in launched.runs[1:] for line in run.said().splitlines()], launched.said()
        launched.wait_for_workers()
        return tmp_path / name

    return run


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """Where runs are kept that several tests compare with, and those that there are."""
    return tmp_path_factory.mktemp("references"), {}


@pytest.fixture
def reference(references: tuple[Path, dict[str, Path]], train: Callable[..., Path]) -> Callable[..., Path]:
    """As `train` without a name, once for the same options."""
    folder, finished = references

    def run(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in finished:
            finished[key] = train(folder / str(len(finished)), **options)
        return finished[key]

    return run
