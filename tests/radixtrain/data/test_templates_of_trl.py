"""The chat templates that TRL carries: each turn is the text and the ids of transformers, or the row is refused."""

import random
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Row
from radixtrain.errors import DataError
from tests.support.batches import byte_tokenizer

trl = pytest.importorskip("trl", reason="its chat templates are compared: pip install trl")
TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
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


def chat(draw: random.Random, has_system: bool, has_tools: bool, thinks: bool) -> dict[str, Any]:
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


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_each_turn_is_that_of_transformers_or_the_row_is_refused(path: Path) -> None:
    """Ids of the prompt, which bears no loss; then the text of the turn, all words of which are learned."""
    template, draw = path.read_text("utf-8"), random.Random(0)
    special = sorted({"<|endoftext|>", "<|im_end|>", "<|bos|>", *MARKER.findall(template)})
    tokenizer = byte_tokenizer(template, eos="<|endoftext|>", special=tuple(special))
    tokenizer.bos_token = "<|bos|>"
    for kind in product((False, True), repeat=3):
        row, turns = chat(draw, *kind), []
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
