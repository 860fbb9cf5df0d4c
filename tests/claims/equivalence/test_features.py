"""Generated features, in every form that a collator takes: the loss of a radix batch is the ordinary one.

The ordinary route is written here, from the raw columns: sequences padded on the right, the loss by Hugging Face's own
model, in float64. Loss and gradients of the radix batch must be those. What the collator refuses is in
tests/collators/test_features.py. With RADIXTRAIN_FUZZ=1 every run draws other batches.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain import RadixCollator, share_prefixes
from radixtrain.verification.oracle import float64_throughout
from tests.support import TRIES, cases

BLOCKS = cases(range(max(4, TRIES // 12)), [0])
DRAWS = 125  # in a block, in which every kind of feature occurs
SEED = int.from_bytes(os.urandom(4), "little") if os.environ.get("RADIXTRAIN_FUZZ") else 0
BAR = 1e-10
N = -100
PAD = 0
Row = dict[str, Any]


def draw_batch(rng: np.random.Generator) -> tuple[list[Row], dict[str, Any], list[str]]:
    """Features, options of the collator, and the kinds of loss and positions that the features have."""
    loss_on_all, kinds = rng.random() < 0.25, []
    options = {
        "loss_on_all": loss_on_all,
        "min_shared_tokens": int(rng.integers(1, 4)),
        "pad_to_multiple_of": [None, 4][rng.integers(2)],
    }
    prompt = rng.integers(1, 50, 6).tolist()
    features = [draw_row(rng, prompt, loss_on_all, kinds) for _ in range(rng.integers(1, 5))]
    return [{name: in_some_form(rng, name, x) for name, x in row.items()} for row in features], options, kinds


def draw_row(rng: np.random.Generator, prompt: list[int], loss_on_all: bool, kinds: list[str]) -> Row:
    """A correct feature: its positions, loss and bookkeeping do not depend on the other features."""
    ids = prompt[: rng.integers(2, 7)] + rng.integers(1, 50, rng.integers(1, 5)).tolist()
    row: Row = {"input_ids": ids}
    if rng.random() < 0.3:
        row["attention_mask"] = [1] * len(ids)
    places = pick(rng, [None] * 6 + ["offset", "jumps"])
    if places:
        steps = np.ones(len(ids), dtype=int) if places == "offset" else rng.integers(1, 4, len(ids))
        row["position_ids"] = (rng.integers(9) + steps.cumsum()).tolist()
    loss = pick(rng, ["labels", "labels", "completion_mask", "assistant_masks", "both", "labels and a mask"])
    if loss_on_all and rng.random() < 0.5:
        loss = "everywhere"
    kinds += [loss, f"positions: {places}"]
    bears_loss = (rng.random(len(ids)) < 0.6).astype(int).tolist()
    if loss.startswith("labels"):
        row["labels"] = [token if on else N for token, on in zip(ids, bears_loss, strict=True)]
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


def ordinary_batch(features: list[Row]) -> dict[str, Tensor]:
    """[B, L], every column as it came and padded on the right by as many as its `input_ids`.

    Loss masks become labels as in TRL: the token if every mask is 1.
    """
    longest = max(len(as_list(row["input_ids"])) for row in features)
    fills = {"input_ids": PAD, "attention_mask": 0, "position_ids": 0, "labels": N}
    columns: dict[str, list[Any]] = {name: [] for name in fills}
    for row in features:
        ids = as_list(row["input_ids"])
        plain = {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "position_ids": as_list(row.get("position_ids", list(range(len(ids))))),
            "labels": as_list(row["labels"]) if "labels" in row else labels_of_masks(row, ids),
        }
        for name, values in plain.items():
            columns[name].append(values + [fills[name]] * (longest - len(ids)))
    return {name: torch.tensor(rows) for name, rows in columns.items()}


def labels_of_masks(row: Row, ids: list[int]) -> list[int]:
    masks = [as_list(row[name]) for name in ("completion_mask", "assistant_masks") if name in row]
    return [token if all(bits) else N for token, *bits in zip(ids, *masks, strict=True)]


def as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray | Tensor) else list(values)


def loss_sum(model: Any, batch: dict[str, Any]) -> Tensor:
    """Summed over the labelled tokens, however many there are."""
    return model(**batch, use_cache=False, num_items_in_batch=1).loss


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def models(tiny_qwen3: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """The unmodified model and a prepared one with the same weights, both in float64."""
    ordinary, prepared = tiny_qwen3(num_hidden_layers=1), share_prefixes(tiny_qwen3(num_hidden_layers=1))
    with ExitStack() as stack:
        for model in (ordinary, prepared):
            stack.enter_context(float64_throughout(model))
        yield ordinary, prepared


@pytest.mark.parametrize("block", BLOCKS)
def test_the_loss_is_the_ordinary_one(models: tuple[Any, Any], block: int) -> None:
    counts: Counter[str] = Counter()
    for number in range(block * DRAWS, (block + 1) * DRAWS):
        features, options, kinds = draw_batch(np.random.default_rng([SEED, number]))
        try:
            shares = compare(features, options, models, with_gradients=number % 4 == 0)
        except Exception as error:
            error.add_note(f"draw {number} of seed {SEED}: {features}, {options}")
            raise
        counts.update([*kinds, *["shares"] * shares])
    assert counts["shares"] > DRAWS / 4, counts
    missing = [kind for kind in KINDS if not counts[kind]]
    assert not missing, f"no draw with {missing}: {counts}"


def compare(features: list[Row], options: dict[str, Any], models: tuple[Any, Any], with_gradients: bool) -> bool:
    """Whether the batch shares anything."""
    batch, plain = RadixCollator(**options)(features), ordinary_batch(features)
    ordinary, radix = loss_sum(models[0], plain), loss_sum(models[1], batch)
    assert (batch["labels"] != N).sum() == (plain["labels"][:, 1:] != N).sum(), "the divisor of the mean"
    assert abs(radix - ordinary) <= BAR * abs(ordinary), f"loss {radix:.17g}, ordinary {ordinary:.17g}"
    if with_gradients:
        pairs = list(zip(gradients(models[1], radix), gradients(models[0], ordinary), strict=True))
        scale = max(float(truth.norm()) for _, truth in pairs)
        for (name, _), (found, truth) in zip(models[0].named_parameters(), pairs, strict=True):
            # queries and keys of rows that see one key have no gradient but rounding
            assert (found - truth).norm() <= BAR * max(float(truth.norm()), 1e-3 * scale), name
    return batch["radix"].layout.inverse_indices.numel() > batch["radix"].layout.inverse_indices.unique().numel()


KINDS = [
    "labels",
    "completion_mask",
    "assistant_masks",
    "both",
    "labels and a mask",
    "everywhere",
    "positions: None",
    "positions: offset",
    "positions: jumps",
]
