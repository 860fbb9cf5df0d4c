"""Batches and plans: a tokenizer without files, nested sequences and their attention, padded batches, images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from radixtrain.kernels.merge_attention import Piece
from radixtrain.testing import flash_attention_by_the_book
from radixtrain.tree.layout import SECTIONS, TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from radixtrain.tree.radix_inputs import RadixInputs
from tests.support.models import CORE_MULTIMODAL, MULTIMODAL, tiny_model

# A tokenizer with an id for every byte, so that a test writes ids as bytes: `[*b"hi", END]`. No file is needed.


TWO_NEWLINES, START, END, BOS = 256, 257, 258, 259  # two newlines are the only merge
VOCAB_SIZE = 260
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|bos|>")
CHATML = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# The same text, with generation markers.
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def byte_tokenizer(
    template: object = CHATML, *, bos: str | None = None, eos: str = "<|im_end|>", special: tuple[str, ...] = SPECIAL
) -> PreTrainedTokenizerFast:
    """bos: also put before every text, as Llama's tokenizer does. special: their ids begin at START."""
    names = bytes_to_unicode()
    newline = names[ord("\n")]
    vocabulary = {names[byte]: byte for byte in range(256)} | {newline * 2: TWO_NEWLINES}
    backend = Tokenizer(models.BPE(vocabulary, [(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text) for text in special])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=template)


# Plans of nested sequences, and what attention on them is given.
#
# U rows, N query heads, K key/value heads, H head dim.
#
# Three sequences that share a beginning, with labels on shared tokens and several at a branch.


FOREST = [[7, 8, 9], [7, 8, 5], [7, 8, 9, 6], [9, 1], [9, 2, 2], [9, 2, 4]]
DEEP = [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 1], [1, 1, 2, 2], [1, 2], [3, 1, 1, 1, 1], [3, 1, 1, 1, 2], [3, 2]]
# Two trees: one of three levels below [1, 1, 2], one of one level below [2]; a prefix of another; one twice.
NESTED = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [1, 1, 2, 2], [2, 1, 1], [2, 3, 3], [2, 1, 1], [5]]


def plan_of(sequences: Any, **options: Any) -> PrefixPlan:
    """options: of `build_prefix_plan`."""
    tokens = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(tokens, np.cumsum([0, *map(len, sequences)]), **options)


def agent(turns: int, observed: int = 40, answered: int = 10) -> list[list[int]]:
    """A history that each turn makes longer, with an answer after every turn."""
    return [[*range(observed * (n + 1)), *[100_000 + n] * answered] for n in range(turns)]


def comb(forks: int) -> list[list[int]]:
    """As much below each fork as between two."""
    return agent(forks, observed=5, answered=5)


def longer(sequences: list[list[int]], times: int) -> list[list[int]]:
    """The same tree with every run `times` as long."""
    return [[token for token in sequence for _ in range(times)] for sequence in sequences]


def attention_inputs(
    plan: PrefixPlan, dtype: torch.dtype, heads: tuple[int, int] = (4, 2), head_dim: int = 8, seed: int = 0
) -> list[Tensor]:
    """q, k, v, dout. No loss on padding, whose output means nothing."""
    tensors = random_tensors((plan.num_rows, plan.num_rows), dtype, heads, head_dim, seed)
    tensors[3][plan.num_unique_tokens :] = 0
    return tensors


def mask_pairs(plan: PrefixPlan) -> set[tuple[int, int]]:
    """Every (query, key) that the tree mask allows."""
    ends = plan.subtree_ends.repeat(np.diff(plan.segment_starts)).tolist()
    return {(query, key) for key, end in enumerate(ends) for query in range(key, end)}


def seen_pairs(piece: Piece, num_rows: int) -> Counter[tuple[int, int]]:
    """Count every (query, key) that a piece computes. Asserts that what it says of its sizes is true."""
    rows, ragged = torch.arange(num_rows), piece.ragged
    queries, keys = rows[piece.q_rows].tolist(), rows[piece.k_rows].tolist()
    q, k = ragged.cu_seqlens_q.tolist(), ragged.cu_seqlens_k.tolist()
    assert (q[0], q[-1], k[0], k[-1]) == (0, len(queries), 0, len(keys))
    assert (ragged.max_seqlen_q, ragged.max_seqlen_k) == tuple(max(np.diff(x), default=0) for x in (q, k))
    entries = tuple(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))
    found: Counter[tuple[int, int]] = Counter()
    for q0, q1, k0, k1 in entries:
        for i in range(q0, q1):
            seen = k1 - (q1 - 1 - i) if ragged.causal else k1  # bottom-right causal: the last query sees every key
            found.update((queries[i], key) for key in keys[k0:seen])
    return found


FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [-100, 8, 9, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]},
    {"input_ids": [7, 8, 5, 6, 4, 4], "labels": [-100, -100, 5, -100, 4, 4]},
]


# One softmax over the keys that each query sees, by autograd: what every kernel and strategy of attention must equal.
#
# T queries, J keys, N query heads, K key/value heads, H head dim. What a query sees is a matrix of distances, (T, J),
# int64: how many tokens before the query a key is, or -1 if it is not seen.


NAMES = ("out", "dq", "dk", "dv")


def random_tensors(
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    seed: int = 0,
) -> list[Tensor]:
    """q, k, v and dout. sizes: how many queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sizes[side], heads[side], head_dim) for side in (0, 1, 1, 0)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def distances_of_plan(plan: PrefixPlan) -> Tensor:
    """(U, U), from the rows of each sequence and not from the tree. Rows of padding follow one another."""
    found = torch.full((plan.num_rows, plan.num_rows), -1)
    rows = torch.tensor(plan.inverse_indices).split(np.diff(plan.cu_seqlens).tolist())
    for path in (*rows, torch.arange(plan.num_unique_tokens, plan.num_rows)):
        places = torch.arange(len(path))
        found[path[:, None], path] = (places[:, None] - places).clamp(min=-1)
    return found


def softmax_and_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    distances: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (T, N, H) and the log-sum-exp (N, T), as Hugging Face's eager functions write them.

    A query that sees nothing has an output of zeros and a log-sum-exp of -inf.
    """
    seen = (distances >= 0) & (distances < (window or distances.numel() + 1))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("tnh,jnh->ntj", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~seen & seen.any(1, keepdim=True)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)] * seen
    lse = scores.logsumexp(-1).masked_fill(~seen.any(1), float("-inf"))
    return torch.einsum("ntj,jnh->tnh", weights, v), lse


def one_softmax(*tensors: Tensor | None, **options: Any) -> Tensor:
    """The output of `softmax_and_lse`."""
    return softmax_and_lse(*tensors, **options)[0]  # type: ignore[arg-type]


def with_gradients(attend: Callable[..., Tensor], tensors: Sequence[Tensor], *sinks: Tensor) -> list[Tensor]:
    """out where dout has something, dq, dk, dv, and dsinks if there are sinks.

    attend: called with q, k, v and the sinks. tensors: q, k, v, dout.
    """
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors[:3], *sinks)]
    out = attend(*leaves)
    return [out.detach() * (tensors[3] != 0), *torch.autograd.grad(out, leaves, tensors[3])]


def by_the_book(tensors: Sequence[Tensor], distances: Tensor, scale: float) -> list[Tensor]:
    """out, dq, dk, dv as flash-attention's arithmetic has them in the dtype of q: the reference of 16 bits."""
    out, _, *grads = flash_attention_by_the_book(*tensors, distances >= 0, scale)
    return [out * (tensors[3] != 0), *grads]


def assert_exact(found: Sequence[Tensor], truth: Sequence[Tensor], what: object = "") -> None:
    """Assert equality in float64: for each tensor a relative L2 error of at most 1e-12.

    A tensor whose true value is zero but for rounding has no relative error: its bar is that of numbers near one.
    """
    for number, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert x.shape == y.shape, f"{what}, tensor {number}: {tuple(x.shape)} for {tuple(y.shape)}"
        error = float((x - y).norm()) / max(float(y.norm()), 0.1)
        assert error <= 1e-12, f"{what}, tensor {number}: {error:.2g}"


# Generated padded batches, as a trainer would make them: what a call gets, and which of its places are read.
#
# Rows are copies, prefixes, extensions and forks of each other, single tokens and new ones, of two to four distinct
# tokens, so that they share by accident too. Padding stands on the left, on the right or on both sides, and the ids
# there are any. One batch in ten is packed: its rows stand one after the other, and their positions start again.


MASKS = [torch.bool, torch.int64, torch.int32, torch.float64]


@dataclass(frozen=True)
class PaddedBatch:
    """inputs: `input_ids`, (B, L), and what else of mask and positions the call gets.

    kept: (B, L), bool. False at padding.
    starts: (B, L), bool. True at the first token of each sequence, two or more in a packed row.
    positions: (B, L), int64. of each token, as Hugging Face counts those that are not given.
    kind: in words, for messages.
    """

    inputs: dict[str, Tensor]
    kept: Tensor
    starts: Tensor
    positions: Tensor
    kind: str

    @property
    def is_packed(self) -> bool:
        """Whether a row has several sequences."""
        return int(self.starts.sum()) > len(self.starts)

    @property
    def counts_padding(self) -> bool:
        """Whether Hugging Face counts the positions of some sequence from its padding."""
        return "position_ids" not in self.inputs and bool((~self.kept[:, 0] & self.kept.any(1)).any())

    @cached_property
    def num_unique_tokens(self) -> int:
        """Distinct histories of (token, position), counted in a set. Padding in front of a sequence moves nothing."""
        found: set[tuple[tuple[int, int], ...]] = set()
        for ids, positions, kept, starts in zip(
            self.inputs["input_ids"].tolist(),
            self.positions.tolist(),
            self.kept.tolist(),
            self.starts.tolist(),
            strict=True,
        ):
            history: tuple[tuple[int, int], ...] = ()
            for token, position, is_kept, is_start in zip(ids, positions, kept, starts, strict=True):
                history = () if is_start else history
                if is_kept:
                    place = len(history) if "position_ids" not in self.inputs else position
                    history = (*history, (token, place))
                    found.add(history)
        return len(found)

    def labels(self) -> Tensor:
        """(B, L). the model's own: each token, except padding and what is predicted from padding, which are -100."""
        hidden = ~self.kept
        hidden[:, 1:] |= ~self.kept[:, :-1]
        return self.inputs["input_ids"].masked_fill(hidden, -100)


def pad(
    rng: np.random.Generator,
    rows: list[list[int]],
    left: list[int],
    fill: np.ndarray,
    positions: str | None,
    hidden: int | None = None,
    side: str = "left",
) -> PaddedBatch:
    """left: padding in front of each row. fill: (B, L). the ids of padding. positions: how they are counted, None if
    they are not given. hidden: a row that the mask hides as a whole.
    """
    ids, kept, starts = fill.copy(), np.zeros(fill.shape, dtype=bool), np.zeros(fill.shape, dtype=bool)
    for row, tokens in enumerate(rows):
        ids[row, left[row] : left[row] + len(tokens)] = tokens
        kept[row, left[row] : left[row] + len(tokens)] = row != hidden
        starts[row, left[row]] = True
    inputs = {"input_ids": torch.from_numpy(ids)}
    columns = np.broadcast_to(np.arange(fill.shape[1]), fill.shape)
    without_mask = (kept.all() and rng.random() < 0.5) or (side == "right" and hidden is None and rng.random() < 0.15)
    if without_mask:  # then what looked like padding are tokens, too
        kept[:], starts[:], positions = True, columns == 0, "columns" if positions else None
    else:
        inputs["attention_mask"] = torch.from_numpy(kept).to(MASKS[rng.integers(len(MASKS))])
    counted = count_positions(rng, positions, kept, columns)
    if positions is not None:
        inputs["position_ids"] = torch.from_numpy(counted[:1] if positions == "one row" else counted)
    mask = inputs["attention_mask"].dtype if "attention_mask" in inputs else None
    kind = f"{side} padding, {mask=}, positions={positions}"
    return PaddedBatch(inputs, *map(torch.from_numpy, (kept, starts, counted)), kind)


def count_positions(rng: np.random.Generator, how: str | None, kept: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(B, L), int64. mask: from the first token that is kept, 0 or 1 at padding."""
    from_mask = np.where(kept, kept.cumsum(1) - 1, rng.integers(2))
    steps = rng.integers(1, 4, kept.shape[1]).cumsum()
    return {
        "mask": from_mask,
        "offset": from_mask + 3,
        "jumps": steps[from_mask],
    }.get(how or "", columns.copy())


def packed(rows: list[list[int]]) -> PaddedBatch:
    """The rows one after the other in a single one, without a mask."""
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[place for row in rows for place in range(len(row))]])
    inputs = {"input_ids": ids, "position_ids": positions}
    return PaddedBatch(inputs, torch.ones_like(ids, dtype=torch.bool), positions == 0, positions, "packed")


# Tiny models that see images, and padded batches of rows with images that they share, or nearly share.


IMAGE = 5  # id of a placeholder
IMAGE_START = 4  # of what stands before an image
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
DIM = 3 * 2 * 14 * 14  # of a patch of two frames
LARGER = {"vision_config": {"image_size": 56}}
DEEP_STACK = {"vision_config": {"deepstack_visual_indexes": [0, 1]}}
TILES = {**TOKEN, "image_grid_pinpoints": [[56, 28]]}


def of_family(
    name: str, inputs_of: Callable[..., Any], has_sizes: bool = False, types: str | None = None, **settings: Any
) -> Kind:
    """A family of docs/families.md. settings: further ones of its parts."""
    family = next(each for each in (*CORE_MULTIMODAL, *MULTIMODAL) if each.name == name)
    parts = {part: {**family.settings.get(part, {}), **own} for part, own in settings.items()}
    return Kind(family.model_class, {**family.settings, **TOKEN, **parts}, inputs_of, has_sizes, types)


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


GEMMA_4 = {"model_type": "gemma4_vision", "pooling_kernel_size": 2}
UNIFIED = {"patch_size": 14, "pooling_kernel_size": 1, "model_patch_size": 14, "output_proj_dims": 32}
# The last three: images that attend in both directions, in all layers, or in those with a window that is shorter than
# an image (Gemma 3), or longer than two images, beyond which these see each other (Gemma 4 unified).
KINDS = {
    "LLaVA": of_family("LLaVA", squares(28, 4)),
    "Qwen2.5-VL": of_family(
        "Qwen2.5-VL", patches(DIM), True, vision_config={"window_size": 56, "fullatt_block_indexes": [1]}
    ),
    "Qwen3-VL": of_family("Qwen3-VL", patches(DIM), True, **DEEP_STACK),
    "InternVL": of_family("InternVL", squares(56, 4), vision_config={"image_size": [56, 56]}),
    "Idefics3": of_family("Idefics3", of_rows(56, 4), **LARGER),
    "SmolVLM": of_family("SmolVLM", of_rows(56, 4), **LARGER),
    "Mistral 3": of_family("Mistral 3", with_sizes(56, 28), True, **LARGER),
    "Gemma 4": of_family("Gemma 4", on_pooled_patches(4, 2), True, vision_config=GEMMA_4),
    "Idefics2": of_family("Idefics2", of_rows(28, 4), perceiver_config={"resampler_n_latents": 4}),
    "LightOnOCR": of_family("LightOnOCR", with_sizes(56, 28), True),
    "Qwen2-VL": of_family("Qwen2-VL", patches(DIM), True, vision_config={"embed_dim": 32}),
    "Qwen3-VL-MoE": of_family(
        "Qwen3-VL-MoE", patches(DIM), True, **DEEP_STACK, text_config={"experts_implementation": "eager"}
    ),
    "LLaVA-NeXT": Kind("LlavaNextForConditionalGeneration", TILES, in_tiles(28, 16)),
    "LLaVA-OneVision": Kind("LlavaOnevisionForConditionalGeneration", TILES, in_tiles(28, 16)),
    **{name: of_family(name, squares(28, 1)) for name in ("Aya Vision", "Cohere 2 Vision", "GOT-OCR 2", "Qianfan-OCR")},
    **{name: of_family(name, squares(28, 4)) for name in ("DeepSeek-VL", "Janus", "Video-LLaVA")},
    "Step 3.7": of_family("Step 3.7", squares(28, 1)),
    **{
        name: of_family(name, patches(DIM), True)
        for name in ("Cohere Compass", "Cosmos 3 Omni", "GLM-4V", "GLM-4.5V", "GLM-4.6V", "GLM-OCR", "LFM3-VL")
    },
    **{name: of_family(name, patches(DIM), True) for name in ("MiniMax-M3, dense", "Qwen3.5", "Qwen3.5-MoE")},
    **{name: of_family(name, patches(DIM // 2), True) for name in ("Cosmos 3 Edge", "ERNIE 4.5 VL MoE")},
    "PaddleOCR-VL": of_family("PaddleOCR-VL", square_patches, True),
    "Kimi K2.5": Kind(
        "Kimi_K25ForConditionalGeneration", {**TOKEN, "projection_hidden_size": 32}, square_patches, True
    ),
    "Gemma 3": Kind(
        "Gemma3ForConditionalGeneration",
        {**TOKEN, "mm_tokens_per_image": 16, **LARGER, "text_config": {"sliding_window": 7}},
        squares(56, 16),
        types="token_type_ids",
    ),
    "Gemma 4, in both directions": of_family(
        "Gemma 4",
        on_pooled_patches(4, 2),
        True,
        "mm_token_type_ids",
        vision_config=GEMMA_4,
        text_config={"use_bidirectional_attention": "vision"},
    ),
    "Gemma 4 unified": of_family(
        "Gemma 4 unified",
        on_pooled_patches(4, 1),
        True,
        "mm_token_type_ids",
        vision_config={"model_type": "gemma4_unified_vision", **UNIFIED},
        text_config={"sliding_window": 33},
    ),
}


def image_batch_of(kind: Kind, rows: Sequence[Row], left: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """What a call of the model gets, and which places are kept, (B, L), bool."""
    entries, counts = kind.inputs_of([letters_of([row]) for row in rows])
    before = [IMAGE_START] if "image_grid_thw" in entries else []  # else Qwen takes two images for one
    ids = [
        [token for part in row for token in ([*before, *[IMAGE] * counts[part]] if isinstance(part, str) else [part])]
        for row in rows
    ]
    input_ids = filled(ids, "left" if left else "right")
    kept = input_ids != 0
    entries |= {"input_ids": input_ids, "attention_mask": kept.long()}
    types = "mm_token_type_ids" if "image_grid_thw" in entries else kind.types
    if types is not None:
        entries[types] = (input_ids == IMAGE).int()
    return entries, kept


# What a batch of a collator holds: its entries as Python values, and its predictions with their histories.
#
# Rows of which one has a weight that the loss cannot hold.


def as_python(value: Any) -> Any:
    """Tensors as dtype and numbers, records as what they have: to compare."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, TreeLayout):
        sections = {name: getattr(value, name).tolist() for name in SECTIONS}
        pieces = [value.sequences, value.paths, *value.pieces, *value.later]
        return {name: x for name, x in sections.items() if x} | {"pieces": [*map(of_piece, pieces)]}
    if isinstance(value, RadixInputs):
        tensors = {name: value.tensor(name) for name in value.sections if name != "plan"}
        known = {name: x for name, x in vars(value).items() if name not in ("host", "rows", "sections")}
        return {name: as_python(x) for name, x in {"layout": value.layout, **tensors, **known}.items() if has(x)}
    return {name: as_python(x) for name, x in value.items()} if isinstance(value, dict) else value


def of_piece(piece: Piece) -> list[Any]:
    """Queries and keys, each as its bounds and rows; the other fields follow from these."""
    sides = (piece.ragged.cu_seqlens_q, piece.q_rows), (piece.ragged.cu_seqlens_k, piece.k_rows)
    return [(bounds.tolist(), rows if isinstance(rows, slice) else rows.tolist()) for bounds, rows in sides]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Of a record, or whatever holds some of them and tensors: those that move with it."""
    leaves = [x.rows if isinstance(x, TreeLayout | RadixInputs) else x for x in tree_leaves(value)]
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def has(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) or value not in (None, False, ())


# Prompts of token ids as a padded batch, and what `model.generate` answers to each by itself.


GREEDY = {"do_sample": False, "pad_token_id": 0}
WITH_LOGITS = {"output_logits": True, "return_dict_in_generate": True}


def filled(rows: Sequence[Sequence[int]], side: str, filler: int = 0) -> Tensor:
    """(B, L), int64. Rows with padding on the right, on the left, or on both sides: one place on the left, the others
    on the right.
    """
    length = max(map(len, rows)) + (2 if side == "both" else 0)
    lefts = [{"right": 0, "both": 1, "left": length - len(row)}[side] for row in rows]
    pads = [[filler] * left for left in lefts]
    return torch.tensor([(pad + [*row] + [filler] * length)[:length] for pad, row in zip(pads, rows, strict=True)])


def padded(rows: Sequence[Sequence[int]], side: str) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, (B, L)."""
    return {"input_ids": filled(rows, side), "attention_mask": filled([[1] * len(row) for row in rows], side)}


def batch_of(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """As the tokenizer of a model that generates pads them: on the left."""
    return padded(prompts, "left")


def generated(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
    """What `radixtrain.generate` returns for a batch of prompts, greedily and with logits unless told otherwise."""
    from radixtrain import generate

    return generate(model, **batch_of(prompts), **{**GREEDY, **WITH_LOGITS, **options})


def by_generate(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """What `model.generate` returns for each prompt by itself."""
    return [model.generate(**batch_of([prompt]), **{**GREEDY, **WITH_LOGITS, **options}) for prompt in prompts]


def answers_of(sequences: Tensor, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The columns after the prompts."""
    return sequences[:, max(map(len, prompts)) :].tolist()  # type: ignore[no-any-return]


def worst_logit(found: Any, expected: Sequence[Any]) -> float:
    """The largest difference of a logit, for each size of the largest one, but at least of 1."""
    pairs = [
        (torch.stack([step[row] for step in found.logits]), torch.cat(each.logits)) for row, each in enumerate(expected)
    ]
    largest = max(1.0, *(theirs.abs().max().item() for _, theirs in pairs))
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs) / largest


def logits_by_the_model(model: Any, ids: Sequence[int]) -> Tensor:
    """(length, V), by an ordinary forward pass."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]


@contextmanager
def with_pieces_of(cells: int, max_rows: int = 16_384) -> Iterator[None]:
    """Inside, a few tokens are as many calls as a real batch.

    Tokens are shared from `cells` (query, key) pairs on, a pass of prompts has at most `max_rows` rows, and groups
    and strips of attention have a few.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixtrain.generation.prompt_cache.PIECE_CELLS", cells)
        patch.setattr("radixtrain.generation.prompt_cache.SPARE", 2)
        patch.setattr("radixtrain.generation.prefill.MAX_ROWS", max_rows)
        patch.setattr("radixtrain.kernels.cpu_loops.BUNDLE", 4)
        patch.setattr("radixtrain.kernels.cpu_loops.STRIP", 6)
        yield
