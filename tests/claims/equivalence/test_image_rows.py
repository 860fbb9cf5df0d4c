"""Rows with images have the ordinary gradient by `share_prefixes`, tower and projector too, and share each equal cause.

In float64; the oracle is the model as it came from Hugging Face. The mistakes at the end are of the plan and of the
tower, each of which the same check must see.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from torch import Tensor

from radixtrain.hf import pictures
from radixtrain.hf.padded import causes
from radixtrain.hf.padded.causes import Causes
from radixtrain.tree import layout
from tests.claims.mistakes import SEEN, plant
from tests.support import cases
from tests.support.batches import IMAGE, KINDS, ROWS, Kind, Row, image_batch_of, letters_of
from tests.support.trainers import check_padded

EITHER = pytest.mark.parametrize("left", [False, True], ids=["padded on the right", "padded on the left"])


def number_of_causes(kind: Kind, rows: Sequence[Row]) -> int:
    """Count the distinct prefixes of rows. A run of images that attend in both directions counts as a whole."""
    (inputs, kept), (_, counts) = image_batch_of(kind, rows), kind.inputs_of([letters_of([row]) for row in rows])
    found = set()
    for row, ids in zip(rows, map(Tensor.masked_select, inputs["input_ids"], kept), strict=True):
        features = ((letter, n) for letter in letters_of([row]) for n in range(counts[letter]))
        spelled = [next(features) if token == IMAGE else token for token in ids.tolist()]
        ends: list[int] = []
        for n, token in reversed([*enumerate(spelled)]):
            in_block = kind.types is not None and isinstance(token, tuple)
            goes_on = in_block and n + 1 < len(spelled) and isinstance(spelled[n + 1], tuple)
            ends.append(ends[-1] if goes_on else n + 1)
        found |= {(tuple(spelled[:end]), n) for n, end in enumerate(reversed(ends))}
    return len(found)


def as_it_is(model: Any) -> Any:
    return model


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


BOTH_WAYS = ["Gemma 3", "Gemma 4, in both directions"]
OF_SIZES: list[Row] = [[7, "A", 8, 9], [7, "a", 8, 9], [7, "a", "A", 8], [7, "a", "A", 10, 11], [8, "B", "a", 7]]
NEIGHBOURS: list[Row] = [["A"], ["A", 8], [7, "B"], [7, "A"], [7, "A", "B"], [7, "A", "B", 9], [7, "A", 8]]
GRIDS: list[Row] = [[7, 8, "V", 9, 10], [7, 8, "W", 9, 10]]  # of as many patches in another order
CHANGES = {"LoRA": with_lora, "recomputed": checkpointing}
TRIED = {
    **{name: (name, ROWS, as_it_is) for name in KINDS},
    **{f"{name}, sizes": (name, OF_SIZES, as_it_is) for name, kind in KINDS.items() if kind.has_sizes},
    **{f"{name}, grids": (name, GRIDS, as_it_is) for name in ("Qwen3-VL", "Qwen2.5-VL", "GLM-4V")},
    **{f"{name}, neighbours": (name, NEIGHBOURS, as_it_is) for name in BOTH_WAYS},
    **{
        f"{name}, {what}": (name, ROWS, change)
        for name in ("Qwen3-VL", "LLaVA", "Gemma 3")
        for what, change in CHANGES.items()
    },
    "Qwen3-VL, a frozen tower": ("Qwen3-VL", ROWS, frozen_tower),
}
QUICK = ["LLaVA", "Qwen3-VL", "Idefics3", "Gemma 3", "Gemma 4 unified", "Qwen3-VL, sizes", "Mistral 3, sizes"]
QUICK += [name for name, (kind, rows, change) in TRIED.items() if rows in (GRIDS, NEIGHBOURS)]
QUICK += ["Qwen3-VL, LoRA", "Qwen3-VL, recomputed", "Qwen3-VL, a frozen tower"]


@EITHER
@pytest.mark.parametrize("name", cases(TRIED, QUICK))
def test_the_gradient_is_the_ordinary_one(name: str, left: bool) -> None:
    kind, rows, change = TRIED[name]
    assert check_padded(KINDS[kind], rows, change, left) == number_of_causes(KINDS[kind], rows)


@EITHER
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_images_in_both_directions_by_other_strategies_and_without_types(name: str, left: bool) -> None:
    for attention in ("path", "reference"):
        check_padded(KINDS[name], NEIGHBOURS, left=left, attention=attention)
    kind = replace(KINDS[name], types=None)
    assert check_padded(kind, NEIGHBOURS, left=left) == number_of_causes(kind, NEIGHBOURS)


# Mistakes. Each changes what the real function returns.


def of_axes(change: Callable[[list[Any]], list[Any]]) -> Callable[..., Any]:
    def mistake(real: Any, *args: Any) -> Any:
        return {f"axis {n}": each for n, each in enumerate(change([*real(*args).values()]))}

    return mistake


def other_layers(real: Any, self: Causes, plan: Any) -> Any:
    given = real(self, plan)
    return {**given, "deepstack_visual_embeds": given["deepstack_visual_embeds"][::-1]}


OF_IMAGES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no gradient": (pictures, "_every", lambda real, x, *args: real([each.detach() for each in x], *args)),
    "every picture is computed": (pictures, "_of_every", lambda real, *args: None),
    "deep features elsewhere": (Causes, "row_at_placeholder", lambda real, self: np.roll(real(self), 1)),
    "deep features in another order": (Causes, "of_unique_tokens", other_layers),
    "the next row of the features": (Causes, "_features", lambda real, *args: np.roll(real(*args), 1)),
    "positions along each row": (causes, "_positions", lambda real, *args: {}),
    "one axis": (causes, "_positions", of_axes(lambda axes: axes[:1] * 3)),
}
OF_BLOCKS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "blocks in parts": (causes, "_whole_blocks", lambda real, codes, blocks: np.minimum(blocks, 0)),
    "images of neighbouring rows are one": (
        layout,
        "_reversed_blocks",
        lambda real, blocks: real(np.minimum(blocks, 0)),
    ),
    "without the last row": (
        *(layout, "_reversed_blocks"),
        lambda real, blocks: real(np.where(blocks == np.roll(blocks, -1), blocks, -1)),
    ),
    "in every layer": (causes, "answered", lambda real, call, window, _, device: real(call, window, True, device)),
    "without a window": (causes, "answered", lambda real, call, window, *args: real(call, 0, *args)),
}


@pytest.mark.parametrize("what", [*OF_IMAGES, *OF_BLOCKS])
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    plant(monkeypatch, *{**OF_IMAGES, **OF_BLOCKS}[what])
    kind, rows = ("Qwen3-VL", ROWS) if what in OF_IMAGES else (BOTH_WAYS[1], NEIGHBOURS)
    with pytest.raises(SEEN):
        check_padded(KINDS[kind], rows)
