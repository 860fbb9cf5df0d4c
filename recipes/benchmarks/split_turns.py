"""Count what `split_turns` costs on tool conversations with thinking, whole and as one sample per answer.

    python recipes/benchmarks/split_turns.py --questions 1 4 16                        # seconds

A conversation has a system prompt with tools, the same for all, and some questions. For each question the assistant
calls tools a few times and then answers, every time with thinking. Qwen3's template drops the thinking of earlier
questions. Whole conversations are trained in that rendering; split, every answer is trained as the model writes it.
The table counts all tokens of `--conversations` conversations in one micro-batch, and the computed ones.

Words are random. The template is the copy of Qwen3's in the package TRL.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from radixtrain.collators.batching import share_by_unique_tokens
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny

CALLS = 3  # of tools, for each question
NUM_TOOLS = 8
SYLLABLES = ("ka", "lo", "mi", "ren", "su", "ta", "vor", "wel", "zi", "an")
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]
THINKING, ANSWER, RESULT, QUESTION, SYSTEM = 60, 30, 60, 20, 100  # words of each


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 2, 4, 8], help="of a conversation")
    parser.add_argument("--conversations", type=int, default=4, help="in a step")
    options = parser.parse_args(argv)
    rows = {each: list(conversations(options.conversations, each)) for each in options.questions}
    tokenizer = learnt_tokenizer(rows[max(rows)])
    print("| questions | rows | samples | tokens | computed | r | / whole, computed |\n|---|---|---|---|---|---|---|")
    for questions in options.questions:
        whole = 0
        for name in ("whole", "split"):
            encoder = ChatEncoder(tokenizer, assistant_only_loss=name == "split")  # if false, a whole chat is a sample
            sequences = [sample.input_ids for samples in encoder.encode_all(rows[questions]) for sample in samples]
            (computed,) = share_by_unique_tokens(sequences, 1, None).costs
            num_tokens, whole = sum(map(len, sequences)), whole or computed
            counts = f"{len(sequences):,} | {num_tokens:,} | {computed:,}"
            print(f"| {questions} | {name} | {counts} | {num_tokens / computed:.2f} | {computed / whole:.2f} |")


def conversations(count: int, questions: int) -> Iterator[Row]:
    """Rows with the same system prompt and tools, and everything else of their own."""
    common, own = random.Random(0), random.Random(questions)
    tools = [tool(common, n) for n in range(NUM_TOOLS)]
    system = {"role": "system", "content": words(common, SYSTEM)}
    for n in range(count):
        turns = [turn for _ in range(questions) for turn in exchange(own)]
        yield Row({"messages": [system, *turns], "tools": tools}, f"generated:{n + 1}")


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def tool(rng: random.Random, n: int) -> dict[str, Any]:
    fields = {name: {"type": "string", "description": words(rng, 8)} for name in rng.sample(WORDS, 3)}
    function = {"name": f"tool_{n}", "description": words(rng, 15)}
    return {"type": "function", "function": function | {"parameters": {"type": "object", "properties": fields}}}


def exchange(rng: random.Random) -> Iterator[dict[str, Any]]:
    """A question, calls of tools with their results, and an answer."""
    yield {"role": "user", "content": words(rng, QUESTION)}
    for _ in range(CALLS):
        function = {"name": f"tool_{rng.randrange(NUM_TOOLS)}", "arguments": {rng.choice(WORDS): words(rng, 5)}}
        call = {"type": "function", "function": function}
        yield {"role": "assistant", "content": "", "reasoning_content": words(rng, THINKING), "tool_calls": [call]}
        yield {"role": "tool", "content": words(rng, RESULT)}
    yield {"role": "assistant", "content": words(rng, ANSWER), "reasoning_content": words(rng, THINKING)}


def learnt_tokenizer(rows: list[Row]) -> Any:
    templates = Path(str(files("trl"))) / "chat_templates"
    texts = {str(message.get("content", "")) for row in rows for message in row.fields["messages"]}
    tokenizer = tiny.train_tokenizer(sorted(texts), 1024)
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text("utf-8")
    return tokenizer


if __name__ == "__main__":
    main(sys.argv[1:])
