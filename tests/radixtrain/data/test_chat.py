"""Rows to samples: what is learned, in [ ]; or why the row is refused. ¶ is the one merge of two line feeds.

What rows of each format mean: `test_rows.py`.
"""
# ruff: noqa: E501 (the tables)

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import Row
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import DataError, UserError
from tests.support.batches import CHATML, END, byte_tokenizer

TURNS = "{%- for m in messages %}{{- m.role + ': ' + TEXT + '|' }}{% endfor %}"
ASKS = "{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}"
PLAIN = TURNS.replace("TEXT", "m.content") + ASKS
THINKING = TURNS.replace("TEXT", "('()' if m.role == 'assistant' and loop.last else '') + m.content") + ASKS  # as Qwen3
MARKED = (
    "{%- for m in messages %}{{- m.role + ': ' }}{%- if m.role == 'assistant' %}{%- generation %}"
    "{{- m.content + '|' }}{% endgeneration %}{%- else %}{{- m.content + '|' }}{% endif %}{% endfor %}" + ASKS
)
ENDING = PLAIN.replace("+ '|' }}", "}}{% if m.role == 'assistant' %}{{- 'END' }}{% endif %}")


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def encoder(template: str | None = THINKING, bos: str | None = None, eos: str = "|", **options: Any) -> ChatEncoder:
    return ChatEncoder(byte_tokenizer(template, bos=bos, eos=eos, special=("|", "^")), **options)


CHAT = [user("hi"), assistant("yo"), user("q"), assistant("a")]
ONE, TWO = "user: hi|assistant: [()yo|]", "user: hi|assistant: yo|user: q|assistant: [()a|]"
UNSURE = [user("hi"), assistant("yo", weight=0), user("q"), assistant("a", weight=1)]
SHORT = {
    "CHAT": CHAT,
    "FIRST": CHAT[:2],
    "SECOND": CHAT[2:],
    "UNSURE": UNSURE,
    "ASKED": CHAT[:1],
    "ANSWERED": CHAT[1:2],
}
TEMPLATES = {
    **{"PLAIN": PLAIN, "THINKING": THINKING, "MARKED": MARKED, "ENDING": ENDING, "BRIEF": "{{- brief }}" + PLAIN},
    "NO_DEVELOPER": PLAIN.replace(" in messages", " in messages if m.role != 'developer'"),
    "RAISING": PLAIN.replace("{{-", "{{- raise_exception('unknown role') if m.role == 'developer' }}{{-", 1),
}


def cases(table: str) -> list[list[Any]]:
    """A case in each line, in columns that three blanks separate; those in braces are JSON. ⏎ is a line feed."""
    for short, messages in SHORT.items():
        table = table.replace(short, json.dumps(messages))
    lines = [line.split("   ") for line in table.strip().splitlines() if not line.startswith("#")]
    return [[json.loads(each) if each[0] == "{" else each.replace("⏎", "\n") for each in line] for line in lines]


def made(options: dict[str, Any]) -> ChatEncoder:
    """The encoder of a case, whose template is one by its name, with another end of turn after it, or a text."""
    template = options.pop("template", "THINKING")
    name, _, end = (template or "").partition(" ")
    return encoder(TEMPLATES[name].replace("END", end) if name in TEMPLATES else template, **options)


READ = r"""
# what is shown, the encoder, the row, what is learned of each sample
every turn, as at inference   {}   {"messages": CHAT}   user: hi|assistant: [()yo|] & user: hi|assistant: yo|user: q|assistant: [()a|]
a question without an answer is left out   {}   {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}]}   user: hi|assistant: [()yo|] & user: hi|assistant: yo|user: q|assistant: [()a|]
everything   {"assistant_only_loss": false}   {"messages": CHAT}   [user: hi|assistant: yo|user: q|assistant: ()a|]
marked   {"template": "MARKED", "split_turns": false}   {"messages": CHAT}   user: hi|assistant: [yo|]user: q|assistant: [a|]
line feeds on both sides of a border stay two tokens   {}   {"prompt": "1\n", "completion": "\n2"}   1⏎[⏎2|]
of a completion all   {"completion_only_loss": false}   {"prompt": "1\n", "completion": "\n2"}   [1⏎⏎2|]
an empty prompt   {}   {"prompt": "", "completion": "ab"}   [ab|]
text begins with BOS and ends with EOS   {"bos": "^"}   {"text": "ab"}   ^[ab|]
text that ends with EOS gets no second one   {"bos": "^"}   {"text": "ab|"}   ^[ab|]
a prompt begins with BOS   {"bos": "^"}   {"prompt": "a", "completion": "b"}   ^a[b|]
a chat has what its template writes   {"bos": "^"}   {"messages": FIRST}   user: hi|assistant: [()yo|]
a completed chat   {}   {"prompt": ASKED, "completion": ANSWERED}   user: hi|assistant: [()yo|]
a completed chat as a whole   {"split_turns": false}   {"prompt": ASKED, "completion": ANSWERED}   user: hi|assistant: [()yo|]
only the completion   {}   {"prompt": FIRST, "completion": SECOND}   user: hi|assistant: yo|user: q|assistant: [()a|]
all turns of the completion   {"template": "MARKED", "assistant_only_loss": false}   {"prompt": FIRST, "completion": SECOND}   user: hi|assistant: yo|[user: q|assistant: a|]
all of a completed chat   {"completion_only_loss": false}   {"prompt": ASKED, "completion": ANSWERED}   [user: hi|assistant: ()yo|]
a label need not be the token   {}   {"input_ids": [97, 98], "labels": [-100, 7]}   a[b]
a mask of the completion is not read   {"completion_only_loss": false}   {"input_ids": [97, 98], "completion_mask": [0, 0]}   [ab]
EOS of a base model   {"eos": "^"}   {"messages": FIRST}   user: hi|assistant: [()yo|]
no special token ends a turn   {"template": "ENDING \\n"}   {"messages": FIRST}   user: hiassistant: [yo⏎]
after EOS all is cut   {"template": "ENDING |tail"}   {"messages": FIRST}   user: hiassistant: [yo|]
another special token cuts blanks   {"template": "ENDING ^tail"}   {"messages": FIRST}   user: hiassistant: [yo^tail]
an empty turn with weight 0   {}   {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "weight": 0.0}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}   user: hi|assistant: |user: q|assistant: [()a|]
a variable of the template   {"template": "BRIEF", "chat_template_kwargs": {"brief": "!"}}   {"messages": FIRST}   !user: hi|assistant: [yo|]
that of the row wins   {"template": "BRIEF", "chat_template_kwargs": {"brief": "!"}}   {"messages": FIRST, "chat_template_kwargs": {"brief": "?"}}   ?user: hi|assistant: [yo|]
a developer   {"template": "PLAIN"}   {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}   developer: x|user: hi|assistant: [yo|]
is the system where the template leaves developers out   {"template": "NO_DEVELOPER"}   {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}   system: x|user: hi|assistant: [yo|]
or refuses them   {"template": "RAISING"}   {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}   system: x|user: hi|assistant: [yo|]
weight 0 is history   {}   {"messages": UNSURE}   user: hi|assistant: yo|user: q|assistant: [()a|]
a tool's result as JSON   {"template": "{%- for m in messages %}{{- m.role + ': ' + (m.content|tojson if m.role == 'tool' else m.content) + '|' }}{% endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}"}   {"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "{\"e\": \"\n\"}"}, {"role": "assistant", "content": "yo"}]}   user: hi|tool: "{\"e\": \"\n\"}"|assistant: [yo|]
"""


@pytest.mark.parametrize(("promise", "options", "fields", "samples"), cases(READ))
def test_what_is_learned(promise: str, options: Any, fields: dict[str, Any], samples: str, shown: Any) -> None:
    ours = made(options)
    found = ours.encode(Row(fields, "a.jsonl:1"))
    assert [shown(each, ours.tokenizer.decode) for each in found] == samples.split(" & "), promise
    assert {each.where for each in found} == {"a.jsonl:1"} and found[0].input_ids.dtype == np.int64


REFUSED = r"""
# the encoder, the row, why (a * stands for more; at the beginning, for an error of the whole run)
{"max_length": 3}   {"text": "abc"}   4 tokens exceed max_length 3; raise max_length or set excess_length_strategy: drop | truncate
{"vocab_size": 123}   {"text": "z{"}   token id 123 at position 1 is outside the vocabulary (0..122)
{"assistant_only_loss": false}   {"messages": UNSURE}   turn 2 has weight: 0, but here it would bear loss; set assistant_only_loss: true and split_turns: true
{"completion_only_loss": false}   {"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "weight": 0}, {"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a", "weight": 1}]}   turn 2 has weight: 0, but here it would bear loss; set assistant_only_loss: true and split_turns: true
{"template": "MARKED", "split_turns": false}   {"messages": UNSURE}   turn 2 has weight: 0, but here it would bear loss; set assistant_only_loss: true and split_turns: true
{"split_turns": false}   {"messages": CHAT}   *split_turns: false: the chat template has no generation markers; set split_turns: true, or set chat_template_path to a template with generation markers
{"template": "MARKED", "split_turns": false}   {"prompt": FIRST, "completion": SECOND}   completion: expected a single assistant turn, or split_turns: true, or assistant_only_loss: false; found the roles user, assistant
{"template": null}   {"messages": CHAT}   *the tokenizer has no chat template; set chat_template_path to a template, or use rows with*
{"template": "{% for %}"}   {"messages": CHAT}   *the chat template is not valid at its line 1: *
{"template": "{{ raise_exception('no\nsystem') }}"}   {"messages": CHAT}   the chat template failed: TemplateError: no
{"template": "{{ messages[0].content + 1 }}"}   {"messages": CHAT}   the chat template failed: TypeError: *
{"template": "{%- for m in messages %}{{- m.role + ': ' + ('' if m.role == 'tool' else m.content) + '|' }}{% endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}"}   {"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": " rain "}, {"role": "assistant", "content": "yo"}]}   the chat template dropped turn 2 (role 'tool'); set chat_template_path to a template that renders it
{}   {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [{"function": {"name": "weather"}}]}]}   the chat template dropped turn 2's call of the tool 'weather'; set chat_template_path to a template that renders it
{}   {"messages": CHAT, "tools": [{"function": {"name": "weather"}}]}   the chat template dropped the tool 'weather'; set chat_template_path to a template that renders it
{}   {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "assistant", "content": "z"}]}   the chat template renders the prompt of turn 3 differently with and without its answer (*); set chat_template_path to a template that renders both alike, or enable_thinking in data.chat_template_kwargs
{"template": "{%- for m in messages %}{{- m.role + ': ' }}{%- if m.role == 'model' %}{%- generation %}{{- m.content + '|' }}{% endgeneration %}{%- else %}{{- m.content + '|' }}{% endif %}{% endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}", "split_turns": false}   {"messages": CHAT}   the chat template's generation markers mark no token; set split_turns: true, or set chat_template_path to a template with generation markers
{"template": "{%- for m in messages %}{{- m.role + ': ' + ('()' if m.role == 'assistant' and loop.last else '') + m.content + '|' }}{% endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}{% if thinks is defined %}{% endif %}", "chat_template_kwargs": {"think": 1}}   {"messages": CHAT}   *chat_template_kwargs: the chat template reads no variable 'think'; remove it
"""


@pytest.mark.parametrize(("options", "fields", "why"), cases(REFUSED))
def test_why_a_row_is_refused(options: dict[str, Any], fields: dict[str, Any], why: str) -> None:
    ours = made(options)
    with pytest.raises(UserError) as raised:
        ours.encode_all([Row(fields, "a.jsonl:1")], (lambda error: None) if why[0] == "*" else None)
    parts = why.lstrip("*").split("*")
    said = str(raised.value).removeprefix("a.jsonl:1: ")
    assert said.startswith(parts[0]) and said.endswith(parts[-1]) and "\n" not in said
    assert isinstance(raised.value, DataError) == (why[0] != "*")


LENGTH = len("user: hi|assistant: ")
COUNTED = [
    # the encoder, rows, what is learned of each, and the report
    ({"max_length": 4}, [{"text": "abc"}], [["[abc|]"]], {"num_tokens": 4, "num_labels": 3}),
    ({"max_length": LENGTH + 5, "excess_length_strategy": "drop"}, [{"messages": CHAT}, {"text": "x" * 99}], [[ONE], []],
     {"num_without_system": 1, "num_dropped_samples": 2, "num_long_samples": 2, "longest": 100,
      "longest_where": "a.jsonl:2", "num_tokens": LENGTH + 5, "num_labels": 5}),
    ({"max_length": LENGTH + 2, "excess_length_strategy": "truncate"}, [{"messages": CHAT[:2]}, {"text": "ab"}],
     [["user: hi|assistant: [()]"], ["[ab|]"]],
     {"num_without_system": 1, "num_truncated_samples": 1, "num_long_samples": 1, "longest": LENGTH + 5, "longest_where": "a.jsonl:1",
      "num_tokens": LENGTH + 5, "num_labels": 4}),
    ({"max_length": 8, "excess_length_strategy": "truncate"}, [{"messages": CHAT[:2]}], [[]],
     {"num_without_system": 1, "num_without_loss": 1, "num_long_samples": 1, "longest": LENGTH + 5,
      "longest_where": "a.jsonl:1"}),
    ({}, [{"input_ids": [999, 1]}, {"text": "ok"}, {"nothing": 1}, {"text": ""}], [[], ["[ok|]"], [], []],
     {"num_bad_rows": 3, "num_tokens": 3, "num_labels": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "rows", "samples", "counts"), COUNTED)
def test_what_is_counted(options: Any, rows: Any, samples: Any, counts: dict[str, Any], shown: Any) -> None:
    ours, report, errors = encoder(**options), EncodeReport(), list[DataError]()
    given = [Row(fields, f"a.jsonl:{number}") for number, fields in enumerate(rows, start=1)]
    found = ours.encode_all(iter(given), errors.append, report)
    assert [[shown(each, ours.tokenizer.decode) for each in row] for row in found] == samples
    numbers = {"num_rows": len(rows), "num_samples": sum(map(len, samples)), **counts}
    assert report == EncodeReport(**numbers, bad_rows=[str(error) for error in errors])
    assert [error.where for error in errors] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"][: len(errors)]


def test_a_batch_is_the_rows_one_by_one(shown: Any) -> None:
    rows = [Row({"text": "x" * n} if n % 3 else {"messages": CHAT}, "a:1") for n in range(1, 100)]
    ours = encoder()
    batch, single = (
        [[shown(x, ours.tokenizer.decode) for x in each] for each in found]
        for found in (ours.encode_all(iter(rows)), map(ours.encode, rows))
    )
    assert batch == single


def test_a_target_gets_no_space_where_a_text_begins(shown: Any) -> None:
    """SentencePiece tokenizers (Llama 2, Mistral) put a space before a text's first word, which a target is not."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "</s>", "▁", "a", "b", ":", "(", ")"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</s>")])
    template = (
        "{% for m in messages %}{{ '(' + m.content + ')' if m.role == 'user' else m.content + '</s>' }}{% endfor %}"
    )
    tokens = {"eos_token": "</s>", "unk_token": "<unk>"}
    encoder = ChatEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **tokens))
    rows = {"prompt": "a:", "completion": "b"}, {"messages": [user("a"), assistant("b")] * 2}
    found = [encoder.encode(Row(fields, "a.jsonl:1")) for fields in rows]

    def pieces(ids: list[int]) -> str:
        return "".join(encoder.tokenizer.convert_ids_to_tokens(ids))

    assert [[shown(each, pieces) for each in samples] for samples in found] == [
        ["▁a:[b</s>]"],
        ["▁(a)[b</s>]", "▁(a)b</s>(a)[b</s>]"],
    ]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(CHATML)


CONTENT = st.text(min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(system=CONTENT, question=CONTENT, answer=CONTENT.filter(str.strip))
def test_no_character_is_lost(tokenizer: Any, system: str, question: str, answer: str) -> None:
    messages = [{"role": "system", "content": system}, user(question), assistant(answer)]
    [sample] = ChatEncoder(tokenizer).encode(Row({"messages": messages}, "a.jsonl:1"))
    ids, is_learned = sample.input_ids, sample.labels != -100
    head = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    assert tokenizer.decode(ids[~is_learned]) == f"{head}<|im_start|>assistant\n"
    assert tokenizer.decode(ids[is_learned]) == f"{answer}<|im_end|>"


KEYS = ["role", "content", "from", "value", "weight", "function", "name", "arguments"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(KEYS), values),
    max_leaves=8,
)
COLUMNS = [
    *("messages", "prompt", "completion", "conversations", "text", "input_ids", "labels", "tools", "dialog", "system"),
    *("instruction", "input", "output", "history", "question", "answer", "functions", "chat_template_kwargs", "label"),
]
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=3)},
        optional=dict.fromkeys(("weight", "tool_calls", "function_call", "name", "reasoning_content"), JSON),
    ),
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(COLUMNS), JSON | TURNS, max_size=4))
def test_any_row_gives_samples_or_a_user_error(tokenizer: Any, fields: dict[str, Any]) -> None:
    try:
        samples = ChatEncoder(tokenizer).encode(Row(fields, "a.jsonl:1"))
    except UserError as error:
        assert str(error).startswith("a.jsonl:1: ")
    else:
        assert all((sample.labels[1:] != -100).any() for sample in samples)


def test_load_tokenizer(tmp_path: Path, tokenizer: Any) -> None:
    template, model = tmp_path / "other.jinja", tmp_path / "model"
    tokenizer.save_pretrained(model)
    for path, jinja, said in (
        (
            tmp_path / "missing",
            None,
            r"^no tokenizer in .*: expected a model folder with tokenizer\.json or a hub name; ",
        ),
        (model, template, r"^chat_template_path: cannot read .*jinja: No such file or directory; expected a Jinja"),
    ):
        with pytest.raises(UserError, match=said):
            load_tokenizer(str(path), jinja)
    template.write_text(MARKED)
    assert load_tokenizer(str(model)).chat_template == CHATML
    loaded = load_tokenizer(str(model), template)
    assert loaded.chat_template == MARKED and loaded("hi<|im_end|>")["input_ids"] == [*b"hi", END]
    template.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"^chat_template_path: cannot read .*jinja: not UTF-8; expected a Jinja"):
        load_tokenizer(str(model), template)
