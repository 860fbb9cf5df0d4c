"""Rows with images have the ordinary gradient by `share_prefixes` and by `RadixCollator`, tower and projector too.

In float64; the oracle is the model as it came from Hugging Face. The mutations at the end are mistakes of the plan and
of the tower, each of which the same check must see.
"""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_contents import as_python
from image_batches import IMAGE, KINDS, OF_SIZES, ROWS, Row, batch_of, of_family, squares
from image_rows import DOORS, check_rows, features_of
from peft import LoraConfig, get_peft_model
from tiers import cases
from tiny_models import tiny_model
from transformers.models.llava.modeling_llava import LlavaModel

from radixtrain import RadixCollator, image_inputs_of, prepare_model, verify_equivalence
from radixtrain.collators import images
from radixtrain.collators.images import BatchImages
from radixtrain.errors import UserError
from radixtrain.hf import windows
from radixtrain.images import tokens, tower
from radixtrain.images.tokens import ImageTokens
from radixtrain.images.tower import Tower
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.radix_inputs import with_radix

pytestmark = pytest.mark.skipif(
    tower.FEATURES not in inspect.signature(LlavaModel.forward).parameters,
    reason="this transformers does not take the features of images ready made, so a radix batch refuses images",
)
SIZED = [name for name, kind in KINDS.items() if kind.has_sizes]
EITHER = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


@EITHER
@pytest.mark.parametrize("name", cases(KINDS, ["LLaVA", "Qwen3-VL", "Idefics3", "Gemma 3"]))
def test_the_gradient_is_the_ordinary_one(name: str, door: Callable[..., int]) -> None:
    assert door(KINDS[name]) < batch_of(KINDS[name], ROWS)[1].sum()


@EITHER
@pytest.mark.parametrize("name", cases(SIZED, ["Qwen3-VL", "Mistral 3"]))
def test_images_of_different_sizes(name: str, door: Callable[..., int]) -> None:
    """Of two beside each other in Mistral 3 a collator does not know where one ends: they are one piece."""
    door(KINDS[name], OF_SIZES)


BOTH_WAYS = {"Gemma 3": 16, "Gemma 4, in both directions": 4}  # placeholders of an image, longer than the window
NEIGHBOURS: list[Row] = [["A"], ["A", 8], [7, "B"], [7, "A"], [7, "A", "B"], [7, "A", "B", 9], [7, "A", 8]]
GRIDS = ["Qwen3-VL", "Qwen2.5-VL", "GLM-4V"]
SHARED = {  # tokens after images are shared if these are equal: by their bytes, grids included, and as a whole
    "other images": ("LLaVA", [[7, 8, "A", 9, 10], [7, 8, "B", 9, 10]], 2 + 2 * (4 + 2)),
    "one image": ("LLaVA", [[7, 8, "A", 9, 10], [7, 8, "A", 9, 11]], 2 + 4 + 1 + 2),
    **{f"grids, {name}": (name, [[7, 8, "V", 9, 10], [7, 8, "W", 9, 10]], 3 + 2 * (4 + 2)) for name in GRIDS},
    **{name: (name, NEIGHBOURS, (n + 1) + 1 + n + (n + 1) + (2 * n + 1)) for name, n in BOTH_WAYS.items()},
}


@EITHER
@pytest.mark.parametrize(("name", "rows", "num_unique"), SHARED.values(), ids=SHARED)
def test_what_is_shared(name: str, rows: list[Row], num_unique: int, door: Callable[..., int]) -> None:
    assert door(KINDS[name], rows) == num_unique


@EITHER
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_images_in_both_directions_by_other_strategies_and_without_types(name: str, door: Callable[..., int]) -> None:
    for attention in ("path", "reference"):
        door(KINDS[name], NEIGHBOURS, attention=attention)
    image = BOTH_WAYS[name]
    assert door(replace(KINDS[name], types=None), NEIGHBOURS) == (image + 1) + 1 + image + 2 * (image + 1)


@pytest.mark.parametrize("name", cases(["LLaVA", "Qwen3-VL", "Idefics3", "Gemma 3"], ["Qwen3-VL"]))
def test_verify_equivalence(name: str) -> None:
    """Its truth is computed from rows as they were given."""
    features = [in_float32(feature) for feature in features_of(KINDS[name], ROWS)]
    report = verify_equivalence(KINDS[name].build().train(), features)
    assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)


def in_float32(feature: dict[str, Any]) -> dict[str, Any]:
    """As a processor returns it."""
    return {name: x.float() if name == "pixel_values" else x for name, x in feature.items()}


def with_lora(model: Any) -> Any:
    names = ["q_proj", "v_proj", "qkv"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False)).train()


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def frozen_tower(model: Any) -> Any:
    """Trained is its last layer only, so that a gradient still has to reach it."""
    model.model.visual.requires_grad_(False)
    model.model.visual.merger.requires_grad_(True)
    return model


OTHERS = [("Qwen3-VL", with_lora), ("Qwen3-VL", checkpointing), ("Qwen3-VL", frozen_tower)]
MORE = [(name, change) for name in ("LLaVA", "Gemma 3") for change in (with_lora, checkpointing)]


@EITHER
@pytest.mark.parametrize(("name", "change"), cases([*OTHERS, *MORE], OTHERS))
def test_lora_recomputed_activations_and_a_frozen_tower(
    name: str, change: Callable[[Any], Any], door: Callable[..., int]
) -> None:
    door(KINDS[name], change=change)


# The batch of a collator.


@pytest.mark.parametrize("options", [{"pad_to_multiple_of": 16}, {"min_shared_tokens": 6}])
@pytest.mark.parametrize("name", ["LLaVA", "Gemma 3"])
def test_options_of_the_collator(name: str, options: dict[str, int]) -> None:
    """With an image first, so that rows of padding are placeholders."""
    check_rows(KINDS[name], [["A", 8, 9], ["A", 8, 7], ["B", 8, 9]], collated=options)


def test_rows_as_data_sets_store_them_and_padded_ones() -> None:
    """Lists, padding on the left, and a pickled collator give the same batch."""
    kind = KINDS["Qwen3-VL"]
    features = [in_float32(feature) for feature in features_of(kind, ROWS)]
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
    assert batch["input_ids"].flatten()[:12].tolist() == [7, *[IMAGE] * 4, 8, 9, *[IMAGE] * 4, 8]
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
    assert batch["input_ids"].flatten()[:35].tolist() == [7, *[IMAGE] * 16, 8, *[IMAGE] * 16, 8]
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
    model, features = KINDS[name].build().train(), [in_float32(each) for each in features_of(KINDS[name], ROW)]
    return prepare_model(model), RadixCollator(images=image_inputs_of(model))(features)


BATCHES = {
    "lost": (lambda model, batch: batch.pop("pixel_values"), "the batch lost its pixel_values"),
    "other lengths": (
        lambda model, batch: batch.update(with_radix(batch, image_pieces=((3, (0,)),))),
        "a row has 3 placeholders for images of 4",
    ),
    "gradient": (lambda model, batch: batch["pixel_values"].requires_grad_(), "images that require a gradient"),
    "dropout": (
        lambda model, batch: model.model.vision_tower.add_module("added", torch.nn.Dropout(0.1)),
        "whose tower draws at random",
    ),
}


@pytest.mark.parametrize(("change", "message"), BATCHES.values(), ids=BATCHES)
def test_batches_that_are_refused(change: Callable[[Any, Any], Any], message: str) -> None:
    model, batch = batch_and_model()
    change(model, batch)
    with pytest.raises(UserError, match=message):
        model(**batch)


def test_images_that_see_each_other_beyond_a_window() -> None:
    kind = KINDS["Gemma 4 unified"]
    features = features_of(kind, [["A", "A", "A", 8]])  # one of 48 tokens to the model
    model = kind.build().train()
    batch = RadixCollator(images=image_inputs_of(model))([in_float32(features[0])])
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


# Mistakes. Each changes what the real function returns.


def in_pooled(change: Callable[..., Any]) -> Callable[..., Any]:
    def mistake(real: Any, self: Tower, index: Any) -> Any:
        output = real(self, index)
        output.pooler_output = tuple(change(each, index) for each in output.pooler_output)
        return output

    return mistake


def in_deepstack(change: Callable[..., Any]) -> Callable[..., Any]:
    def mistake(real: Any, self: Tower, index: Any) -> Any:
        output = real(self, index)
        output.deepstack_features = change(output.deepstack_features)
        return output

    return mistake


def of_one_copy(features: Any, index: Any) -> Any:
    is_first = torch.zeros(len(index), 1, dtype=torch.bool)
    is_first[np.unique(index.numpy(), return_index=True)[1]] = True
    return torch.where(is_first, features, features.detach())


def without_pixels(real: Any, parts: Any) -> Any:
    return real([{name: torch.zeros_like(part) for name, part in image.items()} for image in parts])


def other_image(real: Any, *args: Any) -> Any:
    found = real(*args)
    found.pieces = found.pieces[::-1]
    return found


PIECES, NEXT, LAYERS = "images of other pieces", "images of neighbouring rows are one", "in every layer"
AXES = ImageTokens, "axes_at"
OF_IMAGES: dict[str, tuple[Any, ...]] = {
    "every image is the first": (tower, "distinct_images", lambda real, parts: (np.zeros(len(parts), int), [0])),
    "images without pixels": (tower, "distinct_images", without_pixels),
    "no gradient": (Tower, "features_at", in_pooled(lambda features, index: features.detach())),
    "the gradient of one copy": (Tower, "features_at", in_pooled(of_one_copy)),
    "deep features elsewhere": (Tower, "features_at", in_deepstack(lambda deep: [(each[0].flip(0),) for each in deep])),
    "deep features in another order": (Tower, "features_at", in_deepstack(lambda deep: deep[::-1])),
    "the next row of the features": (ImageTokens, "rows_at", lambda real, *args: np.roll(real(*args), 1)),
    "ids only": (ImageTokens, "codes", lambda real, self: np.where(self.is_image, 10_000, real(self))),
    "positions along each row": (*AXES, lambda real, *args: None),
    "one axis": (*AXES, lambda real, *args: real(*args)[:1].repeat(3, 0)),
    "positions of the next token": (*AXES, lambda real, *args: np.roll(real(*args), 1, axis=-1)),
    PIECES: (BatchImages, "read", other_image),
}
OF_BLOCKS: dict[str, tuple[Any, ...]] = {
    "blocks in parts": (tokens, "whole_blocks", lambda real, codes, blocks: np.minimum(blocks, 0)),
    NEXT: (BlockLayout, "of", lambda real, blocks: real(np.minimum(blocks, 0))),
    "without the last row": (
        *(BlockLayout, "of"),
        lambda real, blocks: real(np.where(blocks == np.roll(blocks, -1), blocks, -1)),
    ),
    LAYERS: (windows, "_seen", lambda real, *args: (True, real(*args)[1])),
    "without a window": (windows, "_seen", lambda real, *args: (real(*args)[0], 0)),
}
MISTAKES = OF_IMAGES | OF_BLOCKS
# A padded call has no pieces; in a collator's rows images bear no labels, so that what only changes their own is none.
UNSEEN = {("share_prefixes", PIECES), ("RadixCollator", NEXT), ("RadixCollator", LAYERS)}


@pytest.mark.parametrize(
    ("door", "what"),
    [x for x in product(["share_prefixes", "RadixCollator"], MISTAKES) if x not in UNSEEN],
)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, door: str, what: str) -> None:
    owner, name, mistake = MISTAKES[what]
    real = getattr(owner, name)
    changed: Any = lambda *args: mistake(getattr(real, "func", real), *args)  # noqa: E731
    for each in (owner, images) if owner is tower else (owner,):
        monkeypatch.setattr(each, name, property(changed) if isinstance(real, cached_property) else changed)
    kind, rows = ("Qwen3-VL", ROWS) if what in OF_IMAGES else ("Gemma 4, in both directions", NEIGHBOURS)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        DOORS[door](KINDS[kind], rows)
