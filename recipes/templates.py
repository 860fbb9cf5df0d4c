"""Hold what is trained with each chat template beside transformers: 200 generated chats, whole and turn by turn.

    python recipes/templates.py          # writes tests/golden/templates.json and recipes/templates.md

The templates are those that TRL ships, with a small tokenizer; and the tokenizers in runs/real, if they are there. A
row is equal if its ids are those of `apply_chat_template(..., tokenize=True)` and its loss stands on what the assistant
says: every part of a chat begins and ends with a word of its own, and these words are searched in the decoded text. Of
a whole chat the mask also is that of the generation markers in TRL's training variant, where there is one.
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
import trl
from transformers import AutoTokenizer

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row
from radixtrain.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "golden" / "templates.json"
PAGE = ROOT / "recipes" / "templates.md"
FOLDER = Path(trl.__file__).parent / "chat_templates"
REAL = ROOT / "runs" / "real"
NUM_CHATS, NUM_FIRST = 200, 10
DAY = datetime(2026, 11, 27)
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

    def loses(self, whole: bool) -> bool:
        """Whether the template itself leaves out a tool, or a word of a trained turn, or changes its prompt."""
        if any(tool["function"]["name"] not in self.text(self.messages) for tool in self.tools or ()):
            return True
        if whole:
            kept = {*WORD.findall(self.text(self.messages))}
            last = len(self.messages) - 1
            return not all({*words_of(m, n == last)} <= kept for n, m in enumerate(self.messages))
        for turn in self.turns():
            before = self.text(self.messages[:turn], add_generation_prompt=True)
            full = self.text(self.messages[: turn + 1])
            own = words_of(self.messages[turn], True)
            if not full.startswith(before) or sorted(WORD.findall(full[len(before) :])) != sorted(own):
                return True
        return False

    def wrong_turn(self, turn: int, sample: Any) -> str:
        """What differs in one turn; empty if nothing."""
        ids, learned = sample.input_ids.tolist(), sample.labels[sample.labels != -100].tolist()
        prompt = self.ids(self.messages[:turn], add_generation_prompt=True)["input_ids"]
        if ids != prompt + learned:
            return "other prompt"
        if sorted(WORD.findall(self.tokenizer.decode(learned))) != sorted(words_of(self.messages[turn], True)):
            return "loss on other words"
        whole = self.ids(self.messages[: turn + 1])["input_ids"]
        if whole[: len(ids)] == ids:
            return ""
        # Merged across the border, or gpt-oss, whose prompt loses a thought once the answer is there.
        text, answer = self.text(self.messages[: turn + 1]), self.tokenizer.decode(learned)
        return "" if text.startswith(self.tokenizer.decode(ids)) or text.rstrip().endswith(answer) else "other text"

    def wrong_chat(self, sample: Any, marked: str | None) -> str:
        learned = sample.labels[sample.labels != -100].tolist()
        if WORD.findall(self.text(self.messages)) != WORD.findall(self.tokenizer.decode(sample.input_ids)):
            return "other text"
        found, last = WORD.findall(self.tokenizer.decode(learned)), len(self.messages) - 1
        without = [word for turn in self.turns() for word in words_of(self.messages[turn], turn == last)]
        own = {word for turn in self.turns() for word in words_of(self.messages[turn], True)}
        if not {*without} <= {*found} <= own:
            return "loss on other words"
        if sample.input_ids.tolist() != self.ids(self.messages)["input_ids"] and self.text(
            self.messages
        ) != self.tokenizer.decode(sample.input_ids):
            return "other text"
        return "" if marked is None else self.wrong_mask(sample, marked)

    def wrong_mask(self, sample: Any, marked: str) -> str:
        """marked: TRL's training variant. Where it renders another text it says nothing about this one."""
        try:
            encoding = self.ids(self.messages, chat_template=marked, return_assistant_tokens_mask=True)
        except Exception:  # a template is a program and may raise anything
            return ""
        if encoding["input_ids"] != sample.input_ids.tolist():
            return ""
        pairs = zip(encoding["input_ids"], encoding["assistant_masks"], sample.labels.tolist(), strict=True)
        differ = [(token, mask) for token, mask, label in pairs if bool(mask) != (label != -100)]
        # TRL also marks what no model writes: a line end after the end of a turn; the generation prompt (gpt-oss).
        asked = [{"role": "user", "content": "Hi."}]
        header = self.text(asked, add_generation_prompt=True).removeprefix(self.text(asked)).strip()
        theirs = self.tokenizer.decode([token for token, mask in differ if mask])
        ours = self.tokenizer.decode([token for token, mask in differ if not mask])
        return "another mask than TRL's" if theirs.replace(header, "").strip() or ours.strip() else ""


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


def words_of(message: Message, thinking: bool = True) -> list[str]:
    """The words of a message in the order in which templates write them."""
    calls = [str(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    thought = message.get("reasoning_content", "") if thinking else ""
    return WORD.findall(" ".join([thought, message["content"], *calls]))


def outcome(encoder: ChatEncoder, row: dict[str, Any], marked: str | None) -> tuple[str, Any]:
    """Equal, what is wrong, or why the row is refused; and its samples."""
    tokenizer, whole = encoder.tokenizer, not encoder.split_turns
    try:
        samples = encoder.encode(Row(row, "chats.jsonl:1"))
    except DataError as error:
        return refusal(tokenizer, row, whole, str(error)), []
    reference = Reference(tokenizer, row)
    if whole:
        return reference.wrong_chat(samples[0], marked) or "equal", samples
    wrong = [reference.wrong_turn(turn, each) for turn, each in zip(reference.turns(), samples, strict=True)]
    return next(filter(None, wrong), "equal"), samples


def refusal(tokenizer: Any, row: dict[str, Any], whole: bool, error: str) -> str:
    reason = re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|\d+", "_", error.partition(": ")[2].partition(";")[0])[:80]
    try:
        lost = Reference(tokenizer, row).loses(whole)
    except Exception:
        return "refused: the template fails by itself"
    return f"refused: {reason}" if lost else f"refused though nothing is lost: {reason}"


def measured(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the outcomes of one template, and digests of all ids and masks, of these rows and of the first ones."""
    tokenizer = templates()[name]()
    training = FOLDER / f"{name.removeprefix('TRL ')}_training.jinja"
    marked = training.read_text("utf-8") if training.exists() else None
    found: dict[str, Any] = {}
    for mode, whole in (("turns", False), ("whole", True)):
        counts, digest, first = Counter[str](), hashlib.sha256(), ""
        encoder = ChatEncoder(tokenizer, split_turns=not whole, template_date=f"{DAY:%Y-%m-%d}")
        for number, row in enumerate(rows, start=1):
            what, samples = outcome(encoder, row, marked)
            counts[what] += 1
            digest.update(what.partition(":")[0].encode())
            for sample in samples:
                digest.update(sample.input_ids.tobytes() + sample.labels.tobytes())
            first = digest.hexdigest()[:16] if number == NUM_FIRST else first
        found[mode] = {"outcomes": dict(sorted(counts.items())), "first": first, "all": digest.hexdigest()[:16]}
    return found


def frozen() -> Any:
    """The day that transformers tells templates."""
    today = mock.Mock(wraps=datetime, now=lambda: DAY)
    return mock.patch("transformers.utils.chat_template_utils.datetime", today)


INTRO = f"""# Chat templates

{NUM_CHATS} generated chats with each template; `python recipes/templates.py` wrote this. *Equal*: ids and loss are
those of transformers and hold every part of what it says. The others are refused, and why; or their mask is not
that of TRL's training variant, for instance where a template writes no generation prompt after a tool's result, so that
the model has to write the header itself (diffusion_gemma).
"""


def lines(table: dict[str, Any]) -> Iterator[str]:
    yield INTRO
    yield "| template | each turn: equal | whole chats: equal | refused, of both |"
    yield "|---|---|---|---|"
    for name, modes in table.items():
        reasons = Counter[str]()
        for mode in modes.values():
            reasons.update({what: number for what, number in mode["outcomes"].items() if what != "equal"})
        shown = "<br>".join(f"{number} {what.removeprefix('refused: ')}" for what, number in reasons.most_common(4))
        turns, whole = (modes[mode]["outcomes"].get("equal", 0) for mode in ("turns", "whole"))
        yield f"| {name} | {turns} | {whole} | {shown} |"


def main() -> None:
    rows, table = chats(), {}
    start = time.process_time()
    with frozen():
        for name in sys.argv[1:] or templates():
            table[name] = measured(name, rows)
            print(name, *(mode["outcomes"] for mode in table[name].values()), flush=True)
    print(f"{len(rows)} rows x {len(table)} templates, {time.process_time() - start:.0f} CPU s")
    if not sys.argv[1:]:
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text("\n".join(lines(table)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
