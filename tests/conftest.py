"""What all tests share: generated cases, a tiny Qwen3, a demo in miniature, and the figures printed after the run.

Generated cases are the same in every run, so that red is a change's doing; RADIXTRAIN_FUZZ=1 draws new ones.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from forked import NOT_OURS, Run, Server

sys.path.remove(str(Path(__file__).parent))  # or `import kernels` would find the folder of its tests

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which transformers does

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
SYSTEM = "You name the shelf of a thing in the shop. Fruit is on shelf one, tools on shelf two, paper on shelf three."
THINGS = {"apple": "one", "pear": "one", "plum": "one", "hammer": "two", "saw": "two", "file": "two", "card": "three"}
FAMILIES_PAGE = ROOT / "docs" / "families.md"
FAMILIES_HEADS = {
    "all": ["family", "attention and layers", "float64", "float32", "ordinary float32"],
    "recurrent": [
        *("family", "mixer", "float64", "float32, worst tensor", "float32, median tensor"),
        *("bfloat16, worst tensor", "bfloat16, median tensor"),
    ],
}

settings.register_profile("fixed", derandomize=True)
settings.load_profile("default" if os.environ.get("RADIXTRAIN_FUZZ") else "fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Calibrations of only this run, shared by its workers and the commands that it starts."""
    if "RADIXTRAIN_CACHE" not in os.environ:
        folder = os.environ["RADIXTRAIN_CACHE"] = tempfile.mkdtemp(prefix="radixtrain-calibration-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(autouse=True)
def nothing_deterministic_is_left() -> Iterator[None]:
    """`trainer.deterministic: true` sets it for the whole process, and calibrations are not read then."""
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny_qwen3() -> Callable[..., "Qwen3ForCausalLM"]:
    """Two layers, grouped heads, random weights of order one; keyword arguments go to `Qwen3Config`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def build(seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
        generator = torch.Generator().manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads, "max_position_embeddings": 512, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                scale, shift = (0.2, 1.0) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + shift)
        return model

    return build


@pytest.fixture(scope="session")
def tiny_hybrid() -> Callable[..., Any]:
    """`tiny_hybrid(kind)`: a layer with a recurrent state and one that attends, random weights of order one.

    kind: "Qwen3.5" (gated delta rule), "Bamba" (state space) or "LFM2" (short convolution).
    """
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    delta |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    mamba = {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    }
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Qwen3.5": ("Qwen3_5", {**delta, "layer_types": ["linear_attention", "full_attention"]}),
        "Bamba": ("Bamba", mamba),
        "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    }

    def build(kind: str, seed: int = 0, **changes: Any) -> Any:
        name, settings = kinds[kind]
        config = getattr(transformers, f"{name}TextConfig" if name == "Qwen3_5" else f"{name}Config")
        model = getattr(transformers, f"{name}ForCausalLM")(config(**{**sizes, **heads, **settings, **changes}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.copy_(noise + torch.ones_like(noise) / 2 if parameter.ndim < 2 else noise)
        return model

    return build


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


@pytest.fixture(scope="session")
def heavy_model(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1.7 million parameters, 20 MB in a checkpoint, with the tokenizer of the shop."""
    from transformers import AutoTokenizer

    sys.path.insert(0, str(RECIPES))
    try:
        import tiny
    finally:
        sys.path.remove(str(RECIPES))
    folder = tmp_path_factory.mktemp("heavy") / "model"
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    tiny.tiny_qwen3(tokenizer, layers=2, hidden=256, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process draw no `loss.png`, which takes as long as all else in a short run."""
    from radixtrain.training.results.summary import RunSummary

    monkeypatch.setattr(RunSummary, "_draw", lambda self: None)


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
            found = [row for _, each, *row in families if each == group]
            num_tried = sum(each != "recurrent" for _, each, *_ in families)  # those have a second row
            write_families_table(group, found, whole=num_tried == families[0][0])


def write_families_table(group: str, found: list[list[str]], whole: bool) -> None:
    """A table of docs/families.md, between its two markers: the equal families first, then the refused ones.

    found: rows of this run, which replace those of the page. whole: of every family, so that no other row stays.
    """
    begin, end = f"<!-- {group}: begin -->", f"<!-- {group}: end -->"
    before, rest = FAMILIES_PAGE.read_text(encoding="utf-8").split(begin)
    said, after = rest.split(end)
    kept = [] if whole else [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines()[3:]]
    by_name = sorted(
        {row[0]: row for row in [*kept, *found]}.values(),
        key=lambda row: (row[2].startswith("refused"), row[0].lower()),
    )
    head = FAMILIES_HEADS["recurrent" if group == "recurrent" else "all"]
    table = "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *by_name])
    FAMILIES_PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights & Biases writes to disk, and its run is over afterwards: another logger would go on with it."""
    wandb = pytest.importorskip("wandb", reason="pip install radixtrain")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.finish()
