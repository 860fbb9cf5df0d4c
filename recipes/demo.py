"""Write a demo that trains in minutes on a CPU: chats of a help desk, a tokenizer and a tiny Qwen3 with random weights.

    python recipes/demo.py --output_dir runs/demo

Every chat begins with the same system prompt, a list of sixty codes. Customers write about a kettle or a pram in their
own words; the answer names the queue and the code of the department that sells it. The same seed writes the same
files, and nothing is downloaded.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tiny import tiny_qwen3, train_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

Chat = list[dict[str, str]]
Code = tuple[str, str, str]  # queue, department, code
MakeTokenizer = Callable[..., PreTrainedTokenizerBase]
MakeModel = Callable[..., PreTrainedModel]

# A department and what customers call its goods; the system prompt names departments only.
DEPARTMENTS = {
    "kitchen": ["kettle", "toaster", "saucepan"],
    "lighting": ["lamp", "lantern", "chandelier"],
    "floors": ["rug", "carpet", "doormat"],
    "seating": ["armchair", "stool", "sofa"],
    "office": ["desk", "bookcase", "lectern"],
    "bedroom": ["blanket", "pillow", "mattress"],
    "bathroom": ["towel", "mirror", "washbasin"],
    "garden": ["hammock", "parasol", "wheelbarrow"],
    "nursery": ["cradle", "pram", "highchair"],
    "pets": ["kennel", "birdcage", "aquarium"],
}

# A queue, the terms that its codes carry in the system prompt, and what customers write when they need it.
QUEUES = {
    "returns": (
        ["full refund", "refund less postage", "exchange only", "store credit"],
        [
            "I would like to send back the {item} that I bought {when}.",
            "Can I return a {item} that does not suit our home?",
            "The {item} is not what I expected, how do I get a refund?",
            "I changed my mind about the {item} from {when}.",
            "What do I have to do to exchange my {item} for another colour?",
            "My sister gave me the same {item}, so I want my money back for this one.",
        ],
    ),
    "delivery": (
        ["courier", "two-man team", "parcel locker", "shop pick-up"],
        [
            "Where is the {item} that I ordered {when}?",
            "The {item} was meant to arrive {when} and has not come.",
            "The tracking page of my {item} has not moved since {when}.",
            "Could the driver bring the {item} in the evening instead?",
            "I have moved house, please ship the {item} to my new address.",
            "The parcel came without the {item} in it.",
        ],
    ),
    "warranty": (
        ["one year", "two years", "five years", "repair first"],
        [
            "The {item} stopped working {when}.",
            "My {item} broke after only a few weeks of use.",
            "There is a crack in the {item} that was not there {when}.",
            "The {item} makes a strange noise, is that covered by the guarantee?",
            "Is a defect of the {item} repaired free of charge?",
            "The {item} fell apart although we treated it with care.",
        ],
    ),
    "payment": (
        ["card", "invoice", "three instalments", "gift voucher"],
        [
            "I was charged twice for the {item}.",
            "The voucher was not taken off the price of the {item}.",
            "Can I pay for the {item} in instalments?",
            "Please send me an invoice for the {item} from {when}.",
            "My card was declined when I tried to buy the {item}.",
            "The amount on my bank statement for the {item} is wrong.",
        ],
    ),
    "spares": (
        ["in stock", "made to order", "from the maker", "sold in pairs"],
        [
            "I lost a screw of the {item}, where do I get a new one?",
            "Do you sell replacement parts for the {item}?",
            "I need another foot for the {item} that I bought {when}.",
            "One small part of the {item} is missing, can I order just that?",
            "Which spare fits the {item} from your last catalogue?",
            "Is there a second cover for the {item} that I could buy separately?",
        ],
    ),
    "advice": (
        ["care sheet", "video call", "home visit", "printed guide"],
        [
            "How do I clean the {item} without scratching it?",
            "Which {item} would you recommend for a small flat?",
            "How much does the {item} weigh?",
            "Is the {item} safe with little children around?",
            "What is the {item} made of?",
            "How do I put the {item} together, are there instructions?",
        ],
    ),
}

OPENINGS = [
    "",
    "Hello, ",
    "Hi there. ",
    "Good morning! ",
    "Dear team, ",
    "Quick question. ",
    "Hello again. ",
    "Excuse me, ",
]
CLOSINGS = ["", " Thank you.", " Many thanks in advance.", " Please advise.", " Kind regards", " I am in a hurry."]
WHEN = ["last week", "on Monday", "yesterday", "in March", "ten days ago", "before the holidays"]
MAX_CHATS = 20_000  # 333 for each code, whose wordings make 864 different questions or more

INTRODUCTION = """\
You are the help desk of Alder and Finch, a shop for things that a home needs. Read the customer's question and decide \
which queue it belongs to and which code the clerk must open. Answer with two lines and nothing else, first the queue, \
then the code. Never make up a code, never answer the question yourself, and stay with the list even if the customer \
asks for something else.

Codes, with the department and the terms that apply:
"""


def main() -> None:
    disable_progress_bar()
    args = parse_args()
    write_demo(args.output_dir, args.seed, args.rows, args.validation_rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="must not hold anything yet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1200, help="training chats")
    parser.add_argument("--validation_rows", type=int, default=120, help="chats whose questions are not in training")
    return parser.parse_args()


def write_demo(
    output_dir: Path,
    seed: int = 0,
    rows: int = 1200,
    validation_rows: int = 120,
    make_tokenizer: MakeTokenizer = train_tokenizer,
    make_model: MakeModel = tiny_qwen3,
) -> None:
    """Write `train.jsonl`, `validation.jsonl` and `model/` into `output_dir`: all of it or, if interrupted, nothing.

    make_tokenizer: from the distinct texts of the chats and `vocab_size`. make_model: for a tokenizer, from a `seed`.
    """
    if output_dir.exists() and any(output_dir.iterdir()):
        raise SystemExit(f"--output_dir {output_dir}: already there; remove it first or name another folder")
    chats = make_chats(rows + validation_rows, seed)
    tokenizer = make_tokenizer(distinct_texts(chats), vocab_size=2048)
    model = make_model(tokenizer, seed=seed)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}-", dir=output_dir.parent))
    try:
        write_jsonl(unfinished / "train.jsonl", chats[:rows])
        write_jsonl(unfinished / "validation.jsonl", chats[rows:])
        write_model(unfinished / "model", tokenizer, model)
        unfinished.chmod(0o755)  # mkdtemp's own is for its owner only
        os.replace(unfinished, output_dir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{output_dir}: {rows:,} chats in train.jsonl, {validation_rows:,} in validation.jsonl")
    print(describe_lengths(tokenizer, chats))
    weights = f"{type(model).__name__}, {model.num_parameters():,} random weights"
    print(f"{output_dir / 'model'}: {weights}, vocabulary of {len(tokenizer):,}")


def make_codes(rng: random.Random) -> list[Code]:
    """Return sixty codes: a letter for the queue, and a number for the department, the same in every queue."""
    numbers = dict(zip(DEPARTMENTS, rng.sample(range(10, 100), len(DEPARTMENTS)), strict=True))
    return [
        (queue, department, f"{queue[0].upper()}-{numbers[department]}")
        for queue in QUEUES
        for department in DEPARTMENTS
    ]


def make_system_prompt(codes: list[Code], rng: random.Random) -> str:
    """The introduction, then the codes queue by queue, each with its department and one of its queue's terms."""
    sections = []
    for queue, (terms, _) in QUEUES.items():
        lines = [f"{code} {department}: {rng.choice(terms)}" for owner, department, code in codes if owner == queue]
        sections.append("\n".join([f"{queue}:", *lines]))
    return INTRODUCTION + "\n".join(sections)


def make_question(queue: str, department: str, rng: random.Random) -> str:
    """Return a question for the queue about one of the department's goods, in one wording."""
    question = rng.choice(QUEUES[queue][1]).format(item=rng.choice(DEPARTMENTS[department]), when=rng.choice(WHEN))
    return rng.choice(OPENINGS) + question + rng.choice(CLOSINGS)


def make_chats(num_chats: int, seed: int) -> list[Chat]:
    """Return chats in random order, with every code equally often and no question twice."""
    if num_chats > MAX_CHATS:
        raise SystemExit(
            f"--rows and --validation_rows: {num_chats:,} together, the wordings suffice for {MAX_CHATS:,}"
        )
    rng = random.Random(seed)
    codes = make_codes(rng)
    system = make_system_prompt(codes, rng)
    answers: dict[str, str] = {}
    while len(answers) < num_chats:
        queue, department, code = codes[len(answers) % len(codes)]
        answers.setdefault(make_question(queue, department, rng), f"queue: {queue}\ncode: {code}")
    chats = [make_chat(system, question, answer) for question, answer in answers.items()]
    rng.shuffle(chats)
    return chats


def make_chat(system: str, question: str, answer: str) -> Chat:
    """Return the three messages of one row."""
    contents = {"system": system, "user": question, "assistant": answer}
    return [{"role": role, "content": content} for role, content in contents.items()]


def distinct_texts(chats: list[Chat]) -> Iterator[str]:
    """Return every text of the chats once, in order of appearance."""
    return iter(dict.fromkeys(message["content"] for chat in chats for message in chat))


def write_jsonl(path: Path, chats: list[Chat]) -> None:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")


def write_model(folder: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Save both so that `from_pretrained(folder)` loads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def describe_lengths(tokenizer: PreTrainedTokenizerBase, chats: list[Chat]) -> str:
    """Return one line with the number of tokens that all chats share and of each chat's own tokens."""
    rows = sorted(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats)
    shared = shared_length(rows[0], rows[-1])  # in sorted order, what the outermost two share, all share
    own = sorted(len(row) - shared for row in rows)
    return f"tokens: {shared} in the shared prompt, {own[0]} to {own[-1]} (median {own[len(own) // 2]}) after it"


def shared_length(first: list[int], second: list[int]) -> int:
    """Return the number of leading tokens that two rows share."""
    differences = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differences, min(len(first), len(second)))


if __name__ == "__main__":
    main()
