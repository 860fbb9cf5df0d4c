"""What nothing reads of a row or a turn: it is only listed, or the row is refused with the setting that fixes it.

[ ] enclose what is learned. The template opens a block of thinking in each answer, as Qwen3's does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixtrain.data.chat import ChatEncoder, UnlabelledEncoder
from radixtrain.data.files.rows import Row
from radixtrain.data.files.sources import as_sources, read_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import DataError
from tests.support.batches import byte_tokenizer

TEMPLATE = """\
{%- for tool in tools or [] %}{{- '{' + (tool.function or tool).name + '}' }}{% endfor %}
{%- for m in messages %}
    {{- m.role + ': ' }}
    {%- if m.role == 'assistant' %}{{- '(' + (m.reasoning_content or '') + ')' }}{% endif %}{{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}{{- call.function.name }}{% endfor %}{{- '|' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}"""
TOOL = {"name": "f", "parameters": {}}


def user(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def gpt(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]


def read(folder: Path, rows: list[dict[str, Any]], columns: Any = None, **options: Any) -> tuple[list[str], list[str]]:
    """What is learned of each sample, and the names that nothing reads."""
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    tokenizer, report = byte_tokenizer(TEMPLATE, special=("|",), eos="|"), EncodeReport()
    [source] = as_sources(str(folder / "a.jsonl"), columns)
    encoded = ChatEncoder(tokenizer, **options).encode_all(read_rows(source), report=report)
    samples = [sample for each in encoded for sample in each]
    return [tokenizer.decode(each.labels[each.labels != -100]) for each in samples], sorted(report.unused_columns)


Q, GOOD, BAD = user("q"), assistant("a"), assistant("BAD")
CHAT = [Q, GOOD]
LEARNED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # a row, what is learned, what is listed as unread: ids, counts, times and texts tell nothing
    (
        {"messages": CHAT, "id": 0, "source": "x", "category": "c", "difficulty": 0.5, "quality": "good", "lang": "no"},
        ["()a|"],
        ["category", "difficulty", "id", "lang", "quality", "source"],
    ),
    ({"messages": CHAT, "num_turns": 1, "token_count": 0, "created": 17.5, "year": 2024}, ["()a|"], [
        "created", "num_turns", "token_count", "year"]),
    ({"messages": CHAT, "metadata": {"temperature": 0.7, "ok": False, "lang": "en"}, "tags": ["a"]}, ["()a|"], [
        "metadata", "tags"]),
    ({"messages": CHAT, "label": None, "rejected": "", "score": None, "parallel_tool_calls": False}, ["()a|"], [
        "parallel_tool_calls"]),
    ({"messages": CHAT, "label": "a", "prompt": "q"}, ["()a|"], ["label", "prompt"]),  # a class, which is the answer
    ({"messages": CHAT, "train": True, "weight": 1.0, "reasoning": "off"}, ["()a|"], ["reasoning", "train", "weight"]),
    ({"messages": CHAT, "hash": "1", "used_in_training": "yes", "reward_model": "R", "reasoning_effort": "high"}, [
        "()a|"], [
        "hash", "reasoning_effort", "reward_model", "used_in_training"]),
    ({"messages": [Q, assistant("3")], "label": 3}, ["()3|"], ["label"]),
    ({"messages": [Q, assistant("", tool_calls=[{"name": "f", "arguments": {}, "parsed_arguments": {"a": 1}}])]}, [
        "()f|"], []),
    ({"instruction": "q", "input": "", "output": "a", "text": ""}, ["()a|"], []),
    ({"messages": [Q, assistant("a", reasoning_effort="high", usage={"cached_tokens": 0})]}, ["()a|"], [
        "messages.reasoning_effort", "messages.usage"]),
    ({"messages": [Q, assistant([{"type": "text", "text": "a", "index": 0, "cache_control": {"type": "x"}}])]}, [
        "()a|"], []),
    ({"messages": CHAT, "version": 1.0, "age": 42, "status_code": 200}, ["()a|"], ["age", "status_code", "version"]),
    ({"input_ids": [81, 82], "token_type_ids": [0, 0], "id": 1}, ["QR"], ["id"]),
    ({"text": "t", "language_score": 0.97, "token_count": 1}, ["t|"], ["language_score", "token_count"]),
    ({"messages": [Q, assistant("a", id="m1", index=0, name="Bob", model="g", created=1.5)]}, ["()a|"], [
        "messages.created", "messages.id", "messages.index", "messages.model"]),
    ({"messages": [user("q", toxic=False, header={"agent": "x"}), GOOD]}, ["()a|"], [
        "messages.header", "messages.toxic"]),
    ({"messages": [Q, assistant("b", loss=0.0, weight=0), Q, assistant("a", loss=1, train=True)]}, ["()a|"], [
        "messages.loss", "messages.train"]),
    ({"messages": [Q, GOOD, user("bye")]}, ["()a|"], ["turns after the last answer"]),
    # other tools' forms
    ({"messages": [{"role": "system", "content": "s", "tools": [TOOL]}, *CHAT]}, ["()a|"], []),
    ({"messages": CHAT, "tools": "null", "chat_template_kwargs": "null"}, ["()a|"], []),
    ({"messages": [Q, {"role": "model", "content": "a"}]}, ["()a|"], []),
]  # fmt: skip


@pytest.mark.parametrize(("row", "learned", "unread"), LEARNED)
def test_a_row_that_is_read(row: Any, learned: list[str], unread: list[str], tmp_path: Path) -> None:
    assert read(tmp_path, [row]) == (learned, [name for name in unread if name != "messages.name"])


def test_tools_of_the_system_turn_are_in_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": "system", "content": "s", "tools": [TOOL]}, *CHAT]})
    )
    tokenizer = byte_tokenizer(TEMPLATE, special=("|",), eos="|")
    [[sample]] = ChatEncoder(tokenizer).encode_all(read_rows(tmp_path / "a.jsonl"))
    assert tokenizer.decode(sample.input_ids) == "{f}system: s|user: q|assistant: ()a|"


ROWS: list[tuple[dict[str, Any], str, str]] = [
    # a row that says more than is read; what the error names; the mapping of its fix
    *(
        ({"messages": [Q, BAD], name: value}, f"{name}: {value!r}"[:60], f"{name}: null")
        for name, value in (
            ("label", False), ("kto_tag", False), ("label", "0"), ("label", True), ("label", "bad"), ("is_good", False),
            ("thumbs", -1), ("reward", 0.0), ("score", 3), ("rating", "2"), ("rank", 2), ("helpfulness", 1),
            ("pass_rate", 0.25), ("verdict", "rejected"), ("accepted", "no"), ("isCorrect", False), ("stars", 5),
            ("outcome", "failed"), ("resolved", False), ("zufrieden", False), ("评分", 0), ("weight", 0),
            ("ok", "0"), ("feedback", {"value": "negative"}),
            ("turn_mask", [0, 1]), ("responses", [GOOD]), ("other", [GOOD]), ("final", assistant("good")),
            ("thinking", "deep"), ("chain_of_thoughts", "long and deep"), ("loss_weights", [1.0, 2.0]),
            ("used_in_training", "no"), ("loss", "off"), ("points", 3), ("quality", 2), ("negative", "another answer"),
        )
    ),
    ({"messages": [Q, BAD], "Is it: good?": False}, "Is it: good?: False", '"Is it: good?": null'),
    ({"conversations": gpt("q", "BAD"), "label": False}, "label: False", "label: null"),
    ({"instruction": "q", "input": "", "output": "BAD", "kto_tag": "false"}, "kto_tag: 'false'", "kto_tag: null"),
    ({"prompt": "q", "response": "BAD", "score": 0}, "score: 0", "score: null"),
    ({"prompt": "q", "response": "4", "score": 4}, "score: 4", "score: null"),  # not a class, though equal
    ({"prompt": "q", "completion": "False", "label": False}, "label: False", "label: null"),
    ({"prompt": "q", "completion": "BAD", "label": False}, "label: False", "label: null"),
    ({"prompt": [Q], "completion": [BAD], "reward": -0.5}, "reward: -0.5", "reward: null"),
    ({"input_ids": [81, 82], "labels": [-100, 82], "reward": 0.0}, "reward: 0.0", "reward: null"),
    *(
        ({"input_ids": [81, 82], name: [0, 1]}, f"{name}: [0, 1]", f"{name}: null")
        for name in ("loss_mask", "assistant_mask", "response_mask", "label_mask")
    ),
    *(
        ({"question": "q", "answer": "BAD", name: "deep"}, f"{name}: 'deep'", f"{name}: null")
        for name in ("reasoning", "thinking", "rationale", "cot")
    ),
    ({"input_ids": [81, 82], "position_ids": [0, 1]}, "position_ids: [0, 1]", "position_ids: null"),
    ({"text": "t", "is_spam": True}, "is_spam: True", "is_spam: null"),
    ({"messages": [Q, BAD], "meta": {"human": {"label": False}}}, "meta: {'human': {'label': False}}", "meta: null"),
    ({"messages": [Q, BAD], "reward": 0, "label": "x", "id": 1}, "reward: 0, label: 'x'", "reward: null, label: null"),
    ({"prompt": [Q], "completion": [BAD], "feedback": "bad"}, "feedback: 'bad'", "feedback: null"),
    # preferences
    ({"messages": CHAT, "chosen": [BAD], "rejected": [Q, BAD]}, "chosen and rejected: preference data",
     "chosen: null, rejected: null"),
    ({"messages": CHAT, "rejected_response": "BAD"}, "rejected_response: preference data", "rejected_response: null"),
    ({"conversations": gpt("q", "a", "r"), "chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt",
      "value": "c"}}, "chosen and rejected: preference data", "chosen: null, rejected: null"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "named", "columns"), ROWS)
def test_a_row_that_says_more(row: Any, named: str, columns: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        read(tmp_path, [row])
    assert f"a.jsonl:1: {named}" in str(raised.value) and f"data.columns: {{{columns}}}" in str(raised.value)
    assert read(tmp_path, [row], yaml.safe_load(f"{{{columns}}}"))[0], "the fix works"


def test_all_of_a_sharegpt_preference_file_is_named_as_such(tmp_path: Path) -> None:
    """LLaMA-Factory's, of which two thirds end in their first question."""
    row = {"conversations": gpt("q"), "chosen": gpt("", "b")[1], "rejected": gpt("", "c")[1]}
    with pytest.raises(DataError, match="chosen and rejected: preference data"):
        read(tmp_path, [row])


def test_a_mapping_ignores_only_what_it_names(tmp_path: Path) -> None:
    """Runs of tau-bench: the hint of the first error leads to the second one."""
    row = {"task_id": 0, "reward": 0.0, "info": {"reward_info": {"reward": 0.0}}, "traj": [Q, BAD]}
    for columns, error in (
        (None, "no format has the columns task_id, reward, info, traj"),
        ({"messages": "traj"}, "reward: 0.0, info: {'reward_info': {'reward': 0.0}}: nothing reads this"),
        ({"messages": "traj", "reward": None}, "data.columns: {info: null}"),
    ):
        with pytest.raises(DataError) as raised:
            read(tmp_path, [row], columns)
        assert error in str(raised.value)
    learned, unread = read(tmp_path, [row], {"messages": "traj", "reward": None, "info": None})
    assert (learned, unread) == (["()BAD|"], ["task_id"])


TURNS: list[tuple[dict[str, Any], str, list[str]]] = [
    # keys of the first answer of two; the setting that reads them; what it learns then
    *(
        ({key: value}, "messages.weight", ["()a|"])
        for key, value in (
            ("train", False), ("training", 0), ("trainable", False), ("loss", False), ("loss", 0.0), ("loss_mask", 0),
            ("step_loss_mask", 0), ("loss_weight", 0.0), ("loss_scale", 0.0), ("learn", False), ("is_good", False),
            ("反", 0), ("supervised", False), ("keep_turn", False),
        )
    ),
    *(
        ({key: True}, "messages.weight", ["()b|", "()a|"]) for key in ("masked", "ignore", "no_loss", "skip", "edited")
    ),
    *(
        ({key: value}, "messages.reasoning_content", ["(deep)b|", "()a|"])
        for key, value in (
            ("reasoning_details", [{"type": "reasoning.text", "text": "deep"}]),
            ("thinking_blocks", [{"type": "thinking", "thinking": "deep", "signature": "x"}]),
            ("thought", "deep"), ("reasoning_text", "deep"), ("chain_of_thoughts", "deep"), ("rationale", "deep"),
        )
    ),
    *(
        ({key: value}, "", [])
        for key, value in (
            ("train_detail", [{"begin_offset": 0, "end_offset": 2, "train": False}]),
            ("parts", [{"text": "deep"}]), ("annotations", ["x"]), ("note", "what it would have said instead"),
            ("provider_specific_fields", {"reasoning_content": "deep"}), ("extra", {"train": False}),
            ("feedback", "bad"), ("verdict", "wrong"), ("loss", "off"), ("extra", {"x": {"y": 0}}),
            ("thoughts", ["deep", "deeper"]), ("思考", "先算三乘四再加上二"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "reads", "learned"), TURNS)
def test_a_turn_that_says_more(keys: dict[str, Any], reads: str, learned: list[str], tmp_path: Path) -> None:
    row = {"messages": [Q, assistant("b", **keys), user("r"), GOOD]}
    [key] = keys
    with pytest.raises(DataError) as raised:
        read(tmp_path, [row])
    said = str(raised.value)
    assert f"a.jsonl:1: turn 2 (role 'assistant'): {key}: " in said
    assert f"data.columns: {{messages.{key}: null}} leaves it out" in said
    assert read(tmp_path, [row], {f"messages.{key}": None}) == (["()b|", "()a|"], [])
    assert (f"data.columns: {{{reads}: messages.{key}}} reads it" in said) == bool(reads)
    if reads:
        assert read(tmp_path, [row], {reads: f"messages.{key}"})[0] == learned
        as_text = {"conversations": json.dumps(row["messages"])}
        assert read(tmp_path, [as_text], {reads: f"messages.{key}"})[0] == learned


def test_all_keys_are_named_at_once(tmp_path: Path) -> None:
    row = {"messages": [Q, assistant("b", toxic=False), user("r"), assistant("a", toxic=False, edited=True)]}
    with pytest.raises(DataError) as raised:
        read(tmp_path, [row])
    assert str(raised.value).count("leaves it out") == 2
    assert read(tmp_path, [row], {"messages.toxic": None, "messages.edited": None})[0] == ["()b|", "()a|"]


def test_a_word_that_the_template_only_writes_is_no_key_that_it_reads(tmp_path: Path) -> None:
    """gpt-oss's template writes "analysis"."""
    tokenizer = byte_tokenizer(TEMPLATE.replace("'('", "'analysis('"), special=("|",), eos="|")
    with pytest.raises(DataError, match="analysis: 'deep' is not learned"):
        ChatEncoder(tokenizer).encode(Row({"messages": [Q, assistant("a", analysis="deep")]}, "a.jsonl:1"))


def test_rows_that_need_no_answer_may_say_anything(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [Q, assistant("a", loss=0)], "label": 0}))
    [[sample]] = UnlabelledEncoder(byte_tokenizer(TEMPLATE)).encode_all(read_rows(tmp_path / "a.jsonl"))
    assert len(sample.input_ids)


def test_a_list_in_another_turn_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"turn 1 \(role 'user'\): attachments: .* is not read, so it would be lost"):
        read(tmp_path, [{"messages": [user("q", attachments=["a.pdf"]), GOOD]}])


@pytest.mark.parametrize(
    "part", [{"city": "Paris"}, {"x": 5}, {"input": "Paris"}, {"kwargs": "x=1"}, {"args": {"x": 1}}]
)
def test_a_part_of_a_call_that_is_not_read(part: dict[str, Any], tmp_path: Path) -> None:
    [key] = part
    with pytest.raises(DataError, match=rf"the tool 'f': {key}: .* of a call is not read; remove it, or name it arg"):
        read(tmp_path, [{"messages": [Q, assistant("", tool_calls=[{"name": "f", **part}])]}])


@pytest.mark.parametrize("turn", [{"loss_mask": 0, "weight": None}, {"weight": None, "loss_mask": 0}])
def test_a_null_does_not_undo_a_mapping(turn: dict[str, Any], tmp_path: Path) -> None:
    rows, columns = [{"messages": [Q, assistant("b", **turn), Q, GOOD]}], {"messages.weight": "messages.loss_mask"}
    assert read(tmp_path, rows, columns)[0] == ["()a|"]
    rows[0]["messages"][1]["weight"] = 1
    with pytest.raises(DataError, match=r"messages: turn 2: two keys are weight by data\.columns, and they differ"):
        read(tmp_path, rows, columns)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "tools": [], "functions": [TOOL]},
        {"messages": [{"role": "system", "content": "s", "tools": [TOOL]}, *CHAT], "tools": "[]"},
        {"messages": [{"role": "system", "content": "s", "tools": json.dumps([TOOL])}, *CHAT]},
    ],
)
def test_no_tools_are_lost(row: dict[str, Any], tmp_path: Path) -> None:
    encoder = ChatEncoder(byte_tokenizer(TEMPLATE, special=("|",), eos="|"))
    [sample] = encoder.encode(Row(row, "a.jsonl:1"))
    assert encoder.tokenizer.decode(sample.input_ids).startswith("{f}")
    with pytest.raises(DataError, match=r"tools and .* differ; remove one of them"):
        encoder.encode(Row({**row, "tools": [{"name": "g", "parameters": {}}]}, "a.jsonl:1"))


def test_a_part_that_holds_nothing_more_is_read(tmp_path: Path) -> None:
    part = {"type": "output_text", "text": "a", "annotations": []}
    assert read(tmp_path, [{"messages": [Q, assistant([part])]}])[0] == ["()a|"]
