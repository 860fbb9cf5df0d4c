"""Compare radixtrain's rendering of chat templates with transformers: token ids and labels of 200 generated chats.

    python recipes/templates.py          # writes tests/golden/templates.json and recipes/templates.md

Chats are compared turn by turn. The templates are TRL's, with a small tokenizer, and those of the tokenizers
in runs/real, if there are any. Every part of a chat begins and ends with a unique word, and these words show which
parts a text contains. The page says what is compared.
"""

import hashlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import tiny
import transformers
import trl
from transformers import AutoTokenizer

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Row
from radixtrain.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "golden" / "templates.json"
PAGE = ROOT / "recipes" / "templates.md"
FOLDER = Path(trl.__file__).parent / "chat_templates"
REAL = ROOT / "runs" / "real"
NUM_CHATS, NUM_FIRST = 200, 10
DAY = datetime(2026, 11, 27)
SAME_IDS, SAME_TEXT, APART = "same ids", "same text, other ids", "same prompt and same answer, apart"
WORST_LAST = (SAME_IDS, SAME_TEXT, APART)
MARKER = re.compile(r"<[|｜][^<>'\"{}\s]+[|｜]>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|s)>")
WORD = re.compile(r"kw\d+x")
FILLINGS = [
    "",
    "é 漢字 🙂",
    "def f(x):\n    return {'a': x}",
    "  two  blanks ",
    '"quoted" \\n \\',
    "\n\n- a\n- b",
    "1,024.5%",
]
IN_TEXT = ["<|im_end|>", "</think", "[INST]", "<tool_call", "{{ x }}", "<br>"]
Message = dict[str, Any]


class Chats:
    """Rows that differ in everything that agents and people write, by a seed."""

    def __init__(self, seed: int):
        self.random, self.number = random.Random(seed), 0

    def words(self) -> str:
        """A text between two words that occur nowhere else."""
        self.number += 2
        inner = self.random.choice(FILLINGS + ([self.random.choice(IN_TEXT)] if self.random.random() < 0.3 else []))
        return f"kw{self.number}x {inner} kw{self.number + 1}x"

    def row(self) -> dict[str, Any]:
        draw = self.random.random
        system = self.random.choice([None, None, "system", "system", "developer"])
        messages = [{"role": system, "content": self.words()}] if system else []
        has_tools, thinks = draw() < 0.5, draw() < 0.35
        for _ in range(self.random.randint(1, 3)):
            blanks = self.random.choice(["", "", "", " ", "\n"])
            messages.append({"role": "user", "content": f"{self.words()}{blanks}"})
            if has_tools and draw() < 0.7:
                messages += self.calls(self.random.choice([1, 1, 2]), thinks)
            messages.append({"role": "assistant", "content": self.words(), **self.thought(thinks)})
        return {"messages": messages, **({"tools": [tool("find_shelf"), tool("count_all")]} if has_tools else {})}

    def thought(self, thinks: bool) -> Message:
        return {"reasoning_content": self.words()} if thinks and self.random.random() < 0.8 else {}

    def calls(self, number: int, thinks: bool) -> list[Message]:
        names = [self.random.choice(["find_shelf", "count_all"]) for _ in range(number)]
        content = {"content": self.words()} if self.random.random() < 0.3 else {"content": ""}
        calls = [{"type": "function", "function": {"name": name, "arguments": self.arguments()}} for name in names]
        results = [{"role": "tool", "name": name, "content": self.words()} for name in names]
        return [{"role": "assistant", **content, **self.thought(thinks), "tool_calls": calls}, *results]

    def arguments(self) -> Message:
        return {"thing": self.words()} | (
            {"n": self.random.randint(0, 9), "deep": [1.5]} if self.random.random() < 0.4 else {}
        )


def tool(name: str) -> Message:
    parameters = {"type": "object", "properties": {"thing": {"type": "string", "description": "What."}}}
    return {"type": "function", "function": {"name": name, "description": "Finds.", "parameters": parameters}}


def chats(number: int = NUM_CHATS) -> list[dict[str, Any]]:
    made = Chats(seed=0)
    return [made.row() for _ in range(number)]


def templates() -> dict[str, Any]:
    """Name -> a function that makes the tokenizer."""
    stock = {path.stem: path for path in sorted(FOLDER.glob("*.jinja"))}
    found: dict[str, Any] = {f"TRL {name}": lambda path=path: stock_tokenizer(path) for name, path in stock.items()}
    folders = [REAL / "smollm2", *sorted((REAL / "tokenizers").glob("*"))] if REAL.exists() else []
    return found | {f"real {each.name}": lambda each=each: real_tokenizer(each) for each in folders}


def real_tokenizer(folder: Path) -> Any:
    """Its own template, or if the folder has none, that of TRL's with its name."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        tokenizer.chat_template = (FOLDER / f"{folder.name.replace('-', '')}.jinja").read_text("utf-8")
    return tokenizer


def stock_tokenizer(path: Path) -> Any:
    """A small tokenizer whose special tokens are those that the template writes."""
    template = path.read_text("utf-8")
    special = sorted({"<|endoftext|>", "<|bos|>", "<|im_end|>", *MARKER.findall(template)})
    tokenizer = tiny.train_tokenizer([*FILLINGS, "find_shelf"], 280 + len(special), special, template)
    tokenizer.eos_token, tokenizer.bos_token = "<|endoftext|>", "<|bos|>"
    return tokenizer


class Reference:
    """A row as transformers renders it; nothing of this is the library's."""

    def __init__(self, tokenizer: Any, row: dict[str, Any]):
        self.tokenizer, self.tools = tokenizer, row.get("tools")
        self.messages = next(filter(self.can_render, forms(row["messages"])), row["messages"])

    def can_render(self, messages: list[Message]) -> bool:
        """Without a word on a developer's turn lost: not every template knows the role."""
        try:
            return {*words_of(messages[0])} <= {*WORD.findall(self.text(messages))}
        except Exception:  # a template is a program and may raise anything
            return False

    def text(self, messages: list[Message], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tools=self.tools, tokenize=False, **options))

    def ids(self, messages: list[Message], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=True, return_dict=True, **options
        )

    def turns(self) -> list[int]:
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]

    def cause(self) -> str:
        """Why the chat cannot be trained, as far as the template's own renderings tell; empty if they do not."""
        try:
            text = self.text(self.messages)
            if any(each["function"]["name"] not in text for each in self.tools or ()):
                return "a tool is left out"
            return next(filter(None, map(self.cause_of_turn, self.turns())), "")
        except Exception:  # a template is a program and may raise anything
            return "the template fails"

    def cause_of_turn(self, turn: int) -> str:
        before = self.text(self.messages[:turn], add_generation_prompt=True)
        full = self.text(self.messages[: turn + 1])
        if not {*words_of(self.messages[turn])} <= {*WORD.findall(full)}:
            return "words are left out"
        return "" if full.startswith(before) else "the prompt is not how the chat begins"

    def of_turn(self, turn: int, sample: Any) -> str:
        """How a sample of one turn compares: with the prompt, strictly; and with the chat up to the turn's end."""
        ids, learned = sample.input_ids.tolist(), sample.labels[sample.labels != -100].tolist()
        prompt = self.ids(self.messages[:turn], add_generation_prompt=True)["input_ids"]
        if ids != prompt + learned:
            return "wrong: other prompt"
        answer = self.tokenizer.decode(learned)
        if sorted(WORD.findall(answer)) != sorted(words_of(self.messages[turn])):
            return "wrong: loss on other words"
        rendered = self.ids(self.messages[: turn + 1])["input_ids"]
        if rendered[: len(ids)] == ids and not self.tokenizer.decode(rendered[len(ids) :]).strip():
            return SAME_IDS
        text = self.text(self.messages[: turn + 1])
        if text.rstrip() == self.tokenizer.decode(ids).rstrip():
            return SAME_TEXT
        # gpt-oss: the prompt has a thought that the template drops once the answer is there.
        return APART if text.rstrip().endswith(answer.rstrip()) else "wrong: other text"


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The same chat as templates may want it: a developer's turn as the system's, arguments as text."""
    for role in {messages[0]["role"]: 0, messages[0]["role"].replace("developer", "system"): 0}:
        first = [messages[0] | {"role": role}, *messages[1:]]
        yield first
        yield [with_text(message) if "tool_calls" in message else message for message in first]


def with_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    functions = [each | {"arguments": json.dumps(each["arguments"], ensure_ascii=False)} for each in functions]
    return message | {"tool_calls": [{"type": "function", "function": each} for each in functions]}


def words_of(message: Message) -> list[str]:
    """The words of a message in the order in which templates write them."""
    calls = [str(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return WORD.findall(" ".join([message.get("reasoning_content", ""), message["content"], *calls]))


def outcome(encoder: ChatEncoder, row: dict[str, Any]) -> tuple[str, list[Any]]:
    """How the row compares, or why it is refused; and its samples."""
    reference = Reference(encoder.tokenizer, row)
    try:
        samples = encoder.encode(Row(row, "chats.jsonl:1"))
    except DataError as error:
        reason = re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|\d+", "_", str(error).partition(": ")[2].partition(";")[0])[:80]
        return f"refused: {reference.cause() or f'none found, {reason}'}", []
    found = [reference.of_turn(turn, each) for turn, each in zip(reference.turns(), samples, strict=True)]
    return max(found, key=lambda each: (each not in WORST_LAST, each in WORST_LAST and WORST_LAST.index(each))), samples


def measured(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the outcomes of one template, and digests of all ids and labels, also of the first rows only."""
    counts, digest, first = Counter[str](), hashlib.sha256(), ""
    encoder = ChatEncoder(templates()[name](), template_date=f"{DAY:%Y-%m-%d}")
    for number, row in enumerate(rows, start=1):
        what, samples = outcome(encoder, row)
        counts[what] += 1
        digest.update(what.partition(":")[0].encode())
        for sample in samples:
            digest.update(sample.input_ids.tobytes() + sample.labels.tobytes())
        first = digest.hexdigest()[:16] if number == NUM_FIRST else first
    return {"outcomes": dict(sorted(counts.items())), "first": first, "all": digest.hexdigest()[:16]}


def frozen() -> Any:
    """The day that transformers tells templates."""
    today = mock.Mock(wraps=datetime, now=lambda: DAY)
    return mock.patch("transformers.utils.chat_template_utils.datetime", today)


INTRO = f"""# Chat templates

The table compares the same {NUM_CHATS} generated chats for each template of TRL {trl.__version__} and of five real
tokenizers. `python recipes/templates.py` wrote this page; `tests/recipes/test_templates.py` checks the counts, and
digests of all ids and labels.

*Same ids*: each turn's sample begins with exactly the ids of `apply_chat_template` for the messages before the turn,
with `add_generation_prompt=True`; everything after is trained and contains every word of the turn; and the sample
equals the chat rendered up to this turn, id by id, except for white space at its end. *Other*: {SAME_TEXT}; or
{APART}, since gpt-oss's template drops thinking from the history once the answer follows.
"""
HEAD = "| template | same ids | other | refused |\n|---|---|---|---|"
WHY = """
## Not of the same ids, and why

It is told from what transformers renders, not from our error.

| template | chats |
|---|---|"""
PROMPT = """
Nemotron's prompt ends with `<think>\\n`, and its turns without thinking begin with `<think></think>`. With
`data.chat_template_kwargs: {enable_thinking: false}` the prompt ends with `<think></think>`, and the chats in which no
turn thinks are trained. Chats with turns of both kinds are refused either way. For the chats that think, Qwen3.5's
template without thinking needs `{enable_thinking: true}`."""


def lines(table: dict[str, Any]) -> Iterator[str]:
    yield from (INTRO, HEAD)
    for name, found in table.items():
        yield f"| {name} | {' | '.join(map(str, counts_of(found['outcomes'])))} |"
    yield WHY
    for name, found in table.items():
        if shown := ", ".join(reasons(found["outcomes"])):
            yield f"| {name} | {shown} |"
    yield PROMPT


def counts_of(outcomes: dict[str, int]) -> tuple[int, int, int]:
    refused = sum(number for what, number in outcomes.items() if what.startswith("refused"))
    return outcomes.get(SAME_IDS, 0), sum(outcomes.values()) - refused - outcomes.get(SAME_IDS, 0), refused


def reasons(outcomes: dict[str, int]) -> list[str]:
    return [f"{number} {what.removeprefix('refused: ')}" for what, number in outcomes.items() if what != SAME_IDS]


def main() -> None:
    rows, table = chats(), {}
    start = time.process_time()
    with frozen():
        for name in sys.argv[1:] or templates():
            table[name] = measured(name, rows)
            print(name, table[name]["outcomes"], flush=True)
    print(f"{len(rows)} rows x {len(table)} templates, {time.process_time() - start:.0f} CPU s")
    if not sys.argv[1:]:
        made = {"trl": trl.__version__, "transformers": transformers.__version__, "templates": table}
        TABLE.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text("\n".join(lines(table)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
