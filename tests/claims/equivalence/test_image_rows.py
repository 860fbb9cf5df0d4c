"""Rows with images have the ordinary gradient by `share_prefixes`, tower and projector too.

In float64; the oracle is the model as it came from Hugging Face. The mutations at the end are mistakes of the plan and
of the tower, each of which the same check must see.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from radixtrain.hf import pictures
from radixtrain.hf.padded import causes
from radixtrain.hf.padded.causes import Causes
from radixtrain.tree import layout
from tests.support import cases
from tests.support.batches import KINDS, ROWS, Row, image_batch_of
from tests.support.trainers import check_padded

PADDED: dict[str, Callable[..., int]] = {
    "padded on the right": check_padded,
    "padded on the left": partial(check_padded, left=True),
}


OF_SIZES: list[Row] = [[7, "A", 8, 9], [7, "a", 8, 9], [7, "a", "A", 8], [7, "a", "A", 10, 11], [8, "B", "a", 7]]


SIZED = [name for name, kind in KINDS.items() if kind.has_sizes]
EITHER = pytest.mark.parametrize("check", PADDED.values(), ids=PADDED)


@EITHER
@pytest.mark.parametrize("name", cases(KINDS, ["LLaVA", "Qwen3-VL", "Idefics3", "Gemma 3"]))
def test_the_gradient_is_the_ordinary_one(name: str, check: Callable[..., int]) -> None:
    assert check(KINDS[name]) < image_batch_of(KINDS[name], ROWS)[1].sum()


@EITHER
@pytest.mark.parametrize("name", cases(SIZED, ["Qwen3-VL", "Mistral 3"]))
def test_images_of_different_sizes(name: str, check: Callable[..., int]) -> None:
    check(KINDS[name], OF_SIZES)


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
def test_what_is_shared(name: str, rows: list[Row], num_unique: int, check: Callable[..., int]) -> None:
    assert check(KINDS[name], rows) == num_unique


@EITHER
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_images_in_both_directions_by_other_strategies_and_without_types(name: str, check: Callable[..., int]) -> None:
    for attention in ("path", "reference"):
        check(KINDS[name], NEIGHBOURS, attention=attention)
    image = BOTH_WAYS[name]
    assert check(replace(KINDS[name], types=None), NEIGHBOURS) == (image + 1) + 1 + image + 2 * (image + 1)


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
    name: str, change: Callable[[Any], Any], check: Callable[..., int]
) -> None:
    check(KINDS[name], change=change)


# Mistakes. Each changes what the real function returns.


def without_pixels(real: Any, parts: Any) -> Any:
    return real([{name: torch.zeros_like(part) for name, part in image.items()} for image in parts])


def of_axes(change: Callable[[list[Any]], list[Any]]) -> Callable[..., Any]:
    def mistake(real: Any, *args: Any) -> Any:
        return {f"axis {n}": each for n, each in enumerate(change([*real(*args).values()]))}

    return mistake


def other_layers(real: Any, self: Causes, plan: Any) -> Any:
    given = real(self, plan)
    return {**given, "deepstack_visual_embeds": given["deepstack_visual_embeds"][::-1]}


OF_IMAGES: dict[str, tuple[Any, ...]] = {
    "every image is the first": (pictures, "_distinct", lambda real, parts: (np.zeros(len(parts), int), [0])),
    "images without pixels": (pictures, "_distinct", without_pixels),
    "no gradient": (pictures, "_every", lambda real, x, *args: real([each.detach() for each in x], *args)),
    "deep features elsewhere": (Causes, "row_at_placeholder", lambda real, self: np.roll(real(self), 1)),
    "deep features in another order": (Causes, "of_unique_tokens", other_layers),
    "the next row of the features": (Causes, "_features", lambda real, *args: np.roll(real(*args), 1)),
    "positions along each row": (causes, "_positions", lambda real, *args: {}),
    "one axis": (causes, "_positions", of_axes(lambda axes: axes[:1] * 3)),
    "positions of the next token": (causes, "_positions", of_axes(lambda axes: [each.roll(1, -1) for each in axes])),
}
OF_BLOCKS: dict[str, tuple[Any, ...]] = {
    "blocks in parts": (causes, "_whole_blocks", lambda real, codes, blocks: np.minimum(blocks, 0)),
    "images of neighbouring rows are one": (
        layout,
        "reversed_blocks",
        lambda real, blocks: real(np.minimum(blocks, 0)),
    ),
    "without the last row": (
        *(layout, "reversed_blocks"),
        lambda real, blocks: real(np.where(blocks == np.roll(blocks, -1), blocks, -1)),
    ),
    "in every layer": (
        causes,
        "answered",
        lambda real, call, window, both_ways, device: real(call, window, True, device),
    ),
    "without a window": (causes, "answered", lambda real, call, window, *args: real(call, 0, *args)),
}
MISTAKES = OF_IMAGES | OF_BLOCKS


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    owner, name, mistake = MISTAKES[what]
    real = getattr(owner, name)
    changed: Any = lambda *args: mistake(getattr(real, "func", real), *args)  # noqa: E731
    monkeypatch.setattr(owner, name, property(changed) if isinstance(real, cached_property) else changed)
    kind, rows = ("Qwen3-VL", ROWS) if what in OF_IMAGES else ("Gemma 4, in both directions", NEIGHBOURS)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check_padded(KINDS[kind], rows)
