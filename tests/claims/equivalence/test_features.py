"""Generated features, correct and faulty: the collator refuses a batch by name, or its loss is the ordinary one.

The ordinary route is written here, from the raw columns: sequences padded on the right, the loss by Hugging Face's own
model, in float64. If a batch is accepted, its loss and its gradients must be those. If it is refused, the message must
name the feature and the entry; and for faults that show on this model, the ordinary route must fail, or train on
something else than the features without their hidden tokens, which is what a collator that refuses nothing makes.

With RADIXTRAIN_FUZZ=1 every run draws other batches; RADIXTRAIN_TRIES scales their number.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain import RadixCollator, prepare_model
from radixtrain.verification.oracle import float64_throughout

BLOCKS = 4
DRAWS = 5 * int(os.environ.get("RADIXTRAIN_TRIES", "50"))  # in a block; 1,000 in all
SEED = int.from_bytes(os.urandom(4), "little") if os.environ.get("RADIXTRAIN_FUZZ") else 0
BAR = 1e-10
N = -100
PAD = 0
Row = dict[str, Any]


@dataclass
class Draw:
    """A batch of features, and its faults.

    faults: (feature, entry, kind) of each.
    is_judged: whether some fault shows on the ordinary route of this model.
    kinds: of loss, padding and positions that the features have.
    """

    features: list[Row]
    options: dict[str, Any]
    faults: list[tuple[int, str, str]] = field(default_factory=list)
    is_judged: bool = False
    kinds: list[str] = field(default_factory=list)


# Correct features.


def draw_batch(rng: np.random.Generator) -> Draw:
    is_faulty = rng.random() < 0.5
    loss_on_all = rng.random() < 0.25
    options = {
        "loss_on_all": loss_on_all,
        "min_shared_tokens": int(rng.integers(1, 4)),
        "pad_to_multiple_of": [None, 4][rng.integers(2)],
    }
    prompt = rng.integers(1, 50, 6).tolist()
    draw = Draw([], options)
    for _ in range(rng.integers(2 if is_faulty else 1, 5)):
        draw.features.append(draw_row(rng, prompt, loss_on_all, draw.kinds))
    if is_faulty:
        for _ in range(rng.integers(1, 3)):
            add_fault(rng, draw)
    draw.features = [{name: in_some_form(rng, name, x) for name, x in row.items()} for row in draw.features]
    return draw


def draw_row(rng: np.random.Generator, prompt: list[int], loss_on_all: bool, kinds: list[str]) -> Row:
    """A correct feature: its padding, positions, loss and bookkeeping do not depend on the other features."""
    ids = prompt[: rng.integers(2, 7)] + rng.integers(1, 50, rng.integers(1, 5)).tolist()
    left, right = pick(rng, [(0, 0)] * 3 + [(2, 0), (0, 3), (1, 2)])
    ids, length = [PAD] * left + ids + [PAD] * right, len(ids)
    seen = [0] * left + [1] * length + [0] * right
    row: Row = {"input_ids": ids}
    if left or right or rng.random() < 0.3:
        row["attention_mask"] = seen
        kinds += ["padding on the left"] * bool(left) + ["padding on the right"] * bool(right)
    places = pick(rng, [None] * 6 + ["offset", "jumps"])
    if places:
        steps = np.ones(length, dtype=int) if places == "offset" else rng.integers(1, 4, length)
        hidden = pick(rng, [0, 1, -1])
        row["position_ids"] = [hidden] * left + (rng.integers(9) + steps.cumsum()).tolist() + [hidden] * right
    loss = pick(rng, ["labels", "labels", "completion_mask", "assistant_masks", "both", "labels and a mask"])
    if loss_on_all and rng.random() < 0.5:
        loss = "everywhere"
    kinds += [loss, f"positions: {places}"]
    bears_loss = (rng.random(len(ids)) < 0.6).astype(int).tolist()
    if loss.startswith("labels"):
        hides = [not on or not seen[place] or (left and place == left) for place, on in enumerate(bears_loss)]
        row["labels"] = [N if hide else token for token, hide in zip(ids, hides, strict=True)]
    if loss in ("completion_mask", "both", "labels and a mask"):
        row["completion_mask"] = bears_loss
    if loss in ("assistant_masks", "both"):
        row["assistant_masks"] = (rng.random(len(ids)) < 0.6).astype(int).tolist()
    row |= {name: value for name, value in bookkeeping(len(ids)).items() if rng.random() < 0.1}
    return row


def bookkeeping(length: int) -> Row:
    """Entries that no model reads."""
    return {
        "text": "a b c",
        "messages": [{"role": "user", "content": "a"}],
        "metadata": {"score": 0.5},
        "tools": None,
        "tags": ["a", None],
        "empty": [],
        "length": length,
        "special_tokens_mask": [0] * length,
        "idx": 3,
        "offset_mapping": [(0, 1)] * length,
        "seq_lengths": [length],
    }


def in_some_form(rng: np.random.Generator, name: str, values: Any) -> Any:
    """A list, tuple, array or tensor of the same numbers."""
    if not isinstance(values, list) or not values or any(type(value) is not int for value in values):
        return values
    forms: list[Callable[..., Any]] = [list, tuple, np.array, np.int32, torch.tensor]
    if name.endswith(("mask", "masks")) and set(values) <= {0, 1}:
        forms += [lambda given: [bool(value) for value in given], np.int8]
    return pick(rng, forms)(values)


def pick(rng: np.random.Generator, choices: list[Any]) -> Any:
    return choices[rng.integers(len(choices))]


# Faults.


def add_fault(rng: np.random.Generator, draw: Draw) -> None:
    index = int(rng.integers(len(draw.features)))
    kind = pick(rng, list(FAULTS))
    if draw.options["loss_on_all"] and kind == "no loss":
        return
    if any(fault[0] == index for fault in draw.faults):
        return  # two faults of one feature could cancel each other
    entry, is_judged = FAULTS[kind](rng, draw.features[index])
    draw.faults.append((index, entry, kind))
    draw.is_judged |= is_judged


def no_loss(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    for name in ("labels", "completion_mask", "assistant_masks"):
        row.pop(name, None)
    return "labels", True


def unread(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    """Qwen3 ignores it, so it does not show."""
    length = len(row["input_ids"])
    values = {
        "token_type_ids": [0] * length,
        "pixel_values": np.zeros((3, 2, 2)),
        "weight": 0.5,
        "label": 1,
        "score": [0.5],
        "mm_token_type_ids": [0] * length,
        "inputs_embeds": np.zeros((length, 4)),
        "lengths": length,
        "is_good": True,
        "nested": [[1, 2], [3]],
        "image": object(),
        "loss_weights": torch.ones(length),
    }
    name = pick(rng, list(values))
    row[name] = values[name]
    return name, False


def plain_row(row: Row) -> int:
    """The same feature without padding, with labels and a mask of ones; its length."""
    seen = np.array(row.get("attention_mask", [1] * len(row["input_ids"])), dtype=bool)
    ids = np.array(row["input_ids"])[seen].tolist()
    ids += [7, 8, 9][: max(0, 4 - len(ids))]
    row.clear()
    row |= {"input_ids": ids, "labels": list(ids), "attention_mask": [1] * len(ids)}
    return len(ids)


def hole(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    length = plain_row(row)
    row["attention_mask"][int(rng.integers(1, length - 1))] = 0
    row["labels"] = [token if on else N for token, on in zip(row["labels"], row["attention_mask"], strict=True)]
    return "attention_mask", True


def loss_on_padding(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    """A label on the padding, or the first one after it."""
    length = plain_row(row)
    on_the_left = rng.random() < 0.5
    place = int(rng.integers(1, 3)) if on_the_left else length + int(rng.integers(2))
    padding = {"input_ids": PAD, "labels": N, "attention_mask": 0}
    for name, fill in padding.items():
        row[name] = [fill] * 2 + row[name] if on_the_left else row[name] + [fill] * 2
    if on_the_left:
        row["labels"][2] = N
    row["labels"][place] = 5
    return "labels", True


def no_mask_value(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    row.pop("labels", None)
    row["completion_mask"] = [1] * len(row["input_ids"])
    row.setdefault("attention_mask", [1] * len(row["input_ids"]))
    name = pick(rng, ["completion_mask", "attention_mask"])
    row[name] = [pick(rng, [2, -1]) if value else 0 for value in row[name]]
    return name, False


def all_hidden(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    """Hugging Face runs such a feature, and learns nothing from it."""
    row["attention_mask"] = [0] * len(row["input_ids"])
    return "attention_mask", False


def empty(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    row.clear()
    row |= {"input_ids": [], "labels": []}
    return "input_ids", False


def no_ids(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    del row["input_ids"]
    return "input_ids", True


def wrong_length(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    name = some_column(rng, row)
    row[name] = pick(rng, [row[name][:-1], [*row[name], 1]])
    return name, name not in ("completion_mask", "assistant_masks")


def floats(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    """Hugging Face computes with positions and masks in floats."""
    name = some_column(rng, row, "input_ids")
    row[name] = [float(value) for value in row[name]]
    return name, name in ("input_ids", "labels")


def nested(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    name = some_column(rng, row, "input_ids")
    row[name] = pick(rng, [[row[name]], [row[name], row[name][:1]], np.array([row[name]])])
    return name, name not in ("completion_mask", "assistant_masks")


def no_numbers(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    name = some_column(rng, row, "input_ids")
    row[name] = pick(rng, ["a b c", [None, *row[name][1:]], ["a", *row[name][1:]], {"a": 1}])
    return name, name not in ("completion_mask", "assistant_masks")


def booleans(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    """Beside integers they become 0 and 1 in an ordinary batch."""
    name = pick(rng, ["input_ids", "labels"])
    row[name] = [bool(value % 2) for value in row["input_ids"]]
    return name, False


def negative(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    """Rotary embeddings take a negative position."""
    length = plain_row(row)
    row["position_ids"] = list(range(1, length + 1))
    name = pick(rng, ["input_ids", "labels", "position_ids"])
    row[name] = [*row[name][:-1], -3]
    return name, name != "position_ids"


def several_sequences(rng: np.random.Generator, row: Row) -> tuple[str, bool]:
    """An ordinary model attends across them or not, by the kernel."""
    length = plain_row(row)
    if rng.random() < 0.5:
        row["position_ids"] = [0, 1, *range(length - 2)]
        return "position_ids", False
    row["seq_lengths"] = [2, length - 2]
    return "seq_lengths", False


def some_column(rng: np.random.Generator, row: Row, *others: str) -> str:
    """An entry that is there; a loss mask only if it is read."""
    row.setdefault("attention_mask", [1] * len(row["input_ids"]))
    masks = [] if "labels" in row else ["completion_mask", "assistant_masks"]
    names = ["labels", "attention_mask", "position_ids", *masks, *others]
    return pick(rng, [name for name in names if name in row])


FAULTS: dict[str, Callable[[np.random.Generator, Row], tuple[str, bool]]] = {
    "no loss": no_loss,
    "unread": unread,
    "hole": hole,
    "loss on padding": loss_on_padding,
    "no mask value": no_mask_value,
    "all hidden": all_hidden,
    "empty": empty,
    "no ids": no_ids,
    "wrong length": wrong_length,
    "floats": floats,
    "nested": nested,
    "no numbers": no_numbers,
    "booleans": booleans,
    "negative": negative,
    "several sequences": several_sequences,
}


# The ordinary route.


def ordinary_batch(features: list[Row]) -> dict[str, Tensor]:
    """[B, L], every column as it came and padded on the right by as many as its `input_ids`. Raises what torch raises.

    Loss masks become labels as in TRL: the token if every mask is 1. Padding has none, nor the token after it.
    """
    longest = max(len(as_list(row["input_ids"])) for row in features)
    fills = {"input_ids": PAD, "attention_mask": 0, "position_ids": 0, "labels": N}
    columns: dict[str, list[Any]] = {name: [] for name in fills}
    for row in features:
        ids = as_list(row["input_ids"])
        mask = as_list(row.get("attention_mask", [1] * len(ids)))
        plain = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": as_list(row.get("position_ids", list(range(len(ids))))),
            "labels": as_list(row["labels"]) if "labels" in row else labels_of_masks(row, ids, mask),
        }
        for name, values in plain.items():
            columns[name].append(values + [fills[name]] * (longest - len(ids)))
    return {name: torch.tensor(rows) for name, rows in columns.items()}


def labels_of_masks(row: Row, ids: list[int], mask: list[int]) -> list[int]:
    masks = [as_list(row[name]) for name in ("completion_mask", "assistant_masks") if name in row]
    if not masks and not row.get("loss_on_all"):
        raise KeyError("labels")
    labels = [token if all(bits) else N for token, *bits in zip(ids, mask, *masks, strict=False)]
    return [N if place and not mask[place - 1] else label for place, label in enumerate(labels)]


def as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray | Tensor) else list(values)


def without_hidden_tokens(features: list[Row]) -> list[Row]:
    """The features without the tokens that the mask hides; their loss masks may be too long or too short."""
    closed = []
    for row in features:
        seen = [bool(value) for value in as_list(row.get("attention_mask", [1] * len(as_list(row["input_ids"]))))]
        names = {"input_ids", "labels", "position_ids", "completion_mask", "assistant_masks"} & set(row)
        kept = {
            name: [value for value, on in zip(as_list(row[name]), seen, strict=False) if on] for name in sorted(names)
        }
        closed.append({**kept, "loss_on_all": row.get("loss_on_all")})
    return closed


def loss_sum(model: Any, batch: dict[str, Any]) -> Tensor:
    """Summed over the labelled tokens, however many there are."""
    return model(**batch, use_cache=False, num_items_in_batch=1).loss


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return [parameter.grad.clone() for parameter in model.parameters()]


# The comparison.


@pytest.fixture(scope="module")
def models(tiny_qwen3: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """The unmodified model and a prepared one with the same weights, both in float64."""
    ordinary, prepared = tiny_qwen3(num_hidden_layers=1), prepare_model(tiny_qwen3(num_hidden_layers=1))
    with ExitStack() as stack:
        for model in (ordinary, prepared):
            stack.enter_context(float64_throughout(model))
        yield ordinary, prepared


@pytest.mark.parametrize("block", range(BLOCKS))
def test_refused_by_name_or_the_ordinary_loss(models: tuple[Any, Any], block: int) -> None:
    counts: Counter[str] = Counter()
    for number in range(block * DRAWS, (block + 1) * DRAWS):
        draw = draw_batch(np.random.default_rng([SEED, number]))
        try:
            counts.update(check(draw, models, with_gradients=number % 4 == 0))
        except Exception as error:
            error.add_note(f"draw {number} of seed {SEED}: {draw}")
            raise
    assert counts["accepted"] + counts["refused"] == DRAWS
    assert min(counts["accepted"], counts["refused"]) > DRAWS / 3, counts
    assert counts["judged"] > counts["refused"] / 3, counts
    assert counts["gradients"] > DRAWS / 12 and counts["shares"] > counts["accepted"] / 4, counts
    missing = [kind for kind in (*FAULTS, *KINDS) if not counts[kind]]
    assert not missing, f"no draw with {missing}: {counts}"


KINDS = [
    "labels",
    "completion_mask",
    "assistant_masks",
    "both",
    "labels and a mask",
    "everywhere",
    "padding on the left",
    "padding on the right",
    "positions: None",
    "positions: offset",
    "positions: jumps",
]


def check(draw: Draw, models: tuple[Any, Any], with_gradients: bool) -> list[str]:
    """Compare one draw. Returns what it was an example of."""
    try:
        batch = RadixCollator(**draw.options)(draw.features)
    except ValueError as error:
        message = str(error)
    else:
        assert not draw.faults, "accepted"
        return ["accepted", *draw.kinds, *check_loss(draw, batch, models, with_gradients)]
    assert draw.faults, f"refused: {message}"
    named = [fault for fault in draw.faults if message.startswith(f"feature {fault[0]}") and fault[1] in message]
    assert named, f"names neither the feature nor the entry: {message}"
    if draw.is_judged:
        check_refusal(draw, models[0])
    return ["refused", *["judged"] * draw.is_judged, *(kind for _, _, kind in draw.faults)]


def check_loss(draw: Draw, batch: dict[str, Any], models: tuple[Any, Any], with_gradients: bool) -> list[str]:
    plain = ordinary_batch(marked(draw))
    ordinary, radix = loss_sum(models[0], plain), loss_sum(models[1], batch)
    assert (batch["labels"] != N).sum() == (plain["labels"][:, 1:] != N).sum(), "the divisor of the mean"
    assert abs(radix - ordinary) <= BAR * abs(ordinary), f"loss {radix:.17g}, ordinary {ordinary:.17g}"
    shares = batch["radix_inverse_indices"].numel() > batch["radix_inverse_indices"].unique().numel()
    if with_gradients:
        pairs = list(zip(gradients(models[1], radix), gradients(models[0], ordinary), strict=True))
        scale = max(float(truth.norm()) for _, truth in pairs)
        for (name, _), (found, truth) in zip(models[0].named_parameters(), pairs, strict=True):
            # queries and keys of rows that see one key have no gradient but rounding
            assert (found - truth).norm() <= BAR * max(float(truth.norm()), 1e-3 * scale), name
    return ["shares"] * shares + ["gradients"] * with_gradients


def check_refusal(draw: Draw, model: Any) -> None:
    """The ordinary route fails, or its loss is not that of the features without their hidden tokens."""
    features = marked(draw)
    try:
        ordinary = loss_sum(model, ordinary_batch(features))
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return
    closed_up = loss_sum(model, ordinary_batch(without_hidden_tokens(features)))
    assert abs(ordinary - closed_up) > 1e-6 * abs(ordinary), "nothing was wrong with it"


def marked(draw: Draw) -> list[Row]:
    """The features, each with the collator's `loss_on_all`."""
    return [{**row, "loss_on_all": draw.options["loss_on_all"]} for row in draw.features]
