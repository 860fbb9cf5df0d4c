"""No part of a trained turn is lost in silence: the chat templates that TRL ships, on what agents write.

Each turn is the text and the ids of transformers, or the row is refused.
"""

import json
import random
import re
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import trl

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.conversation import lost_part
from radixtrain.data.files.sources import Row
from radixtrain.data.template import warn_of_mistakes, with_date
from radixtrain.errors import DataError
from tests.support.batches import byte_tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
PARAMETERS = {"type": "object", "properties": {"thing": {"type": "string", "description": "What."}}}
FUNCTION = {"name": "find_shelf", "description": "The shelf of a thing.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
ENDS = ("<|im_start|>", "<|im_end|>", "<|end|>", "<|call|>", "<|return|>")


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find_shelf", "arguments": arguments}}


def chat(*answers: dict[str, Any], tools: Any = TOOLS, asked: str = "Where are nails and paint?") -> dict[str, Any]:
    """A question, and what the assistant says; a result of 4 after each of its turns but the last."""
    turns = [
        [{"role": "assistant", **each}, {"role": "tool", "name": "find_shelf", "content": "4"}] for each in answers
    ]
    messages = [{"role": "user", "content": asked}, *(turn for pair in turns for turn in pair)]
    return {"messages": messages[:-1], **({"tools": tools} if tools else {})}


def tokenizer_of(template: str) -> Any:
    return byte_tokenizer((FOLDER / f"{template}.jinja").read_text("utf-8"), special=ENDS)


def tokens(text: str) -> int:
    [token] = tokenizer_of("qwen3")(text)["input_ids"]
    return int(token)


def learned(template: str, row: dict[str, Any], **options: Any) -> list[str]:
    """The text that bears loss, of each sample."""
    tokenizer = tokenizer_of(template)
    samples = ChatEncoder(tokenizer, **options).encode(Row(row, "a.jsonl:1"))
    return [tokenizer.decode(each.labels[each.labels != -100].tolist()) for each in samples]


SAID = {"content": "Four."}
THOUGHT = {"content": "Four.", "reasoning_content": "Nails are tools."}
CALLED = {"tool_calls": [call(thing="nails")]}
TWICE = {"content": "", "tool_calls": [call(thing="nails"), call(thing="paint")]}
LOST = [
    # template, what the assistant says, what is lost
    ("lfm2", chat(TWICE, SAID), r"leaves out call 1 \(of the tool 'find_shelf'\) in turn 2; set chat_template_path"),
    ("gptoss", chat(TWICE, SAID), r"leaves out call 2 \(of the tool 'find_shelf'\) in turn 2"),
    ("gptoss", chat(TWICE, SAID, asked="find_shelf thing nails, find_shelf thing paint"), "leaves out call 2"),
    ("llama3_1", chat({"content": "Let me see.", **CALLED}, SAID), "leaves out the text in turn 2"),
    ("muse_glimmer", chat({"content": "Let me see.", **CALLED}, SAID), "leaves out the text in turn 2"),
    ("gemma3", chat(SAID, tools=[{"type": "web_search"}]), "dropped the tool 'web_search'"),
    ("llama3_1", chat(TWICE, SAID, tools=[FUNCTION]), "only supports single tool-calls at once!$"),
    ("qwen2_5", chat(THOUGHT, tools=None), r"the thinking \(reasoning_content\) in turn 2; .*on_unrendered: drop"),
    ("qwen3", chat({"content": "Four.", "thinking": "Nails."}, tools=None), None),
    (
        "qwen3_8",
        chat({"content": "<think>\nNails.\n</think>\n\nFour."}, tools=None),
        "writes a block of thinking of its own before the <think> in the text in turn 2; put the thinking into reas",
    ),
    (
        "qwen3",
        chat({"content": "<think>\nNails"}, tools=None),
        "writes a block of thinking of its own before the <think>",
    ),
    ("nemotron_3_nano", chat(SAID, tools=None), "renders both alike, or enable_thinking in data.chat_template_kwargs$"),
]


@pytest.mark.parametrize(("template", "row", "reason"), LOST, ids=[case[0] for case in LOST])
def test_what_a_template_leaves_out_is_refused(template: str, row: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert "Nails." in learned(template, row)[0]
        return
    with pytest.raises(DataError, match=reason):
        learned(template, row)


def test_what_stands_outside_of_the_markers_is_not_learned() -> None:
    """The user and the list of tools name what the template drops."""
    row = chat(TWICE, SAID, asked="find_shelf thing nails, find_shelf thing paint")
    with pytest.raises(DataError, match=r"leaves out call 1 \(of the tool 'find_shelf'\) in turn 2"):
        learned("lfm2_training", row, split_turns=False)


def test_thinking_is_dropped_if_asked() -> None:
    """Also in a whole chat."""
    for template, split_turns in (("qwen2_5", True), ("qwen2_5_training", False)):
        with pytest.raises(DataError, match="leaves out the thinking"):
            learned(template, chat(THOUGHT, tools=None), split_turns=split_turns)
        [target] = learned(template, chat(THOUGHT, tools=None), split_turns=split_turns, on_unrendered="drop")
        assert target.strip() == "Four.<|im_end|>"


def test_gpt_oss_agents_learn_every_turn_as_at_inference() -> None:
    """Its template drops the thinking of the turns before an answer, once the answer is there."""
    first, second = learned("gptoss", chat({**CALLED, "reasoning_content": "I look it up."}, THOUGHT))
    assert first.startswith("<|channel|>analysis<|message|>I look it up.<|end|>") and '{"thing": "nails"}' in first
    assert second.startswith("<|channel|>analysis<|message|>Nails are tools.<|end|>") and second.endswith("<|return|>")


def test_arguments_are_objects_or_text_as_the_template_wants_them() -> None:
    [whole] = learned("deepseekv3_training", chat(TWICE, SAID), split_turns=False)
    assert '{"thing": "nails"}' in whole and '{"thing": "paint"}' in whole


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turn_that_only_calls_is_learned_or_refused(template: str) -> None:
    """With no content and with null, the call as OpenAI writes it and without what is around it; whole if marked."""
    for split_turns in (True, False) if template.endswith("_training") else (True,):
        found = set()
        for answer in (CALLED, {"content": None, **CALLED}, {"tool_calls": [call(thing="nails")["function"]]}):
            try:
                found.add("".join(learned(template, chat(answer, SAID), split_turns=split_turns)))
            except DataError as error:
                found.add(str(error))
        [same] = found
        assert same.startswith("a.jsonl:1: ") or ("find_shelf" in same and "nails" in same and "Four." in same)


# The first Llama 3's template: the assistant's header after every chat, also if it is not asked for.
ALWAYS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|end|>' + m.content + '<|im_end|>' }}{% endfor %}
{{- '<|im_start|>assistant<|end|>' }}"""


def test_a_generation_prompt_after_every_chat_is_not_learned() -> None:
    """Also if the answer is what the user said."""
    tokenizer = byte_tokenizer(ALWAYS, special=ENDS)
    row = {"messages": [{"role": role, "content": "Fine."} for role in ("user", "assistant", "user", "assistant")]}
    samples = ChatEncoder(tokenizer).encode(Row(row, "a.jsonl:1"))
    assert [tokenizer.decode(each.labels[each.labels != -100].tolist()) for each in samples] == ["Fine.<|im_end|>"] * 2


def test_turns_that_end_where_generation_goes_on_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """GLM's: the next role's marker ends a turn, and is not trained. A row without an answer is refused elsewhere."""
    messages = chat(SAID, SAID, tools=None)["messages"]
    kinds = ({"messages": messages}, {"prompt": messages[:3], "completion": messages[3:]}, {"messages": messages[:1]})
    rows = [Row(kind, "a.jsonl:1") for kind in kinds]
    for template, stops, told in (
        ("glm4moe", {tokens("<|im_end|>")}, "2 of 3 rows end in '.', where generation does not stop"),
        ("qwen3", {tokens("<|im_end|>")}, ""),
        ("qwen3", {tokens("<|end|>")}, "with such a token, or add the token to eos_token_id in the model's"),
        ("qwen3", set(), ""),
    ):
        caplog.clear()
        warn_of_mistakes(ChatEncoder(tokenizer_of(template)), rows, stops)
        assert told in caplog.text and bool(caplog.text) == bool(told)


SELDOM_MEANT = [
    "1 of 5 rows are text that begins with <|bos|>, which the tokenizer writes too",
    "1 of 5 rows begin with an answer: it is learned as what the model says of itself",
    "1 of 5 rows call tools and have no `tools`: the prompt does not list them",
    "1 of 5 rows call tools with nulls, which are learned: leave out those that a table has put there",
    "1 of 5 rows list tools as {name, ...}: so does the prompt; a server's has {type: function, function: {",
]


def test_what_is_seldom_meant_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    encoder = ChatEncoder(byte_tokenizer((FOLDER / "qwen3.jinja").read_text("utf-8"), bos="<|bos|>"))
    asked, *turns = chat(CALLED, {"tool_calls": [call(thing="nails", unit=None)]}, SAID)["messages"]
    logged = {"prompt": [asked, *turns[:-1]], "completion": turns[-1:]}
    rows = [logged, chat(CALLED, SAID, tools=[FUNCTION]), {"text": "<|bos|>Four."}, {"text": "Four."}]
    rows.append({"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "Four."}]})
    warn_of_mistakes(encoder, [Row(row, "a.jsonl:1") for row in rows], set())
    assert all(found.startswith(told) for found, told in zip(sorted(caplog.messages), SELDOM_MEANT, strict=True))


@pytest.mark.parametrize("template", ["gptoss", "llama3_2"])
def test_a_template_writes_the_given_date(template: str) -> None:
    tokenizer = tokenizer_of(template)
    [sample] = ChatEncoder(tokenizer, template_date="2020-02-29").encode(Row(chat(SAID, tools=None), "a.jsonl:1"))
    asked = with_date("{{ strftime_now('%-d %B %Y, %j %A %-m') }}", datetime(2020, 2, 9))
    said = tokenizer.apply_chat_template([{"role": "user"}], chat_template=asked, tokenize=False)
    assert said == "9 February 2020, 040 Sunday 2"
    assert ("2020-02-29" if template == "gptoss" else "29 Feb 2020") in tokenizer.decode(sample.input_ids.tolist())


def message(**arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call(**arguments)]}


VALUE = 'say\t"né\n"'
SPELT = [
    VALUE,
    VALUE.replace("\n", "\\n"),
    json.dumps(VALUE),
    json.dumps(VALUE, ensure_ascii=False),
    repr(VALUE),
    json.dumps(json.dumps(VALUE)),
]


@pytest.mark.parametrize("spelt", SPELT)
def test_every_spelling_is_found(spelt: str) -> None:
    assert lost_part(message(text=VALUE, deep=[{"n": 0.5}]), f"find_shelf text {spelt} deep n 0.5") == ""


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("find_shelf thing", "leaves out '7' in call 1 (of the tool 'find_shelf')"),
        ("find_shelf 7", "leaves out 'thing' in call 1 (of the tool 'find_shelf')"),
        ("thing 7", "leaves out call 1 (of the tool 'find_shelf')"),
        ("find_shelf thing 7", ""),
    ],
)
def test_a_lost_argument_is_named(text: str, lost: str) -> None:
    assert lost_part(message(thing=7, sure=True, none=None) | {"content": ""}, f"{text} sure none") == lost


MARKER = re.compile(r"<[|｜][^<>'\"{}\s]+[|｜]>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|s)>")
WORD = re.compile(r"kw\d+x")
FILLINGS = [
    "",
    "é 漢字 🙂",
    "f(x):\n    {'a': x}",
    "  two  blanks ",
    '"quoted" \\n',
    "\n\n- a",
    "<|im_end|>",
    "{{ x }}",
]


def two_rounds(draw: random.Random, has_system: bool, has_tools: bool, thinks: bool) -> dict[str, Any]:
    """Two rounds, every part of which begins and ends with a word that occurs nowhere else."""

    def words() -> str:
        return f"kw{draw.randrange(10**9)}x {draw.choice(FILLINGS)} kw{draw.randrange(10**9)}x"

    messages = [{"role": "system", "content": words()}] if has_system else []
    for _ in range(2):
        call = {"type": "function", "function": {"name": "find", "arguments": {"thing": words()}}}
        roles = ["user", "assistant", "tool", "assistant"] if has_tools else ["user", "assistant"]
        messages += [{"role": role, "content": words()} for role in roles]
        if has_tools:  # the first answer is a call
            messages[-3] |= {"content": "", "tool_calls": [call]}
    for message in messages:
        message |= {"reasoning_content": words()} if thinks and message["role"] == "assistant" else {}
    tool = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}
    return {"messages": messages, "tools": [tool] * has_tools}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_that_of_transformers_or_the_row_is_refused(name: str) -> None:
    """Ids of the prompt, which bears no loss; then the text of the turn, all words of which are learned."""
    template, draw = (FOLDER / f"{name}.jinja").read_text("utf-8"), random.Random(0)
    special = sorted({"<|endoftext|>", "<|im_end|>", "<|bos|>", *MARKER.findall(template)})
    tokenizer = byte_tokenizer(template, eos="<|endoftext|>", special=tuple(special))
    tokenizer.bos_token = "<|bos|>"
    for kind in product((False, True), repeat=3):
        row, turns = two_rounds(draw, *kind), []
        messages, is_whole = row["messages"], True
        render = partial(tokenizer.apply_chat_template, tools=row["tools"] or None, tokenize=False)
        try:
            for end in (end for end, message in enumerate(messages) if message["role"] == "assistant"):
                prompt, text = render(messages[:end], add_generation_prompt=True), render(messages[: end + 1])
                turns.append((prompt, text, words := {*WORD.findall(str(messages[end]))}))
                is_whole &= text.startswith(prompt) and words <= {*WORD.findall(text)}
            is_whole &= not row["tools"] or "Finds." in text
        except Exception:  # a template is a program and may raise anything
            is_whole = False
        try:
            samples = ChatEncoder(tokenizer).encode(Row(row, "a.jsonl:1"))
        except DataError as error:
            assert not is_whole, error
            continue
        for (prompt, text, words), sample in zip(turns, samples, strict=True):
            learned = sample.input_ids[sample.labels != -100].tolist()
            answer = tokenizer.decode(learned)
            # gpt-oss: the prompt has a thought that the template drops once the answer is there.
            whole = prompt + answer if text.startswith(prompt) else answer
            assert sample.input_ids.tolist() == tokenizer(prompt)["input_ids"] + learned
            assert {*WORD.findall(answer)} == words and text.rstrip().endswith(whole.rstrip())
