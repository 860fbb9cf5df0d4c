"""What `split_turns` costs: tool conversations with thinking, each of them whole, and as a sample for every answer.

    OMP_NUM_THREADS=1 python recipes/benchmarks/split_turns.py            # a few minutes
    python recipes/benchmarks/split_turns.py --questions 1 2 4 8 16 32 --repeats 0     # tokens only: seconds

A conversation has a system prompt with tools that all share, and some questions. For each question the assistant calls
tools a few times and then answers, every time with thinking. Qwen3's template drops the thinking of earlier questions.
Whole conversations are trained in that rendering; split, every answer is trained as the model writes it. What is
measured is a step of `--conversations` conversations in one micro-batch, forward and backward, in turns:

    whole              split_turns: false, radixtrain
    split              split_turns: true, radixtrain
    whole, ordinary    the whole conversations in Hugging Face, padded; the fastest of several sizes of a micro-batch
    split, ordinary    the same of the samples for each answer

Words are random, and so are the model's weights. The template is the copy of Qwen3's in the package TRL.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastest_ordinary import fastest_ordinary

from radixtrain.bench.cells import GivenBatch, ModelShape, build_model
from radixtrain.bench.environment import header
from radixtrain.bench.work import Arm, Work, step_seconds, with_choices, work_of
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.step_cost import step_cost_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny

CALLS = 3  # of tools, for each question
NUM_TOOLS = 8
SYLLABLES = ("ka", "lo", "mi", "ren", "su", "ta", "vor", "wel", "zi", "an")
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]
THINKING, ANSWER, RESULT, QUESTION, SYSTEM = 60, 30, 60, 20, 100  # words of each
ARMS = ("whole", "split", "whole, ordinary", "split, ordinary")


class Line(NamedTuple):
    """A row of the table. seconds: of each turn; empty if nothing was timed."""

    questions: int
    arm: str
    num_samples: int
    num_tokens: int
    num_unique_tokens: int
    seconds: list[float]


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        rows = {each: list(conversations(options.conversations, each)) for each in options.questions}
        tokenizer = learnt_tokenizer(rows[max(rows)])
        shape = ModelShape(options.layers, options.hidden, vocab_size=-(-len(tokenizer) // 64) * 64)
        model = build_model(shape, torch.device("cpu"), torch.float32, "sdpa")
        print(header(torch.device("cpu"), "float32", options.repeats), flush=True)
        lines = (measured(model, tokenizer, shape, each, rows[each], options.repeats) for each in options.questions)
        print_table(chain.from_iterable(lines))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 2, 4, 8], help="of a conversation")
    parser.add_argument("--conversations", type=int, default=4, help="in a step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="0: count tokens only")
    return parser.parse_args(argv)


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
    try:
        import trl
    except ImportError:
        raise UserError("the chat template is a copy in the package TRL: pip install trl") from None
    texts = {str(message.get("content", "")) for row in rows for message in row.fields["messages"]}
    tokenizer = tiny.train_tokenizer(sorted(texts), 1024)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text("utf-8")
    return tokenizer


def measured(
    model: Any, tokenizer: Any, shape: ModelShape, questions: int, rows: list[Row], repeats: int
) -> Iterator[Line]:
    works = {
        arm: work_of_rows(ChatEncoder(tokenizer, split_turns=arm == "split"), shape, f"{questions} {arm}", rows)
        for arm in ("whole", "split")
    }
    seconds = timed(model, works, repeats) if repeats else {}
    for arm in ARMS if repeats else ARMS[:2]:
        work = works[arm.split(",")[0]]
        num_unique = work.num_tokens if arm.endswith("ordinary") else work.num_unique_tokens("cascade")
        yield Line(questions, arm, len(work.lengths), work.num_tokens, num_unique, seconds.get(arm, []))


def work_of_rows(encoder: ChatEncoder, shape: ModelShape, name: str, rows: list[Row]) -> Work:
    samples = [sample for samples in encoder.encode_all(rows) for sample in samples]
    features = [{"input_ids": sample.input_ids, "labels": sample.labels} for sample in samples]
    return work_of(GivenBatch(shape, name, len(samples)), features, batch_size=1)


def timed(model: Any, works: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of every turn of the arms, after one that is not counted."""
    plain_head, step_cost = has_plain_head(model), step_cost_of(model)
    radix, ordinary = Arm(plain_head=plain_head, attention="auto"), Arm(plain_head=plain_head)
    runs: dict[str, tuple[Arm, Work]] = {arm: (radix, with_choices(work, step_cost)) for arm, work in works.items()}
    for arm, work in works.items():
        runs[f"{arm}, ordinary"] = (ordinary, fastest_ordinary(model, work, (1, 4, 16), repeats=1)[0])
    turns = step_seconds(model, runs, repeats + 1)
    return {arm: seconds[1:] for arm, seconds in turns.items()}


def print_table(lines: Iterable[Line]) -> None:
    """Line by line as they come; the whole conversations of a number of questions come first."""
    print("\n| questions | arm | samples | tokens | computed | r | seconds | / whole, computed | / whole, seconds |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    whole: Line | None = None
    for line in lines:
        whole = line if whole is None or line.arm == "whole" else whole
        ratios = [own / other for own, other in zip(line.seconds, whole.seconds, strict=True)]
        seconds = (f"{statistics.median(each):.2f}" if each else "" for each in (line.seconds, ratios))
        print(
            f"| {line.questions} | {line.arm} | {line.num_samples:,} | {line.num_tokens:,} "
            f"| {line.num_unique_tokens:,} | {line.num_tokens / line.num_unique_tokens:.2f} | {next(seconds)} "
            f"| {line.num_unique_tokens / whole.num_unique_tokens:.2f} | {next(seconds)} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
