"""Tiny models that see images, and padded batches of rows with images that they share, or nearly share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import tiny_model
from torch import Tensor

__all__ = ["IMAGE", "ROWS", "Kind", "Row", "batch_of", "of_rows", "patches", "squares", "with_sizes"]

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


@dataclass(frozen=True)
class Kind:
    """A family. inputs_of: its entries of a batch and the placeholders of each image, from the images of each row."""

    model_class: str
    settings: dict[str, Any]
    inputs_of: Callable[[list[list[str]]], tuple[dict[str, Tensor], dict[str, int]]]
    has_sizes: bool = False

    def build(self, seed: int = 0) -> Any:
        return tiny_model(self.model_class, seed, **self.settings)


def pixels(letter: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(ord(letter)), dtype=torch.float64)


def squares(size: int, num_tokens: int) -> Callable[..., Any]:
    """Images of one size, one after the other: LLaVA, InternVL."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = [letter for row in rows for letter in row]
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
        return {"pixel_values": values}, {letter: num_tokens for row in rows for letter in row}

    return inputs


def with_sizes(size: int, patch: int) -> Callable[..., Any]:
    """Images of several sizes on squares of one: Mistral 3 around Pixtral. A small letter is half as high."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = [letter for row in rows for letter in row]
        sizes = torch.tensor([[size // (1 + letter.islower()), size] for letter in letters])
        values = torch.stack([pixels(each, 3, size, size) for each in letters])
        counts = {letter: int((pair // patch).prod()) for letter, pair in zip(letters, sizes, strict=True)}
        return {"pixel_values": values, "image_sizes": sizes}, counts

    return inputs


def patches(dim: int, merge: int = 2) -> Callable[..., Any]:
    """The patches of all images in one list, and their grids: Qwen. A small letter has half as many."""

    def inputs(rows: list[list[str]]) -> Any:
        letters = [letter for row in rows for letter in row]
        grids = {letter: (1, 2 * merge, merge * (1 if letter.islower() else 2)) for letter in letters}
        numbers = {letter: t * h * w for letter, (t, h, w) in grids.items()}
        values = torch.cat([pixels(each, numbers[each], dim) for each in letters])
        entries = {"pixel_values": values, "image_grid_thw": torch.tensor([grids[each] for each in letters])}
        return entries, {letter: number // merge**2 for letter, number in numbers.items()}

    return inputs


def batch_of(kind: Kind, rows: Sequence[Row], left: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """What a call of the model gets, and which places are kept, (B, L), bool."""
    entries, counts = kind.inputs_of([[part for part in row if isinstance(part, str)] for row in rows])
    before = [START] if "image_grid_thw" in entries else []  # else Qwen takes two images for one
    ids = [
        [token for part in row for token in ([*before, *[IMAGE] * counts[part]] if isinstance(part, str) else [part])]
        for row in rows
    ]
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in ids])
    kept = padded != 0
    entries |= {"input_ids": padded, "attention_mask": kept.long()}
    if "image_grid_thw" in entries:
        entries["mm_token_type_ids"] = (padded == IMAGE).int()
    return entries, kept
