"""The arms of a step, by name: what a user would pick, and ours. Each has the head only on labelled tokens.

| name                     | what                                                                               |
|--------------------------|------------------------------------------------------------------------------------|
| `padded`                 | Hugging Face's `sdpa`, sorted by length, without a mask; torch chooses the backend |
| `padded/cudnn`, `/flash` | the same on a backend by name                                                      |
| `packed`                 | the sequences back to back in one row, varlen attention: flash-attn 4, 3 or 2 if   |
|                          | transformers finds them, otherwise the flash kernel inside torch                   |
| `packed/KERNEL`          | the same on a kernel of ours, by name                                              |
| `STRATEGY`               | ours: `cascade`, `path`, `expand`, `tree`, `auto`                                  |
| `STRATEGY/KERNEL`        | the same on a kernel by name                                                       |

A packed batch has `cu_seq_lens_q` as Hugging Face's own collator for flattening makes them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel, utils

from radixtrain.attention import choose_attention
from radixtrain.bench.cells import ModelShape
from radixtrain.bench.work import Arm, Work
from radixtrain.collators.features import token_rows
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.predicting_rows import PredictingRows, Targets
from radixtrain.hf.prepare import restore_model
from radixtrain.kernels.merge_attention import Piece, attention_in_pieces
from radixtrain.kernels.packages import package_missing
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel
from radixtrain.tree.radix_inputs import RADIX, RadixInputs

__all__ = [
    "BACKENDS",
    "PackedArm",
    "arm_named",
    "as_loaded",
    "chosen_backend",
    "is_rival",
    "packed_implementation",
    "packed_work",
    "sdpa_backend",
]

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, kw_only=True)
class InsideArm(Arm):
    """An arm whose step runs inside a context, of which each step makes a new one."""

    context: Callable[[], AbstractContextManager[Any]]

    def run_step(self, model: PreTrainedModel, work: Work) -> None:
        with self.context():
            super().run_step(model, work)


@dataclass(frozen=True, kw_only=True)
class PackedArm(Arm):
    """Hugging Face on the micro-batches of `packed_work`. implementation: an `attn_implementation` for packed rows."""

    implementation: str

    def prepare(self, model: PreTrainedModel) -> None:
        restore_model(model).set_attn_implementation(self.implementation)

    def loss_terms(self, model: PreTrainedModel, work: Work) -> Iterator[Tensor]:
        assert self.plain_head, "the shapes that are measured are Qwen3's"
        for batch in work.ordinary.micro_batches:
            inputs = {name: batch[name] for name in INPUTS}
            states = parts_of(model).backbone(**inputs, use_cache=False).last_hidden_state[0]
            rows = states.index_select(0, batch["radix"].predictor_indices)
            yield PredictingRows(rows, parts_of(model).head, Targets.of(batch)).loss_sum() / work.num_labels


def is_rival(name: str) -> bool:
    return name.partition("/")[0] in ("padded", "packed")


def arm_named(name: str, shape: ModelShape, device: torch.device) -> Arm:
    """The arm of that name. Raises UserError if it is unknown, cannot run here, or is what `padded` takes anyway."""
    way, _, kernel = name.partition("/")
    if way == "padded":
        return _padded_arm(kernel, shape, device)
    if way == "packed":
        choose_attention("expand", kernel or "auto", device, torch.bfloat16, shape.head_dim)
        return PackedArm(plain_head=True, implementation=packed_implementation(kernel, device))
    choose_attention(way, kernel or "auto", device, torch.bfloat16, shape.head_dim)
    return Arm(plain_head=True, attention=way, kernel=kernel or "auto")


def _padded_arm(backend: str, shape: ModelShape, device: torch.device) -> Arm:
    if not backend:
        return Arm(plain_head=True)
    if backend not in BACKENDS:
        raise UserError(f"a padded arm has one of the backends {', '.join(BACKENDS)}, got {backend!r}")
    if device.type != "cuda":
        raise UserError("backends are chosen on CUDA")
    if sdpa_backend(shape, device) == BACKENDS[backend].name:
        raise UserError("this is the backend that `padded` takes")
    return InsideArm(plain_head=True, context=partial(sdpa_kernel, BACKENDS[backend]))


def sdpa_backend(shape: ModelShape, device: torch.device) -> str:
    """The backend that torch takes for the `padded` arm."""
    config = shape.config()
    return chosen_backend(config.num_attention_heads, config.num_key_value_heads, shape.head_dim, device)


def chosen_backend(heads: int, key_heads: int, head_dim: int, device: torch.device) -> str:
    """The backend that torch takes for causal attention in bfloat16, as its enumeration names it."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.zeros(1, number, 128, head_dim, **options) for number in (heads, key_heads, key_heads))
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)).name


def packed_implementation(kernel: str, device: torch.device) -> str:
    """The `attn_implementation` of a packed arm: one of our kernels by name, or the fastest that transformers has."""
    if not kernel and device.type == "cuda":
        for version, package in {3: "flash_attn_3", 4: "flash_attn_4", 2: "flash_attn"}.items():
            available = getattr(utils, f"is_flash_attn_{version}_available", bool)  # older transformers: no version 4
            if available() and package_missing(package, device) is None:
                return f"flash_attention_{version}"
    name = f"{kernel or 'torch'}_varlen".replace("flash", "fa")  # transformers looks for a `flash` of its own
    attend = partial(varlen_attention, kernel=varlen_kernel(kernel or "torch", device))
    AttentionInterface.register(name, attend)
    return name


@torch.compiler.disable  # as ours is: compiling the arguments of a kernel gains nothing
def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    *,
    kernel: VarlenKernel,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of one packed row.

    query: (1, N, T, H). key, value: (1, K, T, H). cu_seq_lens_q: (B+1,), int32. Returns (1, T, N, H) and None.
    """
    assert attention_mask is None and cu_seq_lens_q is not None, "for packed batches only"
    heads = [x[0].transpose(0, 1) for x in (query, key, value)]
    ragged = Ragged(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, causal=True)
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling)
    everything = [Piece(slice(None), slice(None), ragged)]
    out = attention_in_pieces(*heads, everything, kernel, scoring)
    return out[None], None


def as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """The model as `build_model` made it, whatever arm it was prepared for."""
    restore_model(model).set_attn_implementation("sdpa")
    return model


def packed_work(work: Work) -> Work:
    """The same work, with the sequences of each ordinary micro-batch back to back instead of padded. On the host."""
    arrays = token_rows(work.features)
    batches = [_packed([arrays[index] for index in members]) for members in work.ordinary.members]
    return replace(work, ordinary=replace(work.ordinary, micro_batches=batches))


def _packed(arrays: Sequence[TokenRow]) -> dict[str, Any]:
    """One row of sequences back to back: positions from 0 in each, and the labelled tokens as predictions."""
    lengths = [len(feature.input_ids) for feature in arrays]
    labels = np.concatenate([np.concatenate([[IGNORE_INDEX], feature.labels[1:]]) for feature in arrays])
    (places,) = np.nonzero(labels != IGNORE_INDEX)
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return {
        "input_ids": torch.from_numpy(np.concatenate([feature.input_ids for feature in arrays]))[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu_seqlens),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths)),
        "shift_labels": torch.from_numpy(labels[places])[None],
        RADIX: RadixInputs.of(
            cu_seqlens=cu_seqlens,
            predictor_indices=torch.from_numpy(places - 1),
            prediction_rows=torch.arange(len(places)),
            loss_weights=torch.ones(len(places)),
        ),
    }
