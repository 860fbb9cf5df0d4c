"""Rows to samples, token by token: which tokens bear loss, and what is counted. What rows mean: `test_rows.py`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import BOS, END, MARKED, START, TWO_NEWLINES, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.formats import Row
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import DataError, UserError

THINK = [*b"<think>", TWO_NEWLINES, *b"</think>", TWO_NEWLINES]
# Thinking is shown in the last turn only, as by Qwen3.
THINKING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(THINKING)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def chat(*messages: dict[str, Any], **columns: Any) -> Row:
    return row(messages=list(messages), **columns)


def row(**fields: Any) -> Row:
    return Row(fields, "a.jsonl:1")


def lists(samples: list[TokenRow]) -> list[tuple[list[int], list[int]]]:
    assert all(sample.input_ids.dtype == sample.labels.dtype == np.int64 for sample in samples)
    return [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in samples]


def after(prompt: Any, target: Any) -> tuple[list[int], list[int]]:
    return [*prompt, *target], [-100] * len(prompt) + [*target]


def texts(encoder: ChatEncoder, given: Row) -> list[tuple[str, str]]:
    """Of each sample: what bears no loss, and what does."""
    decode = encoder.tokenizer.decode
    samples = encoder.encode(given)
    return [tuple(decode(x.input_ids[(x.labels != -100) == learned]) for learned in (False, True)) for x in samples]


def error_of(encoder: ChatEncoder, bad_row: Row) -> str:
    with pytest.raises(UserError) as raised:
        encoder.encode(bad_row)
    assert "\n" not in str(raised.value)
    return str(raised.value)


TURN_1 = [START, *b"user\nhi", END, *b"\n", START, *b"assistant\n"]
ANSWER_1 = [*THINK, *b"yo", END]
TURN_2 = [*TURN_1, *b"yo", END, *b"\n", START, *b"user\nq", END, *b"\n", START, *b"assistant\n"]
ANSWER_2 = [*THINK, *b"a", END]
ONE_TURN = (user("hi"), assistant("yo"))
TWO_TURNS = (*ONE_TURN, user("q"), assistant("a"))


# What comes out


def test_every_turn_is_a_sample_as_at_inference(tokenizer: Any) -> None:
    for unanswered in ([], [user("unanswered")]):
        samples = ChatEncoder(tokenizer).encode(chat(*TWO_TURNS, *unanswered))
        assert lists(samples) == [after(TURN_1, ANSWER_1), after(TURN_2, ANSWER_2)]
        assert [sample.where for sample in samples] == ["a.jsonl:1"] * 2


def test_loss_on_everything_is_one_sample(tokenizer: Any) -> None:
    everything = [*TURN_2, *ANSWER_2, *b"\n"]
    samples = ChatEncoder(tokenizer, assistant_only_loss=False).encode(chat(*TWO_TURNS))
    assert lists(samples) == [(everything, everything)]


def test_generation_markers_mask_a_whole_chat() -> None:
    samples = ChatEncoder(byte_tokenizer(MARKED), split_turns=False).encode(chat(*TWO_TURNS))
    head = [*b"\n", START, *b"user\nq", END, *b"\n", START, *b"assistant\n"]
    (ids_1, labels_1), (ids_2, labels_2) = after(TURN_1, [*b"yo", END]), after(head, [*b"a", END])
    assert lists(samples) == [([*ids_1, *ids_2, *b"\n"], [*labels_1, *labels_2, -100])]


def test_prompt_and_completion_as_text(tokenizer: Any) -> None:
    fields = row(prompt="1+1=\n", completion="\n2")
    # The newlines are not merged: at inference the prompt's tokens are given.
    assert lists(ChatEncoder(tokenizer).encode(fields)) == [after(b"1+1=\n", [*b"\n2", END])]
    everything = [*b"1+1=\n\n2", END]
    assert lists(ChatEncoder(tokenizer, completion_only_loss=False).encode(fields)) == [(everything, everything)]
    assert lists(ChatEncoder(tokenizer).encode(row(prompt="", completion="ab"))) == [([*b"ab", END],) * 2]


def test_plain_text_gets_bos_and_eos_once() -> None:
    encoder = ChatEncoder(byte_tokenizer(THINKING, bos="<|bos|>"))
    assert lists(encoder.encode(row(text="ab"))) == [([BOS, *b"ab", END], [-100, *b"ab", END])]
    assert lists(encoder.encode(row(text="ab<|im_end|>"))) == [([BOS, *b"ab", END], [-100, *b"ab", END])]
    assert lists(encoder.encode(row(prompt="a", completion="b"))) == [([BOS, *b"ab", END], [-100, -100, *b"b", END])]
    assert lists(encoder.encode(chat(*ONE_TURN))) == [after(TURN_1, ANSWER_1)]


def test_only_the_completion_of_a_chat_is_learned(tokenizer: Any) -> None:
    single = row(prompt=[user("hi")], completion=[assistant("yo")])
    for encoder in (ChatEncoder(tokenizer), ChatEncoder(tokenizer, split_turns=False)):
        assert lists(encoder.encode(single)) == [after(TURN_1, ANSWER_1)]
    everything = [*TURN_1, *ANSWER_1, *b"\n"]
    assert lists(ChatEncoder(tokenizer, completion_only_loss=False).encode(single)) == [(everything, everything)]
    several = row(prompt=list(TWO_TURNS[:2]), completion=list(TWO_TURNS[2:]))
    assert lists(ChatEncoder(tokenizer).encode(several)) == [after(TURN_2, ANSWER_2)]
    whole = byte_tokenizer(MARKED)  # renders the prompt's answer alike when another turn follows
    samples = ChatEncoder(whole, assistant_only_loss=False).encode(several)
    target = [START, *b"user\nq", END, *b"\n", START, *b"assistant\na", END]
    assert lists(samples) == [after([*TURN_1, *b"yo", END, *b"\n"], target)]
    assert error_of(ChatEncoder(whole, split_turns=False), several) == (
        "a.jsonl:1: completion: expected a single assistant turn, or split_turns: true, or assistant_only_loss: false; "
        "found the roles user, assistant"
    )


def test_tokens_that_are_there_already(tokenizer: Any) -> None:
    """A label need not be the token. Masks and kinds of rows: `test_rows.py`."""
    given = row(input_ids=[1, 2, 3], labels=[-100, -100, 7])
    assert lists(ChatEncoder(tokenizer).encode(given)) == [([1, 2, 3], [-100, -100, 7])]
    encoder = ChatEncoder(tokenizer, completion_only_loss=False)
    assert lists(encoder.encode(row(input_ids=np.array([1, 2]), completion_mask=[0, 0]))) == [([1, 2], [1, 2])]


def test_a_base_models_turn_ends_at_its_own_token() -> None:
    """Its EOS is another token, so the template's end of turn is known by being special."""
    samples = ChatEncoder(byte_tokenizer(THINKING, eos="<|bos|>")).encode(chat(*ONE_TURN))
    assert lists(samples) == [after(TURN_1, ANSWER_1)]


@pytest.mark.parametrize(
    ("ending", "target"),
    [("\\n", b"yo\n"), ("<|im_end|>tail", [*b"yo", END]), ("<|im_start|>tail", [*b"yo", START, *b"tail"])],
    ids=["no special token: everything stays", "after EOS all is cut", "another special token cuts only blanks"],
)
def test_where_a_turn_ends(ending: str, target: Any) -> None:
    template = (
        "{%- for m in messages %}{{- m.role[0] + m.content }}"
        "{%- if m.role == 'assistant' %}{{- 'ENDING' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{- 'a' }}{% endif %}"
    )
    samples = ChatEncoder(byte_tokenizer(template.replace("ENDING", ending))).encode(chat(*ONE_TURN))
    assert lists(samples) == [after(b"uhia", target)]


def test_a_target_gets_no_space_where_a_text_begins() -> None:
    """SentencePiece tokenizers (Llama 2, Mistral) put a space before a text's first word, which a target is not."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "</s>", "▁", "a", "b", ":", "[", "]"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</s>")])
    template = (
        "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + '</s>' }}{% endfor %}"
    )
    tokens = {"eos_token": "</s>", "unk_token": "<unk>"}
    encoder = ChatEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **tokens))
    assert lists(encoder.encode(row(prompt="a:", completion="b"))) == [after([2, 3, 5], [4, 1])]
    prompt, answer = [6, 3, 7], [4, 1]
    split = [after([2, *prompt], answer), after([2, *prompt, *answer, *prompt], answer)]
    assert lists(encoder.encode(chat(user("a"), assistant("b"), user("a"), assistant("b")))) == split


UNSURE = (user("hi"), assistant("yo", weight=0), user("q"), assistant("a", weight=1))


def test_a_turn_with_weight_0_is_history(tokenizer: Any) -> None:
    assert lists(ChatEncoder(tokenizer).encode(chat(*UNSURE))) == [after(TURN_2, ANSWER_2)]


def test_weight_0_is_refused_if_the_turn_would_bear_loss() -> None:
    """On every token of a chat, or on every turn that the template marks."""
    of_two, of_chat = row(prompt=[*UNSURE[:3]], completion=[UNSURE[3]]), chat(*UNSURE)
    options = {"assistant_only_loss": of_chat, "completion_only_loss": of_two, "split_turns": of_chat}
    for option, given_row in options.items():
        assert error_of(ChatEncoder(byte_tokenizer(MARKED), **{option: False}), given_row) == (
            "a.jsonl:1: turn 2 has weight: 0, but here it would bear loss; "
            "set assistant_only_loss: true and split_turns: true"
        )


# Batches, lengths, counts


def test_a_batch_is_the_rows_one_by_one(tokenizer: Any) -> None:
    rows = [row(text="x" * n) if n % 3 else chat(*TWO_TURNS) for n in range(1, 100)]
    encoder = ChatEncoder(tokenizer)
    assert [lists(samples) for samples in encoder.encode_all(iter(rows))] == [lists(encoder.encode(r)) for r in rows]


def test_bad_rows_are_reported_in_order_and_leave_their_place_empty(tokenizer: Any) -> None:
    rows = [row(input_ids=[999, 1]), row(text="ok"), row(nothing=1), row(text="")]
    rows = [r._replace(where=f"a.jsonl:{n}") for n, r in enumerate(rows, start=1)]
    errors: list[DataError] = []
    report = EncodeReport()
    encoded = ChatEncoder(tokenizer).encode_all(rows, errors.append, report)
    assert [len(samples) for samples in encoded] == [0, 1, 0, 0]
    assert [error.where for error in errors] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"]
    counts = {"num_rows": 4, "num_bad_rows": 3, "num_samples": 1, "num_tokens": 3, "num_labels": 2}
    assert report == EncodeReport(**counts, bad_rows=[str(error) for error in errors])
    with pytest.raises(DataError, match=r"^a\.jsonl:1: token id 999"):
        ChatEncoder(tokenizer).encode_all(rows)


def test_a_long_row_is_refused_by_default(tokenizer: Any) -> None:
    assert error_of(ChatEncoder(tokenizer, max_length=3), row(text="abc")) == (
        "a.jsonl:1: 4 tokens exceed max_length 3; raise max_length or set excess_length_strategy: drop | truncate"
    )
    assert len(ChatEncoder(tokenizer, max_length=4).encode(row(text="abc"))) == 1


def test_dropping_keeps_the_turns_that_fit(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, max_length=len(TURN_1 + ANSWER_1), excess_length_strategy="drop")
    report = EncodeReport()
    encoded = encoder.encode_all([chat(*TWO_TURNS), row(text="x" * 99)], report=report)
    assert [lists(samples) for samples in encoded] == [[after(TURN_1, ANSWER_1)], []]
    counts = {"num_rows": 2, "num_dropped_rows": 1, "num_samples": 1, "num_dropped_samples": 2, "num_long_samples": 2}
    counts |= {"num_without_system": 1}
    tokens = {"num_tokens": len(TURN_1 + ANSWER_1), "num_labels": len(ANSWER_1), "longest": 100}
    assert report == EncodeReport(**counts, **tokens, longest_where="a.jsonl:1")


def test_truncating_keeps_the_start(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, max_length=len(TURN_1) + 2, excess_length_strategy="truncate")
    report = EncodeReport()
    encoded = encoder.encode_all([chat(*ONE_TURN), row(text="ab")], report=report)
    assert [lists(samples) for samples in encoded] == [[after(TURN_1, ANSWER_1[:2])], [([*b"ab", END],) * 2]]
    assert (report.num_rows, report.num_samples, report.num_truncated_samples) == (2, 2, 1)
    assert (report.num_tokens, report.num_labels) == (len(TURN_1) + 2 + 3, 2 + 2)


def test_truncating_away_the_answer_is_counted(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, max_length=8, excess_length_strategy="truncate")
    report = EncodeReport()
    assert encoder.encode_all([chat(*ONE_TURN)], report=report) == [[]]
    assert (report.num_without_loss, report.num_dropped_rows, report.num_truncated_samples) == (1, 1, 0)
    assert str(report) == "1 rows, 0 samples, 1 samples dropped because truncation left them no loss"


def test_a_wrong_policy_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="excess_length_strategy: expected raise, drop or truncate, found 'cut'"):
        ChatEncoder(tokenizer, excess_length_strategy="cut")
    with pytest.raises(UserError, match="max_length: expected at least 2 tokens, found 1"):
        ChatEncoder(tokenizer, max_length=1)


def test_a_token_beyond_the_models_embedding_is_named(tokenizer: Any) -> None:
    message = error_of(ChatEncoder(tokenizer, vocab_size=258), chat(*ONE_TURN))
    assert message == "a.jsonl:1: token id 258 at position 8 is outside the vocabulary (0..257)"


# Templates

WEATHER = {"function": {"name": "weather"}}
OTHER = "set chat_template_path to a template that renders it"
FAULTS = [
    # a template, a chat, the error or how it begins
    (
        None,
        chat(*ONE_TURN),
        "the tokenizer has no chat template; set chat_template_path to a template, or use rows with",
    ),
    ("{% for %}", chat(*ONE_TURN), "the chat template is not valid at its line 1: "),
    (
        "{{ raise_exception('no\nsystem') }}",
        chat(*ONE_TURN),
        "a.jsonl:1: the chat template failed: TemplateError: no",
    ),
    ("{{ messages[0].content + 1 }}", chat(*ONE_TURN), "a.jsonl:1: the chat template failed: TypeError: "),
    (
        THINKING.replace("{{- message.content", "{{- '' if message.role == 'tool' else message.content"),
        chat(user("hi"), {"role": "tool", "content": " rain "}, assistant("yo")),
        f"a.jsonl:1: the chat template dropped turn 2 (role 'tool'); {OTHER}",
    ),
    (
        THINKING,
        chat(user("x"), assistant("y", tool_calls=[WEATHER])),
        f"a.jsonl:1: the chat template dropped turn 2's call of the tool 'weather'; {OTHER}",
    ),
    (
        THINKING,
        chat(user("x"), assistant("y"), tools=[WEATHER]),
        f"a.jsonl:1: the chat template dropped the tool 'weather'; {OTHER}",
    ),
    (
        THINKING,
        chat(user("x"), assistant("y"), assistant("z")),
        "a.jsonl:1: the chat template renders the prompt of turn 3 differently with and without its answer "
        r"('y<|im_end|>\n<|im_start|>assist' and '<think>\n\n</think>\n\ny<|im_end|>'); "
        "set chat_template_path to a template that renders both alike",
    ),
]


@pytest.mark.parametrize(("template", "given_chat", "message"), FAULTS, ids=[case[2][:60] for case in FAULTS])
def test_what_a_template_may_not_do(template: str | None, given_chat: Row, message: str) -> None:
    assert error_of(ChatEncoder(byte_tokenizer(template)), given_chat).startswith(message)


def test_whole_chats_need_markers(tokenizer: Any) -> None:
    """One error for the whole file, also if bad rows are skipped; rows that are no chats need none."""
    encoder = ChatEncoder(tokenizer, split_turns=False)
    with pytest.raises(UserError) as raised:
        encoder.encode_all([chat(*ONE_TURN), chat(*TWO_TURNS)], on_error=lambda error: None)
    assert str(raised.value) == (
        "split_turns: false: the chat template has no generation markers; "
        "set split_turns: true, or set chat_template_path to a template with generation markers"
    )
    assert lists(encoder.encode(row(text="ab"))) == lists(ChatEncoder(tokenizer).encode(row(text="ab")))


def test_markers_have_to_mark() -> None:
    encoder = ChatEncoder(byte_tokenizer(MARKED.replace("== 'assistant'", "== 'model'")), split_turns=False)
    assert error_of(encoder, chat(*ONE_TURN)) == (
        "a.jsonl:1: the chat template's generation markers mark no token; "
        "set split_turns: true, or set chat_template_path to a template with generation markers"
    )


def test_a_tool_result_printed_as_json_is_not_dropped() -> None:
    template = THINKING.replace(
        "message.content", "(message.content if message.role != 'tool' else message.content|tojson)"
    )
    result = {"role": "tool", "content": '{"é": "\n"}'}
    assert len(ChatEncoder(byte_tokenizer(template)).encode(chat(user("hi"), result, assistant("yo")))) == 1


def test_a_misspelt_variable_of_the_config_is_not_the_fault_of_a_row() -> None:
    template = THINKING + "{% if enable_thinking is defined %}{% endif %}"
    encoder = ChatEncoder(byte_tokenizer(template), chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(UserError) as raised:
        encoder.encode_all([chat(*TWO_TURNS)], on_error=lambda error: None)
    assert str(raised.value) == (
        "chat_template_kwargs: the chat template reads no variable 'enable_thinkin', did you mean enable_thinking?"
    )


@pytest.fixture(scope="module")
def trl_template() -> Callable[[str], PreTrainedTokenizerFast]:
    trl = pytest.importorskip("trl", reason="carries a copy of Qwen3's stock chat template: pip install trl")

    def read(name: str) -> PreTrainedTokenizerFast:
        path = Path(trl.__file__).parent / "chat_templates" / name
        if not path.exists():
            pytest.skip(f"this trl has no {name}: pip install 'trl>=1.10'")
        return byte_tokenizer(path.read_text(encoding="utf-8"))

    return read


THOUGHTFUL = (user("hi"), assistant("yo", reasoning_content="greet"), user("q"), assistant("a"))
ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ASKED_TWICE = ASKED + "yo<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"


class TestQwen3:
    """Its stock template, in the copy that TRL carries."""

    def test_a_turn_has_its_own_thinking_and_the_next_does_not_see_it(self, trl_template: Any) -> None:
        assert texts(ChatEncoder(trl_template("qwen3.jinja")), chat(*THOUGHTFUL)) == [
            (ASKED, "<think>\ngreet\n</think>\n\nyo<|im_end|>"),
            (ASKED_TWICE, f"{NO_THOUGHT}a<|im_end|>"),
        ]

    def test_without_thinking_the_empty_block_is_in_the_prompt(self, trl_template: Any) -> None:
        kwargs = {"enable_thinking": False}
        tokenizer = trl_template("qwen3.jinja")
        for encoder, given_chat in (
            (ChatEncoder(tokenizer, chat_template_kwargs=kwargs), chat(*ONE_TURN)),
            (ChatEncoder(tokenizer), chat(*ONE_TURN, chat_template_kwargs=kwargs)),
        ):
            assert texts(encoder, given_chat) == [(ASKED + NO_THOUGHT, "yo<|im_end|>")]

    def test_tools(self, trl_template: Any) -> None:
        tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
        messages = (user("rain?"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "rain"})
        encoder = ChatEncoder(trl_template("qwen3.jinja"))
        for given_tools in (tools, json.dumps(tools)):
            samples = texts(encoder, chat(*messages, assistant("yes"), tools=given_tools))
            called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>'
            assert [target for _, target in samples] == [f"{NO_THOUGHT}{called}", f"{NO_THOUGHT}yes<|im_end|>"]
            assert all('"name": "weather", "parameters"' in prompt for prompt, _ in samples)
            assert "<tool_response>\nrain\n</tool_response>" in samples[1][0]

    def test_a_developer_is_rendered_as_the_system(self, trl_template: Any, tokenizer: Any) -> None:
        """By a template that leaves developers out; another one keeps them."""
        given_chat = chat({"role": "developer", "content": "be brief"}, *ONE_TURN)
        for each, role in ((trl_template("qwen3.jinja"), "system"), (tokenizer, "developer")):
            [(prompt, _)] = texts(ChatEncoder(each), given_chat)
            assert prompt.startswith(f"<|im_start|>{role}\nbe brief<|im_end|>")

    def test_the_template_for_training_marks_whole_chats(self, trl_template: Any) -> None:
        [(_, target)] = texts(ChatEncoder(trl_template("qwen3_training.jinja"), split_turns=False), chat(*TWO_TURNS))
        assert "yo<|im_end|>" in target and "a<|im_end|>" in target and "user" not in target


# Any text, any row

CONTENT = st.text(min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(system=CONTENT, question=CONTENT, answer=CONTENT.filter(str.strip))
def test_no_character_is_lost(tokenizer: Any, system: str, question: str, answer: str) -> None:
    messages = [{"role": "system", "content": system}, user(question), assistant(answer)]
    [(prompt, target)] = texts(ChatEncoder(tokenizer), chat(*messages))
    head = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    assert (prompt, target) == (f"{head}<|im_start|>assistant\n", f"{NO_THOUGHT}{answer}<|im_end|>")


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
        samples = ChatEncoder(tokenizer).encode(row(**fields))
    except UserError as error:
        assert str(error).startswith("a.jsonl:1: ")
    else:
        assert all((sample.labels[1:] != -100).any() for sample in samples)


# The tokenizer's files


def test_load_tokenizer_with_another_template(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "other.jinja").write_text(MARKED)
    assert load_tokenizer(str(tmp_path)).chat_template == THINKING
    loaded = load_tokenizer(str(tmp_path), tmp_path / "other.jinja")
    assert loaded.chat_template == MARKED
    assert loaded("hi<|im_end|>")["input_ids"] == [*b"hi", END]


def test_load_tokenizer_says_what_is_missing(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(
        UserError, match=r"^no tokenizer in .*: expected a model folder with tokenizer\.json or"
    ) as raised:
        load_tokenizer(str(tmp_path / "missing"))
    assert str(raised.value).endswith("; there is no such folder")
    with pytest.raises(UserError, match=r"; the folder has none$"):
        load_tokenizer(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "x.jinja"
    with pytest.raises(UserError, match=r"^chat_template_path: cannot read .*x\.jinja: No such file or directory; exp"):
        load_tokenizer(str(tmp_path), path)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"^chat_template_path: cannot read .*x\.jinja: not UTF-8; expected a Jinja "):
        load_tokenizer(str(tmp_path), path)
