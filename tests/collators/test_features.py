"""What a collator reads of a feature, what it refuses by name, and what it ignores; also under trainers."""

import re
from collections import UserDict
from datetime import date, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from radixtrain import RadixCollator, prepare_model
from radixtrain.collators.padded import PaddedCollator
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.unread import HARMLESS

N = -100
ROW = {"input_ids": [7, 8, 9], "labels": [N, 8, 9]}
COLLATORS = {
    "radix": RadixCollator,
    "step": StepCollator,
    "padded step": partial(StepCollator, dedup=False),
    "padded": PaddedCollator,
}


def as_python(batch):
    return {
        key: (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }


def refusal(features, collator=RadixCollator):
    with pytest.raises(ValueError) as error:
        collator()(features)
    return str(error.value)


# Where the loss is.


@pytest.mark.parametrize("name", COLLATORS)
@pytest.mark.parametrize("extra", [{}, {"labels": None, "completion_mask": None, "assistant_masks": None}])
def test_a_feature_that_does_not_say_where_the_loss_is(name, extra):
    collator = COLLATORS[name]
    features = [ROW, {"input_ids": [7, 8, 5], **extra}]
    assert refusal(features, collator) == (
        "feature 1 has neither labels nor completion_mask, assistant_masks or mask, so nothing says where the loss is. "
        "Hugging Face's Trainer drops the mask columns unless remove_unused_columns=False; "
        "RadixCollator(loss_on_all=True) trains every token"
    )
    if collator is RadixCollator:
        everywhere = collator(loss_on_all=True)(features)
        assert repr(everywhere) == repr(collator()([ROW, {"input_ids": [7, 8, 5], "labels": [7, 8, 5]}]))


def test_loss_on_all_leaves_labels_and_masks_in_force():
    features = [ROW, {"input_ids": [7, 8, 5], "completion_mask": [0, 0, 1]}]
    assert as_python(RadixCollator(loss_on_all=True)(features)) == as_python(RadixCollator()(features))


MASKS = ["completion_mask", "assistant_masks", "mask", "attention_mask"]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("values", [[1, 2, 1], [1, 1, -1]])
def test_a_mask_is_0_and_1(name, values):
    place = next(index for index, value in enumerate(values) if value not in (0, 1))
    message = refusal([ROW, {**ROW, "labels": None if name != "attention_mask" else ROW["labels"], name: values}])
    assert message == f"feature 1: {name} must be 0 or 1: {name}[{place}] = {values[place]}"


# Padding.


@pytest.mark.parametrize(
    "as_mask",
    [list, partial(np.array, dtype=bool), partial(torch.tensor, dtype=torch.uint8)],
    ids=["list", "booleans", "tensor"],
)
@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([1, 1, 1, 1, 1], slice(0, 5)),
        ([1, 1, 1, 0, 0], slice(0, 3)),
        ([0, 0, 1, 1, 1], slice(2, 5)),
        ([0, 1, 1, 1, 0], slice(1, 4)),
        ([0, 0, 1, 0, 0], slice(2, 3)),
    ],
    ids=["none", "right", "left", "both", "one token"],
)
@pytest.mark.parametrize("loss", ["labels", "completion_mask", "positions"])
def test_padding_is_cut_off(mask, kept, loss, as_mask):
    ids = [3, 4, 5, 6, 7]
    labels = [ids[place] if seen and place > kept.start else N for place, seen in enumerate(mask)]
    columns = {"input_ids": ids, "labels": labels}
    if loss == "completion_mask":
        columns = {"input_ids": ids, "completion_mask": [1] * 5}
    elif loss == "positions":
        columns |= {"position_ids": [-1 if not seen else 10 + place for place, seen in enumerate(mask)]}
    cut = {name: values[kept] for name, values in columns.items()}
    batch = RadixCollator()([ROW, {**columns, "attention_mask": as_mask(mask)}])
    left_padded = batch.pop("radix_left_padded", None)
    assert left_padded == (1 if kept.start and loss != "positions" else None)
    assert as_python(batch) == as_python(RadixCollator()([ROW, cut]))


def test_a_left_padded_batch_says_so_in_every_collator_that_shares():
    """Hugging Face counts the positions of such a row from its padding, which changes learned positions."""
    left = {"input_ids": [0, 7, 8], "attention_mask": [0, 1, 1], "labels": [N, N, 8]}
    for collator in (RadixCollator(), RadixCollator(merge_labels=True)):
        assert collator([ROW, left])["radix_left_padded"] == 1
        assert "radix_left_padded" not in collator([ROW, {**left, "position_ids": [0, 0, 1]}])
        assert "radix_left_padded" not in collator([ROW, ROW])
    (batch,) = StepCollator()([ROW, left]).micro_batches
    assert batch["radix_left_padded"] == 1
    padded = PaddedCollator()([ROW, left])
    assert padded["position_ids"].tolist() == [[0, 1, 2], [1, 2, 2]], "the ordinary baseline counts as Hugging Face"


HOLE = (
    "feature 1: attention_mask has a hole at token 2: it would be dropped, and the tokens after it would move up; only "
    "padding on the left or on the right may be hidden. Remove the hidden token from every column; or, if only the "
    "loss should skip it, set attention_mask to 1 and labels to -100 there"
)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 1, 0, 1, 1], HOLE),
        ([0, 1, 0, 0, 1], HOLE),
        ([0] * 5, "feature 1: attention_mask hides every token, so the sequence is empty"),
        ([1] * 4, "feature 1: attention_mask has 4 entries, input_ids has 5"),
        ([1.0] * 5, "feature 1: attention_mask must be a flat list of integers or booleans, got float64 (5,)"),
        ([[1] * 5], "feature 1: attention_mask must be a flat list of integers or booleans, got int64 (1, 5)"),
    ],
    ids=["hole", "hole after padding", "nothing left", "length", "floats", "shape"],
)
def test_masks_that_are_refused(mask, message):
    feature = {"input_ids": [3, 4, 5, 6, 7], "labels": [N] * 5, "attention_mask": mask}
    assert refusal([ROW, feature]) == message


@pytest.mark.parametrize(
    ("labels", "mask", "place"),
    [
        ([N, 4, 5, 6, 7], [1, 1, 1, 0, 0], 3),
        ([N, N, N, N, 7], [1, 1, 1, 0, 0], 4),
        ([N, 4, 5, 6, 7], [0, 0, 1, 1, 1], 1),
        ([N, N, 5, 6, 7], [0, 0, 1, 1, 1], 2),
    ],
    ids=["on the right", "far on the right", "on the left", "predicted from padding"],
)
def test_loss_on_padding_is_refused(labels, mask, place):
    """An ordinary model trains on it: it sees the labels, not the mask."""
    feature = {"input_ids": [3, 4, 5, 6, 7], "labels": labels, "attention_mask": mask}
    relation = "lies on" if not mask[place] else "is predicted from"
    assert refusal([ROW, feature]) == (
        f"feature 1: labels[{place}] = {labels[place]} {relation} a token that attention_mask hides, so an ordinary "
        f"model would train on padding; set it to -100"
    )


def test_the_label_of_the_first_token_is_never_predicted():
    """So it may be there, on padding too: an ordinary model does not read it either."""
    padded = {"input_ids": [0, 7, 8], "attention_mask": [0, 1, 1], "labels": [0, N, 8]}
    batch = RadixCollator()([padded, {"input_ids": [7, 8], "attention_mask": [1, 1], "labels": [7, 8]}])
    assert batch["shift_labels"].tolist() == [[8, 8, N]]


def test_errors_give_the_place_in_the_users_columns():
    feature = {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "position_ids": [0, 0, 0, -7]}
    assert refusal([ROW, {**feature, "labels": [N, N, N, 6]}]) == (
        "feature 1: position_ids must not be negative: position_ids[3] = -7"
    )
    feature = {"input_ids": [-1, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [N, N, N, 6]}
    assert refusal([ROW, feature]) == "feature 1: input_ids must not be negative: input_ids[0] = -1"


# Malformed columns.


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", *MASKS])
@pytest.mark.parametrize(
    ("values", "came"),
    [
        ([[1], [2, 3]], "a list that NumPy cannot read"),
        ([1, None, 2], "object (3,)"),
        ([1, 2, 2**70], "object (3,)"),
        (np.array([1, 2, 2**64 - 100], dtype=np.uint64), "uint64 (3,)"),
        ([[1, 2, 3]], "int64 (1, 3)"),
        (["1", "2", "3"], "<U1 (3,)"),
        ({"a": 1}, "object ()"),
        (torch.ones(3, device="meta"), "a Tensor that NumPy cannot read"),
        (torch.ones(3, dtype=torch.bfloat16), "a Tensor that NumPy cannot read"),
    ],
    ids=["ragged", "None", "too large", "uint64", "nested", "text", "dict", "meta", "bfloat16"],
)
def test_whatever_is_no_list_of_integers(name, values, came):
    feature = {"input_ids": [7, 8, 9], "labels": [N, 8, 9], name: values}
    if name in ("completion_mask", "assistant_masks", "mask"):
        del feature["labels"]
    kinds = "integers or booleans" if name in MASKS else "integers"
    assert refusal([ROW, feature]) == f"feature 1: {name} must be a flat list of {kinds}, got {came}"


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids"])
def test_booleans_are_no_numbers(name):
    feature = {**ROW, name: [True, False, True]}
    assert refusal([ROW, feature]) == f"feature 1: {name} must be a flat list of integers, got bool (3,)"


@pytest.mark.parametrize(
    ("seq_lengths", "message"),
    [
        ([2, 1], "feature 1 holds several packed sequences"),
        (np.array([2, 1]), "feature 1 holds several packed sequences"),
        ([2], "feature 1: seq_lengths is 2, input_ids has 3 entries"),
        (3, "feature 1: seq_lengths must be a flat list of integers, got int64 ()"),
    ],
    ids=["two", "an array", "another length", "a number"],
)
def test_seq_lengths(seq_lengths, message):
    assert refusal([ROW, {**ROW, "seq_lengths": seq_lengths}]).startswith(message)


def test_seq_lengths_of_one_sequence_are_harmless():
    for seq_lengths in ([3], np.array([3]), [], None):
        assert as_python(RadixCollator()([{**ROW, "seq_lengths": seq_lengths}])) == as_python(RadixCollator()([ROW]))


@pytest.mark.parametrize("feature", [[1, 2], "text", None])
def test_a_feature_is_a_mapping(feature):
    assert refusal([ROW, feature]) == f"feature 1 must be a mapping such as a dict, got {type(feature).__name__}"


def test_a_mapping_of_another_kind():
    assert as_python(RadixCollator()([UserDict(ROW)])) == as_python(RadixCollator()([ROW]))


# Names that nobody reads here.

TEXT_ONLY = "radixtrain trains on text only"
ANOTHER = "a model or loss that reads it would get another gradient"


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize(
    ("name", "value", "came", "reason"),
    [
        ("token_type_ids", [0, 0, 0], "list of 3", "return_token_type_ids=False"),
        ("token_type_ids", torch.zeros(3), "Tensor of shape (3,)", "return_token_type_ids=False"),
        ("pixel_values", np.zeros((3, 2, 2)), "ndarray of shape (3, 2, 2)", TEXT_ONLY),
        ("image", object(), "object", TEXT_ONLY),
        ("images", [object()], "list of 1", TEXT_ONLY),
        ("images", ["shelf.png"], "list of 1", TEXT_ONLY),
        ("image", {"bytes": b"", "path": "shelf.png"}, "dict", TEXT_ONLY),
        ("image_grid_thw", [[1, 2, 2]], "list of 1", TEXT_ONLY),
        ("input_features", np.zeros((3, 2)), "ndarray of shape (3, 2)", TEXT_ONLY),
        ("mm_token_type_ids", [0, 0, 1], "list of 3", TEXT_ONLY),
        ("inputs_embeds", np.zeros((3, 8)), "ndarray of shape (3, 8)", "by their ids"),
        ("lengths", 3, "int", ANOTHER),
        ("weight", 0.5, "float", ANOTHER),
        ("label", 1, "int", ANOTHER),
        ("score", np.float32(0.5), "float32", ANOTHER),
        ("is_valid", True, "bool", ANOTHER),
        ("rewards", [1.0, 0.5, 1.0], "list of 3", ANOTHER),
        ("scores", [None, 0.5], "list of 2", ANOTHER),
        ("nested", [[], [[1]]], "list of 2", ANOTHER),
        ("objects", np.array([1, "a"], dtype=object), "ndarray of shape (2,)", ANOTHER),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_an_unread_input_is_refused_by_name(collator, name, value, came, reason):
    message = refusal([ROW, {**ROW, name: value}], COLLATORS[collator])
    assert message.startswith(f"feature 1: {name} ({came}) ")
    assert reason in message
    assert "remove the column" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "hello"),
        ("text", np.str_("hello")),
        ("text", b"hello"),
        ("messages", [{"role": "user", "content": "hello"}]),
        ("metadata", {"id": 3, "score": 0.5}),
        ("tools", []),
        ("tools", None),
        ("tags", ["a", None]),
        ("tags", (None, "b")),
        ("tags", [[], ["a", "b"]]),
        ("images", []),
        ("image", None),
        ("images", [None]),
        ("images", np.array([], dtype=object)),
        ("words", np.array(["a", "b"])),
        ("words", np.array(["a", None], dtype=object)),
        ("nothing", [None, None]),
        ("made", date(2026, 1, 1)),
        ("made", datetime(2026, 1, 1)),
        ("made", np.datetime64("2026-01-01")),
        *((name, [1, 2, 3]) for name in sorted(HARMLESS)),
    ],
)
def test_text_and_bookkeeping_are_ignored(name, value):
    batch = RadixCollator()([ROW, {**ROW, name: value}])
    assert as_python(batch) == as_python(RadixCollator()([ROW, ROW]))


def test_no_causal_model_of_transformers_reads_a_harmless_name():
    found = {
        argument
        for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
        for argument in _arguments_of_causal_models(file.read_text(encoding="utf-8"))
    }
    assert {"input_ids", "attention_mask", "lengths", "pixel_values"} <= found, "the search finds what is there"
    assert not found & HARMLESS


def _arguments_of_causal_models(source):
    """Of `forward`, in the model classes of a file that has a language model's head; read as text, for speed."""
    if not re.search(r"^class \w*(ForCausalLM|LMHead|ForConditionalGeneration)", source, re.MULTILINE):
        return set()
    classes = [body for body in source.split("\nclass ") if re.match(r"\w*(Model\b|LMHead|For[A-Z])", body)]
    signatures = [found for body in classes for found in re.findall(r"def forward\((.*?)\n    \)", body, re.DOTALL)]
    return {name for signature in signatures for name in re.findall(r"^ {8}(\w+)", signature, re.MULTILINE)}


def test_the_danger_of_dropping_token_types_is_real():
    """GPT-2 adds the embedding of token 0 wherever token_type_ids is 0."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()
    batch = {"input_ids": torch.tensor([[7, 8, 9]]), "labels": torch.tensor([[N, 8, 9]])}
    gradients = []
    for extra in ({}, {"token_type_ids": torch.zeros(1, 3, dtype=torch.int64)}):
        model.zero_grad()
        model(**batch, **extra).loss.backward()
        gradients.append(model.lm_head.weight.grad.clone())
    assert (gradients[1] - gradients[0]).norm() > 0.1 * gradients[0].norm()


def test_all_that_a_tokenizer_returns_but_token_types():
    """And the index column of a pandas table."""
    asked = ("attention_mask", "length", "offsets_mapping", "overflowing_tokens", "special_tokens_mask")
    options = {f"return_{name}": True for name in asked}
    encoded = chat_tokenizer()(["20 21 22 23", "20 21"], truncation=True, max_length=3, **options)
    assert {"length", "offset_mapping", "overflow_to_sample_mapping", "special_tokens_mask"} <= set(encoded)
    table = Dataset.from_dict(dict(encoded)).to_pandas().iloc[[2, 0, 1]]
    features = [{**row, "labels": row["input_ids"]} for row in Dataset.from_pandas(table)]
    assert "__index_level_0__" in features[0]
    assert RadixCollator()(features)["input_ids"].tolist() == [[20, 21, 22, 23]]
    encoded = chat_tokenizer()(["20 21 22"], return_token_type_ids=True)
    assert "return_token_type_ids=False" in refusal([{name: values[0] for name, values in encoded.items()}])


# What the trainers leave of a data set.

PROMPT = [3, 1, 4, 1, 5, 9]
MASKED_ROWS = [
    {"input_ids": PROMPT + tail, "completion_mask": [0] * len(PROMPT) + [1] * len(tail), "text": "a row"}
    for tail in ([11, 12], [11, 13, 14], [20], [21, 22, 23])
]


def arguments(folder, **others):
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        **others,
    }


def logged(trainer):
    trainer.train()
    return np.array([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry])


def test_hugging_face_trainer_that_drops_the_mask(tiny_qwen3, tmp_path):
    """Its default. Without the refusal, the prompt would be trained too."""
    rows = Dataset.from_list(MASKED_ROWS)

    def train(model, data, **others):
        trainer = Trainer(
            model=prepare_model(model),
            args=TrainingArguments(**arguments(tmp_path, **others)),
            train_dataset=data,
            data_collator=RadixCollator(),
        )
        return logged(trainer)

    with pytest.raises(ValueError, match=r"feature 0 has neither labels nor .*remove_unused_columns=False"):
        train(tiny_qwen3(), rows)
    kept = train(tiny_qwen3(), rows, remove_unused_columns=False)
    labelled = rows.map(
        lambda row: {"labels": [t if on else N for t, on in zip(row["input_ids"], row["completion_mask"], strict=True)]}
    )
    assert np.array_equal(kept, train(tiny_qwen3(), labelled))
    everywhere = train(tiny_qwen3(), rows.map(lambda row: {"labels": row["input_ids"]}))
    assert abs(everywhere[0, 0] - kept[0, 0]) > 0.01, "the difference that it would have made"


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}4 {% generation %}{{ message.content }} "
    "<eos>{% endgeneration %} {% else %}3 {{ message.content }} <eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}4 {% endif %}"
)


def chat_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {str(n): n for n in range(3, 50)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


ASKED = [("20 21 22", "30"), ("20 21 23", "30 31"), ("20 21 22", "33 34"), ("24", "35")]
USER, ASSISTANT = ({"role": role} for role in ("user", "assistant"))
CHATS = [[{**USER, "content": question}, {**ASSISTANT, "content": answer}] for question, answer in ASKED]
TRL_ROWS = {
    "text": ([{"text": f"{question} {answer}"} for question, answer in ASKED], {}),
    "messages": ([{"messages": chat} for chat in CHATS], {}),
    "prompt, completion": ([{"prompt": q, "completion": f" {a}"} for q, a in ASKED], {}),
    "prompt, completion of messages": ([{"prompt": chat[:1], "completion": chat[1:]} for chat in CHATS], {}),
    "loss on the prompt too": (
        [{"prompt": chat[:1], "completion": chat[1:]} for chat in CHATS],
        {"completion_only_loss": False},
    ),
    "assistant_only_loss": ([{"messages": chat} for chat in CHATS], {"assistant_only_loss": True}),
    "columns kept": (
        [{"messages": chat, "source": "shop", "tools": None} for chat in CHATS],
        {"assistant_only_loss": True, "remove_unused_columns": False},
    ),
}


@pytest.mark.parametrize("kind", TRL_ROWS)
def test_trl_makes_labels_for_every_kind_of_row(tiny_qwen3, tmp_path, kind):
    """So the drop-in needs no flag there. Against TRL's own collator."""
    from trl import SFTConfig, SFTTrainer

    rows, options = TRL_ROWS[kind]

    def trainer_of(model, collator):
        return SFTTrainer(
            model=model,
            args=SFTConfig(**arguments(tmp_path, max_length=None, **options)),
            data_collator=collator,
            train_dataset=Dataset.from_list(rows),
            processing_class=chat_tokenizer(),
        )

    ordinary = trainer_of(tiny_qwen3(), None)
    (first, *_) = ordinary.train_dataset["labels"]
    assert any(label == N for label in first) == (kind not in ("text", "messages", "loss on the prompt too"))
    padded, radix = logged(ordinary), logged(trainer_of(prepare_model(tiny_qwen3()), RadixCollator()))
    assert padded.shape == radix.shape == (2, 2)
    assert np.abs(radix / padded - 1).max() <= 1e-6
