"""Rows with images through `RadixCollator` and `prepare_model` have the ordinary gradient, tower and projector too.

In float64; the oracle is the model as it came from Hugging Face, one row at a time. The mutations at the end are
mistakes of the batch, each of which the same check must see.
"""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_contents import as_python
from image_batches import IMAGE, KINDS, OF_SIZES, ROWS, of_family, squares
from image_rows import check_rows, features_of
from peft import LoraConfig, get_peft_model
from tiers import cases
from tiny_models import tiny_model
from transformers.models.llava.modeling_llava import LlavaModel

from radixtrain import RadixCollator, image_inputs_of, prepare_model, restore_model, verify_equivalence
from radixtrain.collators import images
from radixtrain.collators.images import BatchImages
from radixtrain.errors import UserError
from radixtrain.images import tower
from radixtrain.images.tower import Tower
from radixtrain.tree.radix_inputs import with_radix

pytestmark = pytest.mark.skipif(
    tower.FEATURES not in inspect.signature(LlavaModel.forward).parameters,
    reason="this transformers does not take the features of images ready made, so a radix batch refuses images",
)
SIZED = [name for name, kind in KINDS.items() if kind.has_sizes]


@pytest.mark.parametrize("name", cases(KINDS, ["LLaVA", "Qwen3-VL", "Idefics3", "Gemma 3"]))
def test_the_gradient_is_the_ordinary_one(name: str) -> None:
    batch = check_rows(KINDS[name], ROWS)
    assert batch["input_ids"].shape[1] < sum(len(feature["input_ids"]) for feature in features_of(KINDS[name], ROWS))
    assert sorted({image for _, shown in batch["radix"].image_pieces for image in shown}) == [0, 1], (
        "each distinct one once"
    )


@pytest.mark.parametrize("name", cases(SIZED, ["Mistral 3"]))
def test_images_of_different_sizes(name: str) -> None:
    """Of two beside each other in Mistral 3 it is not known where one ends: they are one piece."""
    check_rows(KINDS[name], OF_SIZES)


def test_equal_pixels_on_different_grids_are_different_images() -> None:
    batch = check_rows(KINDS["Qwen3-VL"], [[7, 8, "V", 9, 10], [7, 8, "W", 9, 10]])
    assert batch["input_ids"].shape[1] == 3 + 2 * (4 + 2)


@pytest.mark.parametrize("name", cases(["LLaVA", "Qwen3-VL", "Idefics3", "Gemma 3"], ["Qwen3-VL"]))
def test_verify_equivalence(name: str) -> None:
    """Its truth is computed from rows as they were given."""
    features = features_of(KINDS[name], ROWS)
    for feature in features:
        feature |= {"pixel_values": feature["pixel_values"].float()} if "pixel_values" in feature else {}
    report = verify_equivalence(KINDS[name].build().train(), features)
    assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)


def with_lora(model: Any) -> Any:
    names = ["q_proj", "v_proj", "qkv"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False)).train()


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def frozen_tower(model: Any) -> Any:
    model.model.visual.requires_grad_(False)
    return model


@pytest.mark.parametrize("change", cases([with_lora, checkpointing, frozen_tower], [with_lora]))
def test_other_models(change: Callable[[Any], Any]) -> None:
    check_rows(KINDS["Qwen3-VL"], ROWS, change)


@pytest.mark.parametrize("options", [{"pad_to_multiple_of": 16}, {"min_shared_tokens": 6}])
def test_options_of_the_collator(options: dict[str, int]) -> None:
    """With an image first, so that rows of padding are placeholders."""
    check_rows(KINDS["LLaVA"], [["A", 8, 9], ["A", 8, 7], ["B", 8, 9]], **options)


def test_rows_as_data_sets_store_them_and_padded_ones() -> None:
    """Lists, padding on the left, and a pickled collator give the same batch."""
    kind = KINDS["Qwen3-VL"]
    features = features_of(kind, ROWS)
    for feature in features:
        feature |= {"pixel_values": feature["pixel_values"].float()} if "pixel_values" in feature else {}
    collator = RadixCollator(images=image_inputs_of(kind.build()))
    stored = [{name: value.tolist() for name, value in feature.items()} for feature in features]
    for row in stored:
        row["attention_mask"] = [0, 0] + [1] * len(row["input_ids"])
        for name, fill in (("input_ids", 0), ("labels", -100), ("mm_token_type_ids", 0)):
            row |= {name: [fill, fill, *row[name]]} if name in row else {}
    expected, found = collator(features), pickle.loads(pickle.dumps(collator))(stored)
    assert found["radix"].is_left_padded and not expected["radix"].is_left_padded
    assert as_python(with_radix(found, is_left_padded=False)) == as_python(expected)


def test_the_batch_in_full() -> None:
    """Two rows share image A, placeholders of B are others; the features are A0 A1 A2 A3 B0 B1 B2 B3."""
    kind = KINDS["LLaVA"]
    features = features_of(kind, [[7, "A", 8], [7, "A", 9], [7, "B", 8]])
    batch = RadixCollator(images=image_inputs_of(kind.build()))(features)
    assert batch["input_ids"].tolist() == [[7, *[IMAGE] * 4, 8, 9, *[IMAGE] * 4, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 5, 1, 2, 3, 4, 5]]
    assert batch["radix"].image_rows.tolist() == list(range(8))
    assert batch["radix"].image_pieces == ((4, (0,)), (4, (1,)))
    assert torch.equal(batch["pixel_values"], torch.cat([features[0]["pixel_values"], features[2]["pixel_values"]]))
    text = RadixCollator(images=image_inputs_of(kind.build()))(features_of(kind, [[7, 8, 9]]))
    assert text.keys() == batch.keys() - {"pixel_values"} and text["radix"].image_rows is None


def test_a_shared_label_after_different_images_is_trained_twice() -> None:
    kind = KINDS["LLaVA"]
    collator = RadixCollator(images=image_inputs_of(kind.build()), shared_targets="once")
    assert (collator(features_of(kind, [["A", 8, 9], ["B", 8, 9]]))["labels"] != -100).sum() == 4
    assert (collator(features_of(kind, [["A", 8, 9], ["A", 8, 9]]))["labels"] != -100).sum() == 2


def test_an_image_in_both_directions_is_shared_only_if_all_its_positions_are() -> None:
    kind = KINDS["Gemma 3"]
    features = features_of(kind, [[7, "A", 8], [7, "A", 8]])
    for feature in features:
        feature["position_ids"] = torch.arange(18)
    features[1]["position_ids"][4:] += 3
    batch = RadixCollator(images=image_inputs_of(kind.build()))(features)
    assert batch["input_ids"].tolist() == [[7, *[IMAGE] * 16, 8, *[IMAGE] * 16, 8]]
    assert batch["radix"].layout.blocks.lengths == (15, 15)


# What is refused.


def changed(name: str, rows: list[Any], **entries: Any) -> list[dict[str, Any]]:
    """Features of a family, of which the first has other entries; one that is None is taken out."""
    features = features_of(KINDS[name], rows)
    features[0] |= {key: value(features[0]) if callable(value) else value for key, value in entries.items()}
    features[0] = {key: value for key, value in features[0].items() if value is not None}
    return features


ROW = [[7, "A", 8, 9], [7, "A", 8]]
REFUSED = [
    ("LLaVA", {"pixel_values": None}, "feature 0 has 4 placeholders of images (token 5) in input_ids and no pixel_val"),
    ("LLaVA", {"input_ids": lambda f: f["input_ids"].masked_fill(f["input_ids"] == IMAGE, 7)}, "has 0 placeholders"),
    ("LLaVA", {"pixel_values": lambda f: f["pixel_values"].float()}, "must have one dtype and as many axes"),
    ("LLaVA", {"pixel_values": lambda f: f["pixel_values"][..., 2:]}, "nothing says which pixels are filled in"),
    ("LLaVA", {"mm_token_type_ids": [0] * 7}, "mm_token_type_ids marks other tokens than the placeholders"),
    ("LLaVA", {"attention_mask": [0, 0, 1, 1, 1, 1, 1], "labels": [-100] * 7}, "hides placeholders of images"),
    ("LLaVA", {"image_grid_thw": [[1, 2, 2]]}, "image_grid_thw (list of 1) is not read"),
    ("LLaVA", {"token_type_ids": [0] * 7}, "token_type_ids (list of 7) is not read"),
    ("LLaVA", {"pixel_values": [[1.0], [1.0, 2.0]]}, "pixel_values must be a tensor, an array or nested lists"),
    ("Qwen3-VL", {"image_grid_thw": torch.tensor([[1, 2, 4]])}, "does not name every row of pixel_values"),
    ("Qwen3-VL", {"image_grid_thw": None}, "the images of a batch came with"),
    ("Qwen3-VL", {"position_ids": list(range(8))}, "remove position_ids, which this model counts along several axes"),
    ("Qwen3-VL", {"pixel_values_videos": torch.ones(4, 3)}, "pixel_values_videos (Tensor of shape (4, 3)) is not read"),
]


@pytest.mark.parametrize(("name", "entries", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_rows_that_are_refused(name: str, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        RadixCollator(images=image_inputs_of(KINDS[name].build()))(changed(name, ROW, **entries))
    assert message in str(raised.value)


def test_without_the_option() -> None:
    with pytest.raises(
        ValueError, match=r"feature 0: pixel_values .* RadixCollator\(images=image_inputs_of\(model\)\)"
    ):
        RadixCollator()(features_of(KINDS["LLaVA"], ROW))


def test_a_model_that_reads_more_than_one_row_for_each_placeholder_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"takes no images of .*reads more than one row.*; use the model's own collator"
    ):
        image_inputs_of(of_family("Ovis 2", squares(28, 4)).build())


def test_a_text_model_is_refused() -> None:
    with pytest.raises(UserError, match="takes no images of Qwen3ForCausalLM"):
        image_inputs_of(tiny_model("Qwen3ForCausalLM"))


def batch_and_model(name: str = "LLaVA") -> tuple[Any, dict[str, Any]]:
    features = changed(name, ROW)
    for feature in features:
        feature["pixel_values"] = feature["pixel_values"].float()
    model = KINDS[name].build().train()
    return prepare_model(model), RadixCollator(images=image_inputs_of(model))(features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model, batch: batch.pop("pixel_values"), "the batch lost its pixel_values"),
        (
            lambda model, batch: batch.update(with_radix(batch, image_pieces=((3, (0,)),))),
            "a row has 3 placeholders for images of 4",
        ),
        (lambda model, batch: batch["pixel_values"].requires_grad_(), "images that require a gradient"),
        (lambda model, batch: model.model.vision_tower.append_dropout(), "whose tower draws at random"),
    ],
    ids=["lost", "other lengths", "gradient", "dropout"],
)
def test_batches_that_are_refused(
    change: Callable[[Any, Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = batch_and_model()
    tower_class = type(model.model.vision_tower)
    add = lambda self: setattr(self, "added", torch.nn.Dropout(0.1))  # noqa: E731
    monkeypatch.setattr(tower_class, "append_dropout", add, raising=False)
    change(model, batch)
    with pytest.raises(UserError, match=message):
        model(**batch)
    restore_model(model)


def test_images_that_see_each_other_beyond_a_window() -> None:
    kind = KINDS["Gemma 4 unified"]
    features = features_of(kind, [["A", "A", "A", 8]])  # one of 48 tokens to the model
    features[0]["pixel_values"] = features[0]["pixel_values"].float()
    model = kind.build().train()
    batch = RadixCollator(images=image_inputs_of(model))(features)
    with pytest.raises(UserError, match="an image is longer than a window, beyond which its tokens see each other"):
        prepare_model(model)(**batch)


def test_a_batch_that_ranks_would_split() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, batch = batch_and_model()
        prepare_model(model, sp_group=dist.group.WORLD)
        with pytest.raises(UserError, match="an sp_group, which takes text only"):
            model(**batch)
    finally:
        dist.destroy_process_group()


# Mistakes.


def without_images_in_codes(real: Any, *args: Any) -> Any:
    """Tokens are compared without the images behind them."""
    found = real(*args)
    found.tokens.codes[found.tokens.is_image] = 10_000
    return found


def next_feature(real: Any, *args: Any) -> Any:
    found = real(*args)
    found.tokens.rows = np.roll(found.tokens.rows, 1)
    return found


def without_axes(real: Any, *args: Any) -> Any:
    """Positions are counted along each row."""
    found = real(*args)
    found.tokens.positions = None
    return found


def one_axis(real: Any, *args: Any) -> Any:
    found = real(*args)
    assert found.tokens.positions is not None
    found.tokens.positions = found.tokens.positions[:1].repeat(3, 0)
    return found


def other_image(real: Any, *args: Any) -> Any:
    found = real(*args)
    found.pieces = found.pieces[::-1]
    return found


def all_one(real: Any, parts: Any) -> Any:
    return np.zeros(len(parts), dtype=np.int64), [0]


def detached(real: Any, self: Tower, index: Any) -> Any:
    output = real(self, index)
    output.pooler_output = tuple(each.detach() for each in output.pooler_output)
    return output


def deepstack_of_another_place(real: Any, self: Tower, index: Any) -> Any:
    output = real(self, index)
    output.deepstack_features = [(each[0].flip(0),) for each in output.deepstack_features]
    return output


def of_one_copy(real: Any, self: Tower, index: Any) -> Any:
    """The gradient of the tower is that of the first placeholder of each row of the features only."""
    output = real(self, index)
    is_first = torch.zeros(len(index), 1, dtype=torch.bool)
    is_first[np.unique(index.numpy(), return_index=True)[1]] = True
    output.pooler_output = tuple(torch.where(is_first, each, each.detach()) for each in output.pooler_output)
    return output


MISTAKES: list[tuple[Any, str, Any]] = [
    *((BatchImages, "read", change) for change in (without_images_in_codes, next_feature, without_axes, one_axis)),
    (BatchImages, "read", other_image),
    (images, "distinct_images", all_one),
    *((Tower, "features_at", change) for change in (detached, deepstack_of_another_place, of_one_copy)),
]


@pytest.mark.parametrize(("owner", "name", "mistake"), MISTAKES, ids=[each.__name__ for *_, each in MISTAKES])
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mistake: Any) -> None:
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: mistake(real, *args))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check_rows(KINDS["Qwen3-VL"], ROWS)
