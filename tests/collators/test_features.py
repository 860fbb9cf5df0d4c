"""What a collator reads of a feature, what it refuses by name, and what it ignores."""

import re
from collections import UserDict
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

from radixtrain import RadixCollator
from radixtrain.collators.features import HARMLESS, token_rows
from radixtrain.collators.steps import PaddedCollator, StepCollator
from tests.collators.predictions import entries_of
from tests.support.batches import as_python
from tests.support.trainers import tokenizer

N = -100
MASKS = [1, 1, 0], [0, 1, 1]
OF_INTEGERS = ("input_ids", "labels", "position_ids")
BESIDE_LABELS = ("position_ids", "attention_mask", "loss_weights")
IDS = {"input_ids": [7, 8, 9]}
ROW = {**IDS, "labels": [N, 8, 9]}
COLLATORS = (RadixCollator, partial(RadixCollator, merge_labels=True), StepCollator, PaddedCollator)
COLLATORS += (partial(StepCollator, dedup=False),)


def refusal(feature: Any) -> str:
    """Of a feature beside a good one, the same by every collator."""
    said = set()
    for collator in COLLATORS:
        with pytest.raises(ValueError) as error:
            collator()([ROW, feature])
        assert type(error.value) is ValueError, "a worker of a DataLoader can hand it over"
        said.add(str(error.value))
    [message] = said
    return message


NO_LOSS = (
    "it has neither labels nor completion_mask, assistant_masks or mask, so nothing says where the loss is. "
    "Hugging Face's Trainer drops the mask columns unless remove_unused_columns=False; "
    "RadixCollator(loss_on_all=True) trains every token"
)
PADDED = (
    "is 0, and a row has no padding here: tokenize without padding, or remove the hidden tokens from every column; if "
    "only the loss should skip them, set attention_mask to 1 and labels to -100 there"
)
PACKED = (
    "it holds packed sequences (its position_ids restart, or it has seq_lengths); turn packing off: the collator "
    "packs, and shares what they have in common"
)
REFUSED: list[tuple[Any, str]] = [
    ([1, 2], "expected a mapping such as a dict, got list"),
    # where the loss is
    (IDS, NO_LOSS),
    ({**ROW, "labels": None, "completion_mask": None, "assistant_masks": None}, NO_LOSS),
    # lengths, shapes and values
    ({"input_ids": []}, "input_ids is empty"),
    ({"labels": [1], "text": "a"}, "it has no input_ids, only ['labels', 'text']"),
    *(({**IDS, name: [1]}, f"{name} has 1 entries, input_ids has 3") for name in ("labels", "completion_mask")),
    *(({**ROW, name: [1]}, f"{name} has 1 entries, input_ids has 3") for name in BESIDE_LABELS),
    *(({**ROW, name: [True] * 3}, f"{name} must be a flat list of integers, got bool (3,)") for name in OF_INTEGERS),
    *(({**ROW, name: [1, 2, -1]}, f"{name} must not be negative: {name}[2] = -1") for name in OF_INTEGERS),
    *(({**IDS, name: [1, 2, 1]}, f"{name} must be 0 or 1: {name}[1] = 2") for name in ("mask", "attention_mask")),
    (
        {**ROW, "labels": np.array([8, 2**64 - 100, 9], np.uint64)},
        f"labels must be below 2^63: labels[1] = {2**64 - 100}",
    ),
    # padding, and rows that another packer filled
    *(({**ROW, "attention_mask": mask}, f"attention_mask[{mask.index(0)}] {PADDED}") for mask in MASKS),
    *(({**ROW, "seq_lengths": lengths}, PACKED) for lengths in ([2, 1], [2])),
    ({**ROW, "position_ids": [0, 1, 0]}, PACKED),
    # floats
    ({**ROW, "weights": [[1.0, 2.0, 3.0]]}, "weights must be a flat list of numbers, got float64 (1, 3)"),
    ({**ROW, "loss_weights": [True] * 3}, "loss_weights must be a flat list of numbers, got bool (3,)"),
    ({**ROW, "loss_weights": [None, -1.0, -1.0]}, "loss_weights must be a flat list of numbers, got object (3,)"),
    ({**ROW, "weights": [0, 1e39, 1]}, "weights must be finite on labelled tokens: weights[1] = 1e+39"),
    (
        {**ROW, "weights": [1, 1, 1], "loss_weights": [1, 1, 1]},
        "loss_weights and weights are two names of one column; remove one",
    ),
]
NO_INTEGERS = [
    ([[1], [2, 3]], "a list that NumPy cannot read"),
    ([1, None, 2], "object (3,)"),
    ([1, 2, 2**70], "object (3,)"),
    ([[1, 2, 3]], "int64 (1, 3)"),
    ([1.0, 1.0, 1.0], "float64 (3,)"),
    (["1", "2", "3"], "<U1 (3,)"),
    ({"a": 1}, "object ()"),
    (torch.ones(3, device="meta"), "a Tensor that NumPy cannot read"),
    (torch.ones(3, dtype=torch.bfloat16), "a Tensor that NumPy cannot read"),
]
UNREAD = [
    ("token_type_ids", [0, 0, 0]),
    ("pixel_values", np.zeros((3, 2, 2))),
    ("image", object()),
    ("images", ["shelf.png"]),
    ("image", torch.tensor(3)),
    ("score", np.array(0.5)),
    ("inputs_embeds", torch.zeros(3, 8)),
    ("weight", 0.5),
    ("is_valid", True),
    ("scores", [None, 0.5]),
    ("nested", [[], [[1]]]),
    ("objects", np.array([1, "a"], dtype=object)),
]
IGNORED = [
    *(("text", text) for text in ("hello", np.str_("hello"), b"hello")),
    ("messages", [{"role": "user", "content": "hello"}]),
    ("metadata", {"id": 3, "score": 0.5}),
    *(("tools", nothing) for nothing in ([], None)),
    *(("tags", tags) for tags in (["a", None], (None, "b"), [[], ["a", "b"]])),
    *(("images", nothing) for nothing in ([], None, [None], np.array([], dtype=object))),
    *(("words", words) for words in (np.array(["a", "b"]), np.array(["a", None], dtype=object), [None, None])),
    *(("made", made) for made in (date(2026, 1, 1), datetime(2026, 1, 1), np.datetime64("2026-01-01"))),
    *(("seq_lengths", one) for one in (None, [3], torch.tensor([3]))),
    ("attention_mask", torch.ones(3, dtype=torch.uint8)),
    *((name, [1, 2, 3]) for name in sorted(HARMLESS)),
]


@pytest.mark.parametrize(("feature", "message"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_is_refused(feature: Any, message: str) -> None:
    assert refusal(feature) == f"feature 1: {message}"


def test_whatever_is_no_list_of_integers_is_refused() -> None:
    masks = ["completion_mask", "assistant_masks", "mask", "attention_mask"]
    for name in [*OF_INTEGERS, *masks]:
        kinds = "integers or booleans" if name in masks else "integers"
        for values, came in NO_INTEGERS:
            feature = {**(IDS if name in masks[:3] else ROW), name: values}
            assert refusal(feature) == f"feature 1: {name} must be a flat list of {kinds}, got {came}"


def test_an_unread_input_is_refused_by_name() -> None:
    for name, value in UNREAD:
        message = refusal({**ROW, name: value})
        assert message.startswith(f"feature 1: {name} ({type(value).__name__}) is not read by a RadixCollator"), message
        assert "remove the column, or use share_prefixes(model)" in message


def test_text_and_bookkeeping_are_ignored() -> None:
    expected = as_python(RadixCollator()([ROW, ROW]))
    for name, value in IGNORED:
        assert as_python(RadixCollator()([ROW, {**ROW, name: value}])) == expected, (name, value)
    assert as_python(RadixCollator()([UserDict(ROW), ROW])) == expected, "a mapping of another kind"


@pytest.mark.parametrize("collator", COLLATORS)
def test_an_empty_list_is_refused(collator: Any) -> None:
    with pytest.raises(ValueError, match=r"^a collator needs at least one feature, got an empty list$"):
        collator()([])


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        pytest.param({}, [8, 9], id="nothing, and loss_on_all: every token"),
        pytest.param({"labels": None, "completion_mask": None}, [8, 9], id="None is nothing"),
        pytest.param({"labels": [N, N, 3]}, [3], id="labels"),
        pytest.param({"completion_mask": [0, 1, 1], "assistant_masks": [0, 1, 0]}, [8], id="the product of both"),
        pytest.param({"completion_mask": [False, False, True]}, [9], id="booleans"),
        pytest.param({"labels": [N, 8, N], "completion_mask": [0, 0, 1]}, [8], id="labels win"),
    ],
)
def test_what_bears_loss(extra: dict[str, Any], expected: list[int]) -> None:
    """Three rows, and so a second ignored prediction after two labels."""
    batch = RadixCollator(loss_on_all=True)([{"input_ids": [7, 8, 9], **extra}])
    ignored = [N] * (2 if len(expected) == 2 else 1)
    assert batch["shift_labels"].tolist() == [[*expected, *ignored]]
    assert batch["labels"].tolist() == [[N, *expected, *ignored[1:]]]
    assert batch["labels"].data_ptr() != batch["shift_labels"].data_ptr(), "a model may change one in place"


# Names that models read.


def test_no_causal_model_of_transformers_reads_a_harmless_name() -> None:
    found = {
        argument
        for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
        for argument in _arguments_of_causal_models(file.read_text(encoding="utf-8"))
    }
    assert {"input_ids", "attention_mask", "lengths", "pixel_values"} <= found, "the search finds what is there"
    assert not found & HARMLESS


def _arguments_of_causal_models(source: str) -> set[str]:
    """Of `forward`, in the model classes of a file that has a language model's head; read as text, for speed."""
    if not re.search(r"^class \w*(ForCausalLM|LMHead|ForConditionalGeneration)", source, re.MULTILINE):
        return set()
    classes = [body for body in source.split("\nclass ") if re.match(r"\w*(Model\b|LMHead|For[A-Z])", body)]
    signatures = [found for body in classes for found in re.findall(r"def forward\((.*?)\n    \)", body, re.DOTALL)]
    return {name for signature in signatures for name in re.findall(r"^ {8}(\w+)", signature, re.MULTILINE)}


# What tokenizers leave of a data set.


def test_all_that_a_tokenizer_returns_but_token_types() -> None:
    """And the index column of a pandas table."""
    asked = ("attention_mask", "length", "offsets_mapping", "overflowing_tokens", "special_tokens_mask")
    options = {f"return_{name}": True for name in asked}
    encoded = tokenizer()(["20 21 22 23", "20 21"], truncation=True, max_length=3, **options)
    assert {"length", "offset_mapping", "overflow_to_sample_mapping", "special_tokens_mask"} <= set(encoded)
    table = Dataset.from_dict(dict(encoded)).to_pandas().iloc[[2, 0, 1]]
    features = [{**row, "labels": row["input_ids"]} for row in Dataset.from_pandas(table)]
    assert "__index_level_0__" in features[0]
    assert RadixCollator()(features)["input_ids"].flatten()[:4].tolist() == [20, 21, 22, 23]
    encoded = tokenizer()(["20 21 22"], return_token_type_ids=True)
    assert "token_type_ids (list)" in refusal({name: values[0] for name, values in encoded.items()})


FEATURES = [
    {"input_ids": [7, 8, 9], "labels": [7, 8, 9], "loss_weights": [9.0, -2.0, 0.5]},
    {"input_ids": [7, 8, 5], "mask": [0, 1, 1], "weights": [9, 2, 3]},
    {"input_ids": [7, 8], "labels": [N, 8]},
]
MERGED = RadixCollator(merge_labels=True)


def test_three_sequences():
    """The two copies of 8 after 7 cancel, and both stay; a feature without weights weighs 1."""
    batch = MERGED(FEATURES)
    assert batch["input_ids"].tolist() == [[7, 8, 5, 9]]
    assert entries_of(batch) == [(0, 8, -2.0, 1), (0, 8, 2.0, 4), (0, 8, 1.0, 7), (1, 9, 0.5, 2), (1, 5, 3.0, 5)]
    assert batch["radix"].predictor_indices.tolist() == [0, 1], "one hidden row for all predictions of a predictor"
    assert batch["radix"].loss_weights.dtype == torch.float32
    assert "labels" not in batch


def test_what_is_given_without_a_label_is_not_read():
    [array] = token_rows([{"input_ids": [7, 8, 9], "labels": [N, 8, N], "weights": [float("nan"), -1.0, float("inf")]}])
    assert array.loss_weights.tolist() == [0.0, -1.0, 0.0]


FORMS = [list, tuple, np.array, np.int8, np.int32, torch.tensor]
OF_BITS = [partial(np.array, dtype=bool), lambda bits: [bit == 1 for bit in bits]]
COLUMNS = {
    "completion_mask": [0, 1, 1],
    "assistant_masks": [1, 1, 0],
    "attention_mask": [1, 1, 1],
    "input_ids": [7, 8, 9],
    "position_ids": [0, 2, 3],
    "loss_weights": [0, -2, 1],
}
FORMED = [(form, name) for form in FORMS for name in (*COLUMNS, "labels")]
FORMED += [(form, name) for form in OF_BITS for name in COLUMNS if "mask" in name]
FORMED += [(partial(np.array, dtype=np.float16), "loss_weights")]


@pytest.mark.parametrize(("form", "name"), FORMED, ids=range(len(FORMED)))
def test_lists_arrays_and_tensors(form, name):
    """Numbers of a column in any form, which stay as they are; bits as booleans too, weights as any fractions."""
    row = {**IDS, "labels": [N, 8, 9]} if name == "labels" else COLUMNS
    given = form(row[name])
    assert as_python(MERGED([{**row, name: given}])) == as_python(MERGED([row]))
    assert list(given) == list(form(row[name]))


@pytest.mark.parametrize("collator", [RadixCollator(), StepCollator(max_tokens=3, merge_labels=False)])
@pytest.mark.parametrize("name", ["loss_weights", "weights"])
def test_a_models_own_loss_would_ignore_them(name, collator):
    features = [{"input_ids": [5, 6], "labels": [N, 6], name: None}]
    features += [{"input_ids": [7, 8], "labels": [N, 8], name: [1.0, 1.0]}]
    with pytest.raises(ValueError, match=r"^feature 1 has loss_weights, which the loss of a Hugging Face model ig"):
        collator(features)
