"""`radixtrain report`: the command on a folder that holds a configuration and a tokenizer, and no weights."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.explain.report import rounded
from radixtrain.training.start.run_overview import data_entries, sharing_entry
from tests.support.models import tiny_model
from tests.support.runs import logged, names, rows_in, summary, write_rows

Arguments = Callable[..., list[str]]


@pytest.fixture
def without_weights(shop: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model_only"
    shutil.copytree(shop / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.mark.parametrize(("load", "is_certain"), [(0.0, True), (1e6, False)])
def test_the_command(
    load: float,
    is_certain: bool,
    arguments: Arguments,
    without_weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the speed-up is named as uncertain, and is not the heading."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    flags = {"model__model_name_or_path": without_weights, "max_seconds": 0.5, "model__kernel": "torch"}
    assert main(arguments("report", **flags)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rows 20, 20 samples" in text
    assert "A training step is predicted to run at" in text and "on 1 of 1 layers" in text
    page = tmp_path / "out" / "report.html"
    assert str(page) in text and ("x as fast</h1>" in page.read_text(encoding="utf-8")) is is_certain
    assert ("so this is uncertain" in text) is not is_certain
    assert names(page.parent) == ["report.html"]


def test_what_it_prints_trains_or_is_refused_as_fit_does(
    arguments: Arguments, shop: Path, tmp_path: Path, capsys: Any
) -> None:
    model = shutil.copytree(shop / "model", tmp_path / "my model")
    too_long = "a table of 48 positions, and the longest sequence has 74 tokens; set data.max_length to 48 or less"
    for wrote, sizes, said in (("GPT2LMHeadModel", {"n_positions": 48}, too_long), ("GptOssForCausalLM", {}, "")):
        tiny_model(wrote, vocab_size=400, **sizes).save_pretrained(model)
        flags = {"model__model_name_or_path": model, "trainer__max_steps": 1}
        assert main([*arguments("report", **flags), "--max_seconds", "0.1"]) == 0
        text = capsys.readouterr().out
        assert said in " ".join(text.split())
        printed = re.findall(r"To train:\n  python -m radixtrain (.*)", text)
        assert len(printed) == (not said)
        assert main(shlex.split(printed[0]) if printed else arguments(**flags)) == bool(said)
        assert said in capsys.readouterr().err


# ChatML that keeps what earlier turns were.
KEEPING = """{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}<|im_start|>{{
message.role }}\n{{ message.content }}{{ (message.tool_calls or '') | string }}<|im_end|>\n{% endfor %}{%
if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": f"shelf_{n}", "parameters": {}}} for n in range(4)]
SYSTEM = {"role": "system", "content": "You run the shop, and follow its policy in every answer. " * 8}


def agent_chat(number: int, num_turns: int = 12) -> dict[str, Any]:
    """A customer and an assistant that calls tools in every second turn."""
    messages = [SYSTEM, {"role": "user", "content": f"Customer {number} looks for the hammer."}]
    for turn in range(num_turns):
        call = {"type": "function", "function": {"name": f"shelf_{turn % 4}", "arguments": {"of": number}}}
        calls = {"tool_calls": [call]} if turn % 2 else {}
        messages.append({"role": "assistant", "content": f"Shelf {turn}.", **calls})
        messages.append({"role": "tool" if turn % 2 else "user", "content": f"Result {turn} of {number}."})
    return {"messages": messages[:-1], "tools": TOOLS}


def nested_log(number: int) -> list[dict[str, Any]]:
    """The requests of a chat as a server logs them: each row has what came before it, and one answer more."""
    chat = agent_chat(number, 6)
    return [{**chat, "messages": chat["messages"][:end]} for end in range(3, len(chat["messages"]) + 1, 2)]


def thinking_chat(number: int) -> dict[str, Any]:
    turns = [
        (
            {"role": "user", "content": f"{turn}?"},
            {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm " * 9},
        )
        for turn in range(4)
    ]
    return {"messages": [SYSTEM | {"content": f"Shop {number}."}, *(message for turn in turns for message in turn)]}


@pytest.mark.parametrize(
    ("logs", "keeps"),
    [
        ([[agent_chat(number)] for number in range(5)], True),
        ([nested_log(number) for number in range(3)], True),
        ([[thinking_chat(number)] for number in range(5)], False),
    ],
    ids=["tools", "nested logs", "thinking"],
)
def test_chats_are_compared_with_whole_chats_too(
    arguments: Arguments, shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    logs: list[list[dict[str, Any]]], keeps: bool,
) -> None:  # fmt: skip
    """In one step: against tokens that are counted here, as a trainer without sharing has them.

    The last row of a log has all its turns, so only that one is trained.
    """
    rows = [log[-1] for log in logs]
    file, template = tmp_path / "chats.jsonl", tmp_path / "keeping.jinja"
    write_rows(file, (row for log in logs for row in log))
    template.write_text(KEEPING)
    data = {"batch_size": len(rows), "max_tokens": 10**6, "max_length": 10**5, "min_shared_tokens": 1}
    data |= {"chat_template_path": str(template)} if keeps else {}
    tokenizer = load_tokenizer(str(shop / "model"), data.get("chat_template_path"))

    def tokens(messages: list[dict[str, Any]], tools: Any, **options: Any) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return tokenizer(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]

    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    whole = [tokens(row["messages"], row.get("tools")) for row in rows]
    ends = [(row, end) for row in rows for end, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    turns = [tokens(row["messages"][: end + 1], row.get("tools")) for row, end in ends]
    prompts = [
        tokens(row["messages"][:end], row.get("tools"), add_generation_prompt=True) + newline for row, end in ends
    ]
    num_labels = sum(map(len, turns)) - sum(map(len, prompts))
    computed = len({tuple(turn[: end + 1]) for turn in turns for end in range(len(turn))})
    of_chats, of_rows = (sum(map(len, sequences)) / computed for sequences in (whole, turns))
    flags = {f"data__{name}": value for name, value in data.items()}
    assert main(arguments("report", **flags, data__train_file=file, max_seconds=0)) == 0
    text = " ".join(capsys.readouterr().out.split())
    counted = f"{sum(map(len, whole)):,} tokens as whole chats, {sum(map(len, turns)):,} tokens as their turns"
    assert f"{counted}, of which {computed:,} are computed" in text
    assert f"{num_labels:,} tokens bear loss" in text
    found = re.search(r"r = ([\d.]+) against whole chats, as TRL trains them, ([\d.]+) against the same rows", text)
    assert found and list(map(float, found.groups())) == pytest.approx([of_chats, of_rows], rel=0.006)
    of_fit = SFTData(str(file), **data, model_name_or_path=str(shop / "model"))
    of_fit.setup("fit")
    _, said = sharing_entry(of_fit)
    assert f"about {of_chats:.1f} tokens" in said and f"as TRL trains them, {of_rows:.1f} against" in said
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert f"r = {rounded(of_chats)} against whole chats" in page
    assert main(arguments("inspect", **flags, data__train_file=file)) == 0
    shown = dict(re.findall(r"^(r\b.*?)  +([\d.]+) ", capsys.readouterr().out, re.MULTILINE))
    assert shown == {"r": f"{of_rows:.2f}"}


def test_what_is_not_read_and_what_is_there_twice_is_said(
    arguments: Arguments, shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column and turns after the last answer, also by fit; copies, and chats without a system turn."""
    rows = rows_in(shop / "train.jsonl")[:8]
    for row in rows[:4]:
        row["messages"] = [*row["messages"], {"role": "user", "content": "bye"}]
    for row in rows[4:]:
        row["messages"] = row["messages"][1:]
    file = write_rows(tmp_path / "chats.jsonl", ({**row, "id": 7} for row in rows * 2))
    settings = {"batch_size": 16, "max_tokens": 10**5, "min_shared_tokens": 1}
    of_fit = SFTData(str(file), **settings, model_name_or_path=str(shop / "model"))
    of_fit.setup("fit")
    corpus, flags = of_fit.conversations["train"], {f"data__{name}": value for name, value in settings.items()}
    ids = {tuple(sample.input_ids.tolist()) for samples in corpus for sample in samples}
    assert len(ids) == 8
    r = sum(map(len, ids)) / len({each[: end + 1] for each in ids for end in range(len(each))})
    copies = (
        f"8 of 16 conversations are copies of others, and count in r: in random steps without them r is about {r:.1f}"
    )
    unread = "id (16 rows), turns after the last answer (8 rows)"
    assert dict(data_entries(corpus, of_fit.reports["train"], None))["columns"] == f"not used: {unread}"
    assert main(arguments("report", **flags, max_seconds=0, data__train_file=file)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"not read {unread}" in text and f"copies {copies}" in text
    assert "was not predicted" in text and "max_seconds is 0" in text
    assert "--data.system_prompt=TEXT: 8 of the chats begin with no system turn" in text


def test_a_run_has_one_baseline(
    arguments: Arguments, shop: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of chats that are split: step lines, metrics, summary, last lines and card say the same r, and its speed."""
    file, out = write_rows(tmp_path / "chats.jsonl", map(thinking_chat, range(4))), tmp_path / "out"
    short = {"trainer__max_steps": 1, "trainer__enable_progress_bar": True, "data__validation_file": None}
    assert main(arguments("fit", data__train_file=file, **short, output_dir=out)) == 0
    said, card, record = capfd.readouterr(), (out / "model" / "README.md").read_text("utf-8"), summary(out)
    (r,), (best,), (speed,) = (logged(out, name).values() for name in ("r", "best_r", "tokens_per_second"))
    data = SFTData(str(file), model_name_or_path=str(shop / "model"), batch_size=4, max_length=4096)
    data.setup("fit")
    step = next(iter(data.train_dataloader()))
    assert step.num_whole_tokens < 0.8 * step.num_tokens
    assert r == pytest.approx(step.num_whole_tokens / step.num_computed_tokens) and best >= r
    assert record["r"] == pytest.approx(r) and record["tokens_per_second"] == pytest.approx(speed)
    rows = step.num_tokens / step.num_computed_tokens
    sentence = (
        f"{r:.2f} tokens per computed token against whole chats, {best:.2f} at best (each step one micro-batch), "
    )
    sentence += f"{rows:.2f} against the same rows"
    assert sentence in card and sentence in " ".join(said.out.split())
    assert f"  r {r:.1f}  tokens/s {speed:,.0f}  " in said.err and f"{speed:,.0f} effective" in said.out
