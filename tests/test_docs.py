"""The pages under docs/ and CONTRIBUTING.md say what the code does: their examples run, their tables are the code's."""

import ast
import doctest
import inspect
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import yaml
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import radixtrain
from radixtrain import PrefixGroupedSampler
from radixtrain.collators.prefix_sampler import ratio_of_batches
from radixtrain.collators.token_row import TokenRow
from radixtrain.commands.help import all_keys
from radixtrain.data.chat import ChatEncoder, UnlabelledEncoder
from radixtrain.data.columns import PAIRS
from radixtrain.data.files.rows import STANDARD_COLUMNS
from radixtrain.data.files.sources import TABLES as OF_TABLES
from radixtrain.data.files.sources import TEXTS, Source, as_sources, read_rows
from radixtrain.errors import UserError
from radixtrain.settings.commands import Doctor, Export, RunSettings, Verify
from radixtrain.settings.fields import Key, parts_of
from radixtrain.training.answers.evaluate_generation import load_metric
from tests.pages import ROOT, blocks_in, read
from tests.support import FULL
from tests.support.batches import byte_tokenizer

WRITING = bool(os.environ.get("RADIXTRAIN_WRITE_TABLE"))


# docs/data-formats.md: every row is encoded, and every error is raised

FORMATS, RUNS, LOGS = "docs/data-formats.md", "docs/agents-runs.md", "recipes/logs/README.md"
EXAMPLE = re.compile(r"^```json([^\n]*)\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(*found, id=found[1][:50]) for page in (FORMATS, RUNS, LOGS) for found in EXAMPLE.findall(read(page))
]


@cache
def stock_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and Qwen3's stock chat template."""
    trl = pytest.importorskip("trl", reason="carries a copy of Qwen3's stock chat template: pip install trl")
    stock = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return byte_tokenizer(stock)


def options_of(info: str) -> dict[str, Any]:
    """`split_turns=false max_length=16 columns=user:q,assistant:a` after the word json."""
    pairs = (pair.split("=") for pair in info.split())
    words = {"false": False, "true": True}
    options = {name: words.get(value, int(value) if value.isdigit() else value) for name, value in pairs}
    if "columns" in options:
        options["columns"] = dict(pair.split(":") for pair in options["columns"].split(","))
    return options


def converted(log: str, row: dict[str, Any]) -> str:
    """What a program of recipes/logs prints of a row."""
    program = ROOT / f"recipes/logs/{'openai' if log == 'Completions' else log.lower()}_log.py"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdin", io.StringIO(json.dumps(row)))
        patched.setattr(sys, "stdout", io.StringIO())
        patched.syspath_prepend(program.parent)
        runpy.run_path(str(program))
        return sys.stdout.getvalue()


def encode(row: str, folder: Path, options: dict[str, Any]) -> tuple[PreTrainedTokenizerFast, list[TokenRow]]:
    """The samples of a row that stands on a line of its own in chats.jsonl, converted if it is one of a log."""
    if log := options.pop("log", None):
        row = converted(log, json.loads(row))
    (folder / "chats.jsonl").write_text(" ".join(row.split("\n")), encoding="utf-8")
    tokenizer = stock_tokenizer()
    source = Source("chats.jsonl", columns=options.pop("columns", None))
    encoder = (UnlabelledEncoder if options.pop("unlabelled", False) else ChatEncoder)(tokenizer, **options)
    return tokenizer, [sample for samples in encoder.encode_all(read_rows(source)) for sample in samples]


def lines_of(samples: list[TokenRow], tokenizer: PreTrainedTokenizerFast, said: str) -> Iterator[str]:
    for sample in samples:
        if said.startswith("reads"):
            yield f"reads {json.dumps(tokenizer.decode(sample.input_ids), ensure_ascii=False)}"
            continue
        learned = tokenizer.decode(sample.labels[sample.labels != -100])
        as_labels = said.startswith("labels")
        yield f"labels {sample.labels.tolist()}" if as_labels else f"learns {json.dumps(learned, ensure_ascii=False)}"


@pytest.mark.parametrize(("info", "row", "said"), EXAMPLES)
def test_a_row_is_what_the_page_says(
    info: str, row: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        tokenizer, samples = encode(row, tmp_path, options_of(info))
    except UserError as error:
        assert f"error: {error}\n" == said
    else:
        assert list(lines_of(samples, tokenizer, said)) == said.splitlines()


def test_every_row_of_the_page_is_tried() -> None:
    assert len(EXAMPLES) == len(re.findall("^```json", read(FORMATS) + read(RUNS) + read(LOGS), re.MULTILINE)) > 15
    outcomes = "".join(example.values[2] for example in EXAMPLES)
    formats = "".join(example.values[1] for example in EXAMPLES)
    assert outcomes.count("error: ") > 3 and outcomes.count("learns ") > 10 and outcomes.count("labels [") > 2
    for key in ("messages", "conversations", "prompt", "text", "input_ids", "reasoning_content", "tool_calls"):
        assert f'"{key}"' in formats


def test_file_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/radixtrain/data/files` reads each."""
    table = read(FORMATS).partition("### Files")[2].partition("\n\nFiles are")[0]
    assert all(f"`{suffix}`" in table for suffix in (*TEXTS, *OF_TABLES))
    monkeypatch.chdir(tmp_path)
    Path("chats.xlsx").write_bytes(b"PK")
    with pytest.raises(UserError) as raised:
        read_rows("chats.xlsx")
    assert f"\nerror: {raised.value}\n" in read(FORMATS)


def test_the_list_of_sources() -> None:
    [example] = re.findall(r"^```yaml\n(data:.*?)^```", read(FORMATS), re.M | re.S)
    sources = as_sources(yaml.safe_load(example)["data"]["train_file"])
    assert [source.label for source in sources] == ["chats/*.jsonl.gz", "questions", "acme/chats/en/train"]
    assert all(
        f"`{name}`" in read(FORMATS) for name in STANDARD_COLUMNS if "mask" not in name and name not in ("labels",)
    )


def test_the_pairs_of_columns() -> None:
    said = read(FORMATS).partition("The pairs that are\nrecognised")[2].partition("Only `prompt`")[0]
    assert {word for pair in PAIRS for word in pair} == set(re.findall("`([a-z]+)`", said))


IMAGE = {"type": "input_image", "image_url": "a.png"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
USED = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
TEXT = {"type": "text", "text": "a"}
CHANGED: list[tuple[str, dict[str, Any], str]] = [
    # a log, what is changed in its row, and what is learned of that, or why not
    ("Langfuse", {"input": [{"role": "user", "content": "q"}], "output": "a"}, "a"),
    ("Langfuse", {"output": [{"role": "assistant", "content": "a"}] * 2}, "completion: turn 1: expected {role,"),
    ("Anthropic", {"system": [TEXT]}, "Nails are tools. One moment. find_shelf thing nails Shelf four."),
    ("Anthropic", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'input_schema'"),
    *(
        ("Anthropic", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": blocks}]}, said)
        for blocks, said in (
            ([TEXT, USED, {**USED, "name": "g"}], "a f g"),
            ([USED, TEXT], "content after tool_calls in one turn"),
        )
    ),
    ("Anthropic", {"messages": [
        {"role": "assistant", "content": [USED]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]},
    ]}, "content: only parts {type: text, text} are read, found 'image'; only text is read"),
    ("OpenAI", {"input": "q", "output": [SAID, CALLED, {**CALLED, "name": "g"}]}, "a f g"),
    ("OpenAI", {"output": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, SAID]}, "a"),
    ("OpenAI", {"output": [{"type": "web_search_call", "id": "1"}]}, "no place for an item of the type web_search"),
    ("OpenAI", {"input": [{"role": "user", "content": [IMAGE]}]}, "found 'input_image'; only text is read"),
    ("OpenAI", {"previous_response_id": "r"}, "the history is in another row"),
    ("Completions", {"response": {"choices": [{"finish_reason": "length", "message": SAID}]}}, "an answer was cut off"),
]  # fmt: skip


def log_of_page(name: str) -> dict[str, Any]:
    [log] = [row for info, row, _ in EXAMPLE.findall(read(LOGS)) if info == f" log={name}"]
    found: dict[str, Any] = json.loads(log)
    return found


@pytest.mark.parametrize(("name", "changed", "said"), CHANGED)
def test_a_log_is_converted_whole_or_refused(
    name: str, changed: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        chat = converted(name, log_of_page(name) | changed)
        tokenizer, samples = encode(chat, tmp_path, {})
    except (UserError, SystemExit, KeyError) as error:
        assert said in str(error)
    else:
        learned = " ".join(tokenizer.decode(sample.labels[sample.labels != -100]) for sample in samples)
        assert re.sub(r"<[^>]*>|name|arguments|[^\w. ]", " ", learned).split() == said.split()


# docs/agents-runs.md: its program trains each turn, and its r is that of the generated runs


@FULL
@pytest.mark.parametrize("page", [RUNS, "docs/one-prompt.md"])
def test_the_program_of_a_task_trains(page: str, shop: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With each turn of a run as a row, or on rows of its own."""
    pytest.importorskip("trl", reason="the program is for TRL's trainer: pip install trl")
    [code] = blocks_in(read(page))
    monkeypatch.chdir(tmp_path)
    run = [{"role": role, "content": f"Shelf {number}."} for number in range(3) for role in ("user", "assistant")]
    Path("runs.jsonl").write_text(f"{json.dumps({'messages': run})}\n" * 4, encoding="utf-8")
    short = 'max_steps=1, logging_steps=1, report_to="none", save_strategy="no", output_dir='
    names: dict[str, Any] = {}
    exec(code.replace("output_dir=", short).replace("Qwen/Qwen3-0.6B", str(shop / "model")), names)
    assert [len(row["prompt"]) for row in names["rows"]] == ([1, 3, 5] if page == RUNS else [2]) * 4
    assert names["trainer"].state.log_history[0]["r"] > 3


@FULL
def test_r_of_the_page() -> None:
    """150 agents, a row for each turn: the prompt, the turns before it, and an answer of 100 tokens."""
    draw = np.random.default_rng(0)
    system, rows = draw.integers(0, 30_000, 400), []
    for _ in range(150):
        turns = int(draw.integers(3, 21))
        history = np.concatenate([system, draw.integers(0, 30_000, turns * 400)])
        rows += [np.concatenate([history[: 400 * turn], draw.integers(0, 30_000, 100)]) for turn in range(2, turns + 2)]
    for size, *said in re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", read(RUNS), re.M):
        for together, r in zip((1, None), said, strict=True):
            order = list(PrefixGroupedSampler(rows, int(size), together))
            batches = [order[start : start + int(size)] for start in range(0, len(order), int(size))]
            assert f"{ratio_of_batches(lambda index: [rows[index]], batches, None):.2f}" == r


def test_checkpoints_by_name_belong_to_families_of_the_page() -> None:
    """A family that is renamed, or refused for another reason, is so in the list of checkpoints, too."""
    by_name = read("docs/families.md").split("## Checkpoints by name")[1].split("\n## ")[0]
    tables = read("recipes/benchmarks/families.md")
    verdicts: dict[str, set[str]] = {}
    for table in tables.split("\n\n"):
        for reason, names in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.M):
            for name in names.split("; "):
                verdict = f"refused: {reason}" if table.startswith("| refused") else "equal"
                verdicts.setdefault(name, set()).add(verdict)
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ((?:equal|refused)[^|]*) \|$", by_name, re.M)
    assert len(rows) == 16
    wrong = [(name, said) for names, said in rows for name in names.split("; ") if said not in verdicts.get(name, ())]
    assert not wrong


# docs/configuration.md: its tables are the code's

CONFIGURATION = "docs/configuration.md"
TABLES = ["cli", "model", "data", "evaluate_generation", "verify", "export", "doctor"]
SECTIONS = ("model", "data", "evaluate_generation")
OWNERS: dict[str, type] = {"cli": RunSettings, "verify": Verify, "export": Export, "doctor": Doctor}


def rows_of(table: str) -> list[list[str]]:
    """key, values, default, meaning: of the keys that a command or a section has beside those of every run."""
    prefix = f"{table}." if table in SECTIONS else ""
    of_all = {field.name for field in fields(RunSettings)}
    elsewhere = {"verify": of_all, "cli": {"seed_everything"}}.get(table, set())
    own = {field.name for field in fields(OWNERS.get(table, RunSettings))} - elsewhere
    keys = all_keys({"cli": "report", **dict.fromkeys(SECTIONS, "fit")}.get(table, table))
    return [
        [key.name.removeprefix(prefix), kind_of(key), as_yaml(key), key.help]
        for key in keys
        if (key.name.startswith(prefix) if prefix else key.name in own)
    ]


def kind_of(key: Key) -> str:
    """The values in words, and words of a set as code."""
    words = {str(word) for part in parts_of(key.type) if get_origin(part) is Literal for word in get_args(part)}
    return ", ".join(f"`{word}`" if word in words else word for word in key.kind.split(", "))


def as_yaml(key: Key) -> str:
    return "required" if key.default is None else f"`{key.default}`"


def markdown(rows: list[list[str]]) -> str:
    head = [["key", "values (default)", "meaning"], ["---"] * 3]
    body = [
        [
            f"`{name}`",
            f"{kind.removesuffix(', null') if 'null' in default else kind} ({default})",
            " ".join(text.split()),
        ]
        for name, kind, default, text in rows
    ]
    return "".join("| " + " | ".join(row) + " |\n" for row in [*head, *body])


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_keys_is_the_codes(table: str) -> None:
    begin, end = f"<!-- {table}: begin -->\n", f"<!-- {table}: end -->"
    before, rest = read(CONFIGURATION).split(begin)
    said, after = rest.split(end)
    found = markdown(rows_of(table))
    if WRITING:
        (ROOT / CONFIGURATION).write_text(f"{before}{begin}{found}{end}{after}", encoding="utf-8")
        return
    assert said == found, f"RADIXTRAIN_WRITE_TABLE=1 writes the tables of {CONFIGURATION}"


def test_the_tables_hold_every_key_and_what_runs(printed_by: Callable[..., str]) -> None:
    """The defaults of the pages are those of the command line, also where Lightning sets them."""
    printed = printed_by("fit", "--model.model_name_or_path=x", "--print_config")
    config = yaml.safe_load(printed)
    for table in SECTIONS:
        assert set(config[table]) == {name for name, *_ in rows_of(table)}
    assert config["seed_everything"] == 42 and "`seed_everything`, 42 by default" in read(CONFIGURATION)
    for key in ("devices", "log_every_n_steps"):
        assert f"| `{key}` | `{config['trainer'][key]}` |" in read(CONFIGURATION)


def test_every_environment_variable_is_named() -> None:
    sources = [path for folder in ("radixtrain", "kernels", "tests") for path in (ROOT / folder).rglob("*.py")]
    read_by_us = {name for path in sources for name in re.findall("RADIXTRAIN_[A-Z]+", path.read_text("utf-8"))}
    assert read_by_us == set(re.findall("RADIXTRAIN_[A-Z]+", read(CONFIGURATION)))


def test_the_metric_of_the_page_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(def first_word.*?)^```", read(CONFIGURATION), re.M | re.S)
    (tmp_path / "metric_of_the_page.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    metric = load_metric("metric_of_the_page.first_word")
    assert metric(["one two", "two"], ["one", "one"], [{}, {}]) == [1, 0]


# CONTRIBUTING.md: the tour and the map of layers

TOUR = re.compile(r"^(\d)\. \*\*([^*]+)\.\*\* `([^`]+)`,\s+`([^`]+)`,\s+(\d+) lines\.", re.MULTILINE)
STOPS = ["Command", "Data", "Collator", "Plan", "Step", "Model", "Attention", "Loss"]
ONE_SCREEN = 60


def lines_in(path: str, name: str) -> int:
    """From the first decorator or the `def` of a function or class to its last line."""
    scope: Any = ast.parse(read(path))
    for part in name.split("."):
        [scope] = [node for node in scope.body if getattr(node, "name", None) == part]
    first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
    return int(scope.end_lineno) - first + 1


def test_the_tour_leads_to_functions_of_one_screen() -> None:
    page = read("CONTRIBUTING.md")
    stops = TOUR.findall(page)
    assert [name for _, name, *_ in stops] == STOPS and len(stops) <= 8
    counted = {(path, name): lines_in(path, name) for _, _, path, name, _ in stops}
    assert max(counted.values()) <= ONE_SCREEN
    if WRITING:
        said = TOUR.sub(lambda found: re.sub(r"\d+ lines", f"{counted[found[3], found[4]]} lines", found[0]), page)
        (ROOT / "CONTRIBUTING.md").write_text(said, encoding="utf-8")
        return
    assert {(path, name): int(number) for _, _, path, name, number in stops} == counted, "RADIXTRAIN_WRITE_TABLE=1"


def test_the_map_has_the_floors_of_the_imports() -> None:
    """Those that import-linter checks, from the ground up."""
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    floors = [set(layer.split(" : ")) for layer in reversed(contracts[0]["layers"])]
    drawn = re.findall(r"^(\d)  (\w+(?:   \w+)*) {2,}\S", read("CONTRIBUTING.md"), re.MULTILINE)
    assert [(int(number), set(rooms.split())) for number, rooms in reversed(drawn)] == list(enumerate(floors, start=1))


# The site: `make docs`


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages from which the site is built."""
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run([sys.executable, ROOT / "docs" / "site.py", folder], check=True)
    return folder


def test_the_site_has_every_page_and_every_link_leads_to_one(site: Path) -> None:
    navigation = re.findall(r": (\S+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    pages = {"README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}
    assert not pages - set(navigation), "add the page to the nav of mkdocs.yml"
    assert all((site / page).is_file() for page in navigation)
    linked = [
        page.parent / link
        for page in site.rglob("*.md")
        for link in re.findall(r"\]\(([^)\s#:]+)[)#]", page.read_text(encoding="utf-8"))
    ]
    assert len(linked) > 50 and not [path for path in linked if not path.is_file()]
    assert "share_prefixes" in (site / "recipes" / "any_trainer" / "dpo.py.md").read_text(encoding="utf-8")


def test_every_link_within_the_pages_leads_to_a_heading(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.md")}
    anchors = {page: {slug_of(title) for title in re.findall("^#+ (.+)", text, re.M)} for page, text in pages.items()}
    links = [
        (page, (page.parent / link).resolve() if link else page, anchor)
        for page, text in pages.items()
        for link, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text)
    ]
    assert len(links) > 50
    assert not [f"{page}: #{anchor}" for page, target, anchor in links if anchor not in anchors[target]]


def slug_of(title: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


# docs/reference.md: every public name with its arguments, its errors, and an example that runs

WITHOUT_ERRORS = {"PrefixPlan", "restore_model"}


def sections_of(site: Path) -> dict[str, str]:
    page = (site / "docs" / "reference.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^### (\w+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_reference_has_every_public_name(site: Path) -> None:
    assert not set(radixtrain.__all__) - set(sections_of(site)), "add the name to docs/reference.md"


@pytest.mark.parametrize("name", radixtrain.__all__)
def test_a_public_name_says_its_arguments_errors_and_an_example(name: str, site: Path) -> None:
    section, public = sections_of(site)[name], getattr(radixtrain, name)
    arguments = set(inspect.signature(public.__init__ if isinstance(public, type) else public).parameters) - {"self"}
    described = {
        argument for entry in re.findall("^- (.*?): ", section, re.M) for argument in re.findall(r"\w+", entry)
    }
    assert arguments and not arguments - described
    assert ("Raises " in section) == (name not in WITHOUT_ERRORS)
    first, *examples = blocks_in(section)
    assert name in first and any(name in example for example in examples)


@pytest.mark.parametrize("name", radixtrain.__all__)
def test_the_example_of_a_public_name_runs(
    name: str, tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny_qwen3())
    names = {public: getattr(radixtrain, public) for public in radixtrain.__all__}
    [before] = blocks_in(read("docs/reference.md"))
    exec(before, names)
    [example] = doctest.DocTestFinder(recurse=False).find(names[name], name, globs=names)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted and not result.failed


# Numbers that several pages repeat


PAGES = ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def test_the_number_of_families_is_that_of_the_tables() -> None:
    counted = {"equal": 0, "refused": 0}
    for table in re.findall(r"begin -->\n(.*?)<!--", read("recipes/benchmarks/families.md"), re.DOTALL):
        for part in table.strip().split("\n\n"):
            head, _, *rows = part.splitlines()
            counted["refused" if head.startswith("| refused") else "equal"] += sum(row.count("; ") + 1 for row in rows)
    equal, refused = counted.values()
    said = {page: " ".join(read(page).split()) for page in ("README.md", "docs/exactness.md", "docs/families.md")}
    assert (
        f"for {equal} model classes" in said["README.md"]
        and f"{refused} of {equal + refused} model" in said["README.md"]
    )
    assert f"Of {equal + refused} tiny random models" in said["docs/exactness.md"]
    for page in ("docs/exactness.md", "docs/families.md"):
        assert f"{equal} " in said[page] and f"{refused} " in said[page]


def test_the_readmes_figures_are_those_of_the_benchmarks() -> None:
    page, readme = read("docs/benchmarks.md"), read("README.md")
    (rates,) = re.findall(r"tokens/s \| \*\*([\d,]+)\*\* \| (\d+) \|", page)
    (dpo,) = re.findall(r"SFT, DPO, GRPO \| \*\*\d+\*\*, \*\*(\d+)\*\*, \*\*\d+\*\* \| \d+, (\d+), \d+ \|", page)
    (h100,) = re.findall(r"Qwen3-0.6B, H100 \| 3 \| ([\d.]+) \| [^|]+ \| \*\*([\d.]+)\*\*", page)
    of_pairs = [(rates[0].replace(",", ""), rates[1]), dpo[::-1], h100]
    expected = [f"{float(first) / float(second):.1f}" for first, second in of_pairs]
    assert set(re.findall(r"\*\*([\d.]+)x\*\*", readme)) == set(expected)
    assert f"{dpo[0]} CPU seconds instead of {dpo[1]}" in readme


def test_no_page_names_a_place_of_one_machine() -> None:
    pages = [*PAGES, "CONTRIBUTING.md", "recipes/LOG.md"]
    found = {
        page: re.findall(r"(?<![\w.~}-])/(?:work|tmp|home|root|shared|mnt|Users)\b\S*", read(page)) for page in pages
    }
    assert not any(found.values()), found
