"""Files as they come: each is read as it is meant, or says what is wrong and where. None crashes, none loses a row.

A case is a file's name, its bytes, and what becomes of its rows in their order: `learns X` for each sample, or the
error of a row; or else one text, the error of the whole file. `@` stands for the path.
"""
# ruff: noqa: E501 (the tables)

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import open_rows, read_rows
from radixtrain.errors import DataError, UserError

CHATML = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content %}{{- m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{- call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
{%- if brief is defined %}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    names = bytes_to_unicode()
    backend = Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def turns(*texts: Any, **keys: Any) -> list[dict[str, Any]]:
    """A question, its answer, another question ...; the keys are the last turn's."""
    roles = ("user", "assistant")
    found = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return [*found[:-1], {**found[-1], **keys}]


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), sink)
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def called(**call: Any) -> bytes:
    asked = {"role": "assistant", "tool_calls": [{"function": call}]}
    return line(messages=[{"role": "user", "content": "q"}, asked])


A = b'{"text": "a"}\n'
B = b'{"text": "b"}\n'
AB = ["learns a", "learns b"]
LONG = b"".join(b'{"text": "%d"}\n' % n for n in range(10_000))

FILES: list[tuple[str, bytes, list[str] | str]] = [
    # lines of JSON
    ("a.jsonl", b"", "no rows in @; expected at least one"),
    ("a.jsonl", b"\n \n\t\n", "no rows in @; expected at least one"),
    ("a.jsonl", b"\xef\xbb\xbf" + A + b"\r\n" + B.rstrip(), AB),
    ("a.ndjson", A + B, AB),
    ("a.JSONL", A, AB[:1]),
    ("a.jsonl", A + b'{"text": "x"\n' + B, ["learns a", "@:2: not valid JSON: Expecting ',' delimiter", "learns b"]),
    ("a.jsonl", A + b"}\n", ["learns a", "@:2: not valid JSON: Expecting value at column 1"]),
    ("a.jsonl", A[:-3], ["@:1: not valid JSON: Unterminated string"]),
    ("a.jsonl", b'{"text": NaN}\n', ["@:1: not valid JSON: NaN is not a JSON number"]),
    ("a.jsonl", b'{"text": -Infinity}\n', ["@:1: not valid JSON: -Infinity is not a JSON number"]),
    ("a.jsonl", b"[" * 100_000 + b"\n" + B, ["@:1: not valid JSON: nested too deeply", "learns b"]),
    ("a.jsonl", b'{"text": "x", "text": "y"}', ["@:1: key 'text' occurs more than once"]),
    ("a.jsonl", b'{"text": "\xe9"}\n' + B, ["@:1: not valid UTF-8: byte 0xe9 at offset 10", "learns b"]),
    ("a.jsonl", b'{"text": "\\ud83d"}', [r"@:1: text holds \ud83d, half of a surrogate pair"]),
    ("a.jsonl", b'{"text": "\\uD83D\\uDE00"}', ["learns \U0001f600"]),
    ("a.jsonl", b"\x00\x00\n" + B, ["@:1: not valid JSON", "learns b"]),
    ("a.jsonl", b'"text"\n3\nnull\n', [f"@:{n}: expected a JSON object, found" for n in (1, 2, 3)]),
    ("a.jsonl", "".join(map(chr, A)).encode("utf-16"), "@: expected text, but the file begins as UTF-16 text"),
    ("a.jsonl", gzip.compress(A), "@: expected text, but the file begins as gzip; add .gz to its name"),
    ("a.jsonl", parquet(text=["a"]), "@: expected text, but the file begins as parquet; name it .parquet"),
    ("a.jsonl", b"PK\x03\x04zip", "@: expected text, but the file begins as a zip archive"),
    # documents of JSON
    ("a.json", b'[{"text": "a"}, {"text": "b"}]', AB),
    ("a.json", b'\xef\xbb\xbf{"version": 1, "data": [{"text": "a"},\n{"text": "b"}]}', AB),
    ("a.json", A + b"\n" + B, AB),
    ("a.json", A + b"{\n" + B, ["learns a", "@:2: not valid JSON: Expecting property name", "learns b"]),
    ("a.json", b"[]", "no rows in @; expected at least one"),
    ("a.json", b"{}", "@: expected an array of rows, found an object without one"),
    ("a.json", b'"a"', "@: expected an array of rows, found a string"),
    ("a.json", b'[{"text": "a"}, 7, {"text": "b"}]', ["learns a", "@:row 2: expected a JSON object, found a number", "learns b"]),
    ("a.json", b'[{"text": "a", "text": "b"}, {"text": "b"}]', ["@:row 1: key 'text' occurs more than once", "learns b"]),
    ("a.json", b'[{"text": NaN}, {"text": "b"}]', ["@:row 1: not valid JSON: NaN is not a JSON number", "learns b"]),
    ("a.json", b'[{"text": "a"}\n{"text": "b"}]', "@: not valid JSON: Expecting ',' delimiter at line 2, column 1"),
    ("a.json", b'[{"text": "a"}', "@: not valid JSON: Expecting ',' delimiter at line 1, column 15"),
    ("a.json", b'[{"text": "a"},]', "@: not valid JSON: "),
    ("a.json", b'[{"text": "a"}] {}', "@: not valid JSON: Extra data at line 1, column 17"),
    ("a.json", b'[{"text": "\xff"}]', "@: not valid UTF-8: byte 0xff at offset 11"),
    ("a.json", b"[" * 100_000, "@: not valid JSON: nested too deeply"),
    ("a.json", b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "@: expected one array of rows, found 'train', 'test'"),
    ("a.json", b'{"messages": []}', "@: holds one row and not an array of rows"),
    # tables as text
    ("a.csv", b"text\r\na\r\n\r\nb\r\n", AB),
    ("a.csv", b'\xef\xbb\xbftext\n"a"\nb', AB),
    ("a.csv", b'question,answer\nq,"a\n""b"""\nq\n', ['learns a\n"b"', "@:4: expected 2 fields (question, answer), found 1"]),
    ("a.csv", b"question,answer\nq,a,b\nq,b\n", ["@:2: expected 2 fields (question, answer), found 3", "learns b"]),
    ("a.csv", b'text\na\n"b', ["learns a", "@:3: cannot be read as a table: unexpected end of data"]),
    ("a.csv", b'text\n"a"b\nb\n', ["@:2: cannot be read as a table: ',' expected after '\"'", "learns b"]),
    ("a.csv", b"text\n\xe9\nb\n", ["@:2: not valid UTF-8: byte 0xe9", "learns b"]),
    ("a.csv", b"text,text\na,b\n", "@:1: the header names the column 'text' more than once"),
    ("a.csv", b"text\n", "no rows in @; expected at least one"),
    ("a.csv", b"", "no rows in @; expected at least one"),
    ("a.csv", b",question,answer\n0,q,a\n", ["learns a"]),
    ("a.csv", b"prompt;completion\nq;a\n", ["@:2: no format has the columns prompt;completion"]),
    ("a.csv", b"q,a\nq,b\n", ["@:2: no format has the columns q, a; expected messages"]),
    ("a.csv", b"text\n" + b"x" * 200_000 + b"\n", ["learns " + "x" * 200_000]),
    ("a.csv", b"messages\n\"[{'role': 'user', 'content': 'q'}]\"\n", ["this is how Python prints a list"]),
    ("a.csv", "text\na\n".encode("utf-16"), "@: expected text, but the file begins as UTF-16 text"),
    ("a.csv", b"text\ra\r", "@:1: cannot be read as a table: new-line character"),
    ("a.tsv", b"question\tanswer\nq, \ta\n", ["learns a"]),
    # compressed files, Arrow
    ("a.jsonl.gz", gzip.compress(A) + gzip.compress(B), AB),
    ("a.jsonl.zst", zstd(A) + zstd(B), AB),
    ("a.csv.gz", gzip.compress(b"text\na\n"), AB[:1]),
    ("a.parquet.zst", zstd(parquet(text=["a"])), AB[:1]),
    ("a.jsonl.gz", gzip.compress(LONG)[:-100], "@: cannot be decompressed: Truncated compressed stream"),
    ("a.jsonl.zst", zstd(LONG)[:-100], "@: cannot be decompressed: Truncated compressed stream"),
    ("a.jsonl.gz", A, "@: cannot be decompressed: "),
    ("a.jsonl.zst", A, "@: cannot be decompressed: "),
    ("a.json.gz", b"", "no rows in @; expected at least one"),
    ("a.parquet", b"PAR1 nothing PAR1", "@: cannot be read as parquet: "),
    ("a.parquet", b"", "@: cannot be read as parquet: "),
    ("a.parquet", parquet(text=["a", None, "b"]), ["learns a", "@:row 2: no format has the columns text (null)", "learns b"]),
    ("a.arrow", b"ARROW1 nothing", "@: cannot be read as Arrow: "),
    ("a.arrow", b"", "@: cannot be read as Arrow: "),
    ("a.xlsx", b"PK\x03\x04", "@: unknown suffix '.xlsx'; expected .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"),
    ("a", A, "@: unknown suffix ''; expected .jsonl"),
    # rows that mean something else than they say
    ("a.jsonl", line(messages=turns("q", "a", weight=0.5)), ["(role 'assistant'): weight: expected 0 (no loss on the turn) or 1, found 0.5"]),
    ("a.jsonl", line(messages=turns("q", "a", weight=0)), ["@:1: every assistant turn has weight: 0"]),
    ("a.jsonl", line(messages=[*turns("q", "x", weight=0), *turns("q", "a")]), ["learns a"]),
    ("a.jsonl", line(messages=[{"role": "user", "content": "q", "weight": 1}, *turns("q", "a")[1:]]), ["weight: 1 asks for loss on the turn"]),
    ("a.jsonl", line(messages=[{"role": "narrator", "content": "x"}]), ["@:1: messages: turn 1: unknown role 'narrator'"]),
    ("a.jsonl", line(messages=turns("q", "")), ["turn 2 (role 'assistant'): the answer is empty"]),
    ("a.jsonl", line(messages=turns("q", " \n")), ["turn 2 (role 'assistant'): the answer is empty"]),
    ("a.jsonl", line(messages=turns("q", None)), ["turn 2 (role 'assistant'): content: expected text, found null"]),
    ("a.jsonl", line(messages=None), ["@:1: no format has the columns messages (null)"]),
    ("a.jsonl", line(messages=[None]), ["turn 1: expected {role, content}, found null"]),
    ("a.jsonl", line(messages=json.dumps(turns("q", "a"))), ["learns a"]),
    ("a.jsonl", line(messages="[{"), ["@:1: messages: not valid JSON: "]),
    ("a.jsonl", line(messages=turns("q", [{"type": "image_url", "image_url": "x"}])), ["only parts {type: text, text} are read, found 'image_url'"]),
    ("a.jsonl", line(messages=turns("q", "a"), images=["x.png"]), ["@:1: images: only text is read"]),
    ("a.jsonl", line(messages=turns("q", "a"), chat_template_kwargs={"breif": 1}), ["reads no variable 'breif', did you mean brief?"]),
    ("a.jsonl", line(messages=turns("q", "a"), prompt="other"), ["@:1: prompt beside messages, and it is no part of it"]),
    ("a.jsonl", line(messages=turns("q", "a"), tools="[{"), ["@:1: tools: not valid JSON"]),
    ("a.jsonl", called(name="f", arguments='{"x": 1'), ["tool_calls: call 1 of the tool 'f': arguments: not valid JSON"]),
    ("a.jsonl", called(name="f", arguments="[1]"), ["tool_calls: call 1 of the tool 'f': arguments: expected an object"]),
    ("a.jsonl", called(name="f", arguments='{"x": 1}'), ['learns f{"x": 1}']),
    ("a.jsonl", called(arguments={}), ["tool_calls: call 1: expected the name of a function"]),
    ("a.jsonl", line(text="a", label=1), ["@:1: label beside text: nobody would learn it"]),
    ("a.jsonl", line(prompt="q", completion=""), ["@:1: completion: it is empty"]),
    ("a.jsonl", line(prompt="q", completion="a", system="s"), ["@:1: system: 's' beside plain text, which has no system turn"]),
    ("a.jsonl", line(conversations=[{"from": "human", "value": "q"}]), ["@:1: expected at least one assistant turn"]),
    ("a.jsonl", line(question="q", answer="a", context="c"), ["@:1: context beside question and answer"]),
    ("a.jsonl", line(question="q", answer=7), ["@:1: answer: expected text, found 7"]),
]  # fmt: skip


def outcomes(path: Path, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Row by row: what is learned from each sample, or what is wrong."""
    found = []
    encoder = ChatEncoder(tokenizer)
    for row in open_rows(path):
        errors: list[DataError] = []
        [samples] = encoder.encode_all([row], errors.append)
        labels = [sample.labels[sample.labels != -100] for sample in samples]
        found += [f"learns {tokenizer.decode(each).removesuffix('<|im_end|>')}" for each in labels] or map(str, errors)
    return found


@pytest.mark.parametrize(("name", "content", "expected"), FILES, ids=[f"{n} {f[0]}" for n, f in enumerate(FILES)])
def test_a_file(
    name: str, content: bytes, expected: list[str] | str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(UserError) as raised:
            outcomes(path, tokenizer)
        assert str(raised.value).startswith(expected.replace("@", str(path)))
        assert "\n" not in str(raised.value)
        return
    found = outcomes(path, tokenizer)
    assert len(found) == len(expected), found
    for said, wanted in zip(found, expected, strict=True):
        assert said == wanted if wanted.startswith("learns") else wanted.replace("@", str(path)) in said
        assert said.startswith(("learns ", f"{path}:"))


def test_there_are_enough_of_them() -> None:
    assert len(FILES) >= 60
    assert len({(name, content) for name, content, _ in FILES}) == len(FILES)


FOLDERS: list[tuple[dict[str, bytes], str, str]] = [
    ({}, "", "@: holds no data file; expected .jsonl"),
    ({"README.md": b"x"}, "", "@: holds no data file; expected .jsonl"),
    ({"a.jsonl": A, "b.csv": b"text\nb\n"}, "", "@: holds files of several kinds, .csv (b.csv), .jsonl (a.jsonl)"),
    ({"a.jsonl": A, "b.xlsx": b"PK"}, "", "@: b.xlsx is no data file that can be read; choose by a glob such as @/*.jsonl"),
    ({"train.jsonl": A, "test.jsonl": B}, "", "@: by the names of its files it holds the splits test, train"),
    ({}, "/*.jsonl", "no file matches @/*.jsonl"),
    ({"a.txt": b"x"}, "/*", "@/a.txt: unknown suffix '.txt'; expected"),
    ({}, "/missing.jsonl", "no such file: @/missing.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "pattern", "expected"), FOLDERS, ids=[case[2][:40] for case in FOLDERS])
def test_a_folder(files: dict[str, bytes], pattern: str, expected: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        list(read_rows(f"{tmp_path}{pattern}"))
    assert str(raised.value).startswith(expected.replace("@", str(tmp_path)))
    assert "\n" not in str(raised.value)
