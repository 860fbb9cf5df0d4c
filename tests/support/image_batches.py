"""Tiny models that see images, and padded batches of rows with images that they share, or nearly share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from families import CORE_MULTIMODAL, MULTIMODAL
from tiny_models import tiny_model
from torch import Tensor

__all__ = [
    "IMAGE",
    "KINDS",
    "OF_SIZES",
    "ROWS",
    "TOKEN",
    "Kind",
    "Row",
    "batch_of",
    "letters_of",
    "of_family",
    "squares",
]

IMAGE = 5  # id of a placeholder
START = 4  # of what stands before an image
Row = Sequence[int | str]
"""Ids of tokens, and images by their letters: a capital and a small letter are images of different sizes."""

# Equal and different images; equal ones with other text before; two in a row; at the fork; a row without one.
ROWS: list[Row] = [
    [7, "A", 8, 9, 10],
    [7, "A", 8, 9, 11, 12],
    [7, "B", 8, 9, 10],
    [6, "A", 8, 9],
    [7, "A", "B", 8],
    [7, "A", "B", 9, 9],
    [7, 8, 9, 10],
    [7, "A"],
]
OF_SIZES: list[Row] = [[7, "A", 8, 9], [7, "a", 8, 9], [7, "a", "A", 8], [7, "a", "A", 10, 11], [8, "B", "a", 7]]


def letters_of(rows: Sequence[Row]) -> list[str]:
    """The images of all rows."""
    return [part for row in rows for part in row if isinstance(part, str)]


@dataclass(frozen=True)
class Kind:
    """A family.

    inputs_of: its entries of a batch and the placeholders of each image, from the images of each row. types: the entry
    by which these attend in both directions.
    """

    model_class: str
    settings: dict[str, Any]
    inputs_of: Callable[[list[list[str]]], tuple[dict[str, Tensor], dict[str, int]]]
    has_sizes: bool = False
    types: str | None = None

    def build(self, seed: int = 0) -> Any:
        return tiny_model(self.model_class, seed, **self.settings)


def pixels(letter: str, *shape: int) -> Tensor:
    """Those of V and W are equal: in a list of patches only their grids differ."""
    letter = letter.replace("W", "V")
    return torch.randn(shape, generator=torch.Generator().manual_seed(ord(letter)), dtype=torch.float64)


def squares(size: int, num_tokens: int) -> Callable[..., Any]:
    """Images of one size, one after the other: LLaVA, InternVL."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = letters_of(rows)
        return {"pixel_values": torch.stack([pixels(each, 3, size, size) for each in letters])}, dict.fromkeys(
            letters, num_tokens
        )

    return inputs


def of_rows(size: int, num_tokens: int) -> Callable[..., Any]:
    """As many images in each row, filled up with zeros: Idefics 3, SmolVLM."""

    def inputs(rows: list[list[str]]) -> Any:
        most = max(map(len, rows))
        values = torch.zeros(len(rows), most, 3, size, size, dtype=torch.float64)
        for row, letters in enumerate(rows):
            for place, letter in enumerate(letters):
                values[row, place] = pixels(letter, 3, size, size)
        return {"pixel_values": values}, dict.fromkeys(letters_of(rows), num_tokens)

    return inputs


def with_sizes(size: int, patch: int) -> Callable[..., Any]:
    """Images of several sizes on squares of one: Mistral 3 around Pixtral. A small letter is half as high."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = letters_of(rows)
        sizes = torch.tensor([[size // (1 + letter.islower()), size] for letter in letters])
        values = torch.stack([pixels(each, 3, size, size) for each in letters])
        counts = {letter: int((pair // patch).prod()) for letter, pair in zip(letters, sizes, strict=True)}
        return {"pixel_values": values, "image_sizes": sizes}, counts

    return inputs


def patches(dim: int, merge: int = 2) -> Callable[..., Any]:
    """The patches of all images in one list, and their grids: Qwen. A small letter has half as many."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = letters_of(rows)
        grids = {letter: (1, 2 * merge, merge * (1 if letter.islower() else 2)) for letter in letters}
        grids |= {"V": (1, 1 * merge, 4 * merge), "W": (1, 4 * merge, 1 * merge)}
        numbers = {letter: t * h * w for letter, (t, h, w) in grids.items()}
        values = torch.cat([pixels(each, numbers[each], dim) for each in letters])
        entries = {"pixel_values": values, "image_grid_thw": torch.tensor([grids[each] for each in letters])}
        return entries, {letter: number // merge**2 for letter, number in numbers.items()}

    return inputs


TOKEN = {"image_token_id": IMAGE}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
DIM = 3 * 2 * 14 * 14  # of a patch of two frames
LARGER = {"vision_config": {"image_size": 56}}
EAGER = {"experts_implementation": "eager"}
KINDS = {
    "LLaVA": Kind("LlavaForConditionalGeneration", TOKEN, squares(28, 4)),
    "Qwen2.5-VL": Kind(
        "Qwen2_5_VLForConditionalGeneration",
        {**TOKEN, "text_config": MROPE, "vision_config": {"window_size": 56, "fullatt_block_indexes": [1]}},
        patches(DIM),
        True,
    ),
    "Qwen3-VL": Kind(
        "Qwen3VLForConditionalGeneration",
        {**TOKEN, "vision_config": {"deepstack_visual_indexes": [0, 1]}},
        patches(DIM),
        True,
    ),
    "Qwen3.5": Kind("Qwen3_5ForConditionalGeneration", TOKEN, patches(DIM), True),
    "InternVL": Kind(
        "InternVLForConditionalGeneration", {**TOKEN, "vision_config": {"image_size": [56, 56]}}, squares(56, 4)
    ),
    "Idefics3": Kind("Idefics3ForConditionalGeneration", {**TOKEN, **LARGER}, of_rows(56, 4)),
    "SmolVLM": Kind("SmolVLMForConditionalGeneration", {**TOKEN, **LARGER}, of_rows(56, 4)),
    "Mistral 3": Kind("Mistral3ForConditionalGeneration", {**TOKEN, **LARGER}, with_sizes(56, 28), True),
}


def of_family(name: str, inputs_of: Callable[..., Any], has_sizes: bool = False, **settings: Any) -> Kind:
    """A family of docs/families.md. settings: further ones of its parts."""
    family = next(each for each in (*CORE_MULTIMODAL, *MULTIMODAL) if each.name == name)
    parts = {part: {**family.settings.get(part, {}), **own} for part, own in settings.items()}
    return Kind(family.model_class, {**family.settings, **TOKEN, **parts}, inputs_of, has_sizes)


def on_pooled_patches(size: int, kernel: int) -> Callable[..., Any]:
    """Patches of each image and where they stand, filled up with -1: Gemma 4. A small letter is half as high."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = letters_of(rows)
        values = torch.zeros(len(letters), size * size, 3 * 14 * 14, dtype=torch.float64)
        places = torch.full((len(letters), size * size, 2), -1)
        counts = {}
        for index, letter in enumerate(letters):
            height = size // (1 + letter.islower())
            values[index, : height * size] = pixels(letter, height * size, 3 * 14 * 14)
            places[index, : height * size] = torch.cartesian_prod(torch.arange(height), torch.arange(size)).flip(1)
            counts[letter] = height * size // kernel**2
        return {"pixel_values": values, "image_position_ids": places}, counts

    return inputs


def in_tiles(size: int, num_tokens: int) -> Callable[..., Any]:
    """Three tiles of each image, the first of the whole: LLaVA-NeXT."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = letters_of(rows)
        values = torch.stack([pixels(each, 3, 3, size, size) for each in letters])
        sizes = torch.tensor([[2 * size, size]] * len(letters))
        return {"pixel_values": values, "image_sizes": sizes}, dict.fromkeys(letters, num_tokens)

    return inputs


def square_patches(rows: list[list[str]]) -> Any:
    """As `patches`, each patch a small image: PaddleOCR-VL, Kimi K2.5."""
    entries, counts = patches(DIM // 2)(rows)
    return {**entries, "pixel_values": entries["pixel_values"].unflatten(1, (3, 14, 14))}, counts


KINDS |= {
    "Gemma 4": of_family(
        "Gemma 4",
        on_pooled_patches(4, 2),
        True,
        vision_config={"model_type": "gemma4_vision", "pooling_kernel_size": 2},
    ),
    "Idefics2": of_family("Idefics2", of_rows(28, 4), perceiver_config={"resampler_n_latents": 4}),
    "LightOnOCR": of_family("LightOnOCR", with_sizes(56, 28), True),
    "Qwen2-VL": Kind(
        "Qwen2VLForConditionalGeneration",
        {**TOKEN, "text_config": MROPE, "vision_config": {"embed_dim": 32}},
        patches(DIM),
        True,
    ),
    "Qwen3-VL-MoE": Kind(
        "Qwen3VLMoeForConditionalGeneration",
        {**TOKEN, "vision_config": {"deepstack_visual_indexes": [0, 1]}, "text_config": EAGER},
        patches(DIM),
        True,
    ),
    "LLaVA-NeXT": Kind(
        "LlavaNextForConditionalGeneration", {**TOKEN, "image_grid_pinpoints": [[56, 28]]}, in_tiles(28, 16)
    ),
    "LLaVA-OneVision": Kind(
        "LlavaOnevisionForConditionalGeneration", {**TOKEN, "image_grid_pinpoints": [[56, 28]]}, in_tiles(28, 16)
    ),
    **{name: of_family(name, squares(28, 1)) for name in ("Aya Vision", "Cohere 2 Vision", "GOT-OCR 2", "Qianfan-OCR")},
    **{name: of_family(name, squares(28, 4)) for name in ("DeepSeek-VL", "Janus", "Video-LLaVA")},
    "Step 3.7": of_family("Step 3.7", squares(28, 1)),
    **{
        name: of_family(name, patches(DIM), True)
        for name in ("Cohere Compass", "Cosmos 3 Omni", "GLM-4V", "GLM-4.5V", "GLM-4.6V", "GLM-OCR", "LFM3-VL")
    },
    "MiniMax-M3, dense": of_family("MiniMax-M3, dense", patches(DIM), True),
    "Qwen3.5-MoE": of_family("Qwen3.5-MoE", patches(DIM), True),
    **{name: of_family(name, patches(DIM // 2), True) for name in ("Cosmos 3 Edge", "ERNIE 4.5 VL MoE")},
    "PaddleOCR-VL": of_family("PaddleOCR-VL", square_patches, True),
    "Kimi K2.5": Kind(
        "Kimi_K25ForConditionalGeneration", {**TOKEN, "projection_hidden_size": 32}, square_patches, True
    ),
}
# Images that attend in both directions: in all layers, and in those with a window, which is shorter than an image.
GEMMA_4 = KINDS["Gemma 4"].settings
UNIFIED = {"patch_size": 14, "pooling_kernel_size": 1, "model_patch_size": 14, "output_proj_dims": 32}
KINDS |= {
    "Gemma 3": Kind(
        "Gemma3ForConditionalGeneration",
        {**TOKEN, "mm_tokens_per_image": 16, **LARGER, "text_config": {"sliding_window": 7}},
        squares(56, 16),
        types="token_type_ids",
    ),
    "Gemma 4, in both directions": replace(
        KINDS["Gemma 4"],
        settings={**GEMMA_4, "text_config": {**GEMMA_4["text_config"], "use_bidirectional_attention": "vision"}},
        types="mm_token_type_ids",
    ),
    "Gemma 4 unified": replace(
        of_family(
            "Gemma 4 unified",
            on_pooled_patches(4, 1),
            True,
            vision_config={"model_type": "gemma4_unified_vision", **UNIFIED},
            text_config={"sliding_window": 33},  # longer than two images, beyond which these see each other
        ),
        types="mm_token_type_ids",
    ),
}


def batch_of(kind: Kind, rows: Sequence[Row], left: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """What a call of the model gets, and which places are kept, (B, L), bool."""
    entries, counts = kind.inputs_of([letters_of([row]) for row in rows])
    before = [START] if "image_grid_thw" in entries else []  # else Qwen takes two images for one
    ids = [
        [token for part in row for token in ([*before, *[IMAGE] * counts[part]] if isinstance(part, str) else [part])]
        for row in rows
    ]
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in ids])
    kept = padded != 0
    entries |= {"input_ids": padded, "attention_mask": kept.long()}
    types = "mm_token_type_ids" if "image_grid_thw" in entries else kind.types
    if types is not None:
        entries[types] = (padded == IMAGE).int()
    return entries, kept
