"""What a user would pick instead: Hugging Face on padded batches, and on packed ones with varlen attention.

`padded` is an `Arm` without a strategy: `sdpa` without a mask, which is its flash kernel, on sequences sorted by
length. `packed` has no padding: the sequences of a batch are back to back in one row, and Hugging Face's layers receive
`cu_seq_lens_q` as its own collator for flattening makes them. It runs on flash-attn 3, 4 or 2 if one is installed, and
without any on the varlen flash kernel inside torch, registered as an attention function of its own. Both arms
have the head only on labelled tokens, and the fused loss of `fit`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from radixtrain.bench.work import Arm, Work
from radixtrain.collators.features import IGNORE_INDEX, FeatureArrays, all_feature_arrays
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.predicting_rows import PredictingRows, Targets
from radixtrain.hf.prepare import restore_model
from radixtrain.kernels.merge_attention import Piece, attention_in_pieces
from radixtrain.kernels.packages import package_missing
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring
from radixtrain.tree.layout import LOSS_WEIGHTS, PREDICTION_ROWS, PREDICTOR_INDICES

__all__ = ["PackedArm", "as_loaded", "packed_implementation", "packed_work"]

TORCH_VARLEN = "torch_varlen"  # the name under which transformers finds `torch_varlen_attention`
INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, kw_only=True)
class PackedArm(Arm):
    """Hugging Face on the micro-batches of `packed_work`. implementation: of `packed_implementation`."""

    implementation: str

    def __str__(self) -> str:
        return "packed"

    def prepare(self, model: PreTrainedModel) -> None:
        restore_model(model).set_attn_implementation(self.implementation)

    def loss_terms(self, model: PreTrainedModel, work: Work) -> Iterator[Tensor]:
        assert self.plain_head, "the shapes that are measured are Qwen3's"
        for batch in work.ordinary.micro_batches:
            inputs = {name: batch[name] for name in INPUTS}
            states = parts_of(model).backbone(**inputs, use_cache=False).last_hidden_state[0]
            rows = states.index_select(0, batch[PREDICTOR_INDICES])
            yield PredictingRows(rows, parts_of(model).head, Targets.of(batch)).loss_sum() / work.num_labels


def packed_implementation(device: torch.device) -> str:
    """The `attn_implementation` of the packed arm: the fastest flash-attention that is installed, or torch's own."""
    found = {3: is_flash_attn_3_available(), 4: is_flash_attn_4_available(), 2: is_flash_attn_2_available()}
    for version, kernel in {3: "flash_attn_3", 4: "flash_attn_4", 2: "flash_attn"}.items():
        if device.type == "cuda" and found[version] and package_missing(kernel, device) is None:
            return f"flash_attention_{version}"
    AttentionInterface.register(TORCH_VARLEN, torch_varlen_attention)
    return TORCH_VARLEN


def torch_varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of one packed row, on the flash kernel inside torch.

    query: (1, N, T, H). key, value: (1, K, T, H). cu_seq_lens_q: (B+1,), int32. Returns (1, T, N, H) and None.
    """
    assert attention_mask is None and cu_seq_lens_q is not None, "for packed batches only"
    heads = [x[0].transpose(0, 1) for x in (query, key, value)]
    ragged = Ragged(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, causal=True)
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling)
    everything = [Piece(slice(None), slice(None), ragged)]
    out = attention_in_pieces(*heads, everything, varlen_kernel("torch", query.device), scoring)
    return out[None], None


def as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """The model as `build_model` made it, whatever arm it was prepared for."""
    restore_model(model).set_attn_implementation("sdpa")
    return model


def packed_work(work: Work) -> Work:
    """The same work, with the sequences of each ordinary micro-batch back to back instead of padded. On the host."""
    arrays = all_feature_arrays(work.features)
    batches = [_packed([arrays[index] for index in members]) for members in work.ordinary.members]
    return replace(work, ordinary=replace(work.ordinary, micro_batches=batches))


def _packed(arrays: Sequence[FeatureArrays]) -> dict[str, Any]:
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
        PREDICTOR_INDICES: torch.from_numpy(places - 1),
        PREDICTION_ROWS: torch.arange(len(places)),
        LOSS_WEIGHTS: torch.ones(len(places)),
    }
