"""The arms of a step, by name: what a user would pick, and ours. Each has the head only on labelled tokens.

| name              | what                                                                                      |
|-------------------|-------------------------------------------------------------------------------------------|
| `padded/BACKEND`  | Hugging Face's `sdpa` on a backend of `BACKENDS`, sorted by length, without a mask        |
| `packed/KERNEL`   | the sequences back to back in one row, varlen attention on a kernel of `radixtrain`       |
| `STRATEGY/KERNEL` | ours: `cascade`, `path` or `expand`, on a kernel of `radixtrain`; `tree/flex` has its own |

Every name has its kernel, since what `auto` takes depends on what is installed. A packed batch has `cu_seq_lens_q` as
Hugging Face's own collator for flattening makes them, and is cut by tokens as ours is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from step import Arm, ModelShape, Work
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from radixtrain.attention import choose_attention
from radixtrain.collators.features import token_rows
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.predicting_rows import PredictingRows, Targets
from radixtrain.hf.share import restore_model
from radixtrain.kernels.merge_attention import Piece, Route, routed_attention
from radixtrain.kernels.varlen import varlen_kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel
from radixtrain.tree.radix_inputs import RADIX, RadixInputs

__all__ = [
    "BACKENDS",
    "PackedArm",
    "arm_named",
    "as_loaded",
    "compiled",
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
            yield PredictingRows(rows, parts_of(model).head, Targets.of(batch)).loss_sum() / work.radix.num_labels


@dataclass(frozen=True)
class Compiler:
    """A backend of torch.compile for one arm.

    torch.compile reuses code that was compiled for an equal backend, and has no guard on the backend of `sdpa`: with
    one for all arms, a second padded arm would run the kernel of the first.
    """

    arm: str
    backend: str

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return torch._dynamo.lookup_backend(self.backend)(*inputs, **options)


@dataclass(frozen=True, kw_only=True)
class CompiledArm(Arm):
    """An arm whose layers torch.compile has compiled. dynamic: one code for all sizes, or one for each."""

    arm: Arm
    compiler: Compiler
    dynamic: bool

    def prepare(self, model: PreTrainedModel) -> None:
        self.arm.prepare(model)
        for layer in parts_of(model).decoder.layers:
            layer.compile(backend=self.compiler, dynamic=self.dynamic)

    def run_step(self, model: PreTrainedModel, work: Work) -> None:
        self.arm.run_step(model, work)


def compiled(name: str, arm: Arm, device: torch.device) -> CompiledArm:
    """The arm with compiled layers: a padded one for each of its sizes, which are few and the same in every step."""
    torch._dynamo.config.recompile_limit = 64  # all arms are entries of one code, and the limit would be 8
    compiler = Compiler(name, "inductor" if device.type == "cuda" else "eager")
    dynamic = not name.startswith("padded")
    return CompiledArm(plain_head=True, attention=arm.attention, arm=arm, compiler=compiler, dynamic=dynamic)


def is_rival(name: str) -> bool:
    return name.partition("/")[0] in ("padded", "packed")


def arm_named(name: str, shape: ModelShape, device: torch.device) -> Arm:
    """The arm of that name. Raises UserError if it is unknown, names no kernel or cannot run here."""
    way, _, kernel = name.partition("/")
    if "auto" in (way, kernel) or not kernel:
        raise UserError(f"an arm names its kernel, as cascade/torch or padded/cudnn; got {name!r}")
    if way == "padded":
        return _padded_arm(kernel, device)
    kernel = "auto" if name == "tree/flex" else kernel
    choose_attention("expand" if way == "packed" else way, kernel, device, torch.bfloat16, shape.head_dim)
    if way == "packed":
        return PackedArm(plain_head=True, implementation=packed_implementation(kernel, device))
    return Arm(plain_head=True, attention=way, kernel=kernel)


def _padded_arm(backend: str, device: torch.device) -> Arm:
    if backend not in BACKENDS:
        raise UserError(f"a padded arm has one of the backends {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "cudnn" and device.type != "cuda":
        raise UserError("cuDNN needs CUDA")
    return InsideArm(plain_head=True, context=partial(sdpa_kernel, BACKENDS[backend]))


def sdpa_backend(shape: ModelShape, device: torch.device) -> str:
    """The backend that torch chooses for causal attention without a mask, as its enumeration names it."""
    config = shape.config()
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    qkv = [torch.zeros(1, number, 128, shape.head_dim, **options) for number in heads]
    return SDPBackend(torch._fused_sdp_choice(*qkv, is_causal=True, enable_gqa=True)).name


def packed_implementation(kernel: str, device: torch.device) -> str:
    """An `attn_implementation` for packed rows on this kernel."""
    name = f"{kernel}_varlen".replace("flash", "fa")  # transformers looks for a `flash` of its own
    AttentionInterface.register(name, partial(varlen_attention, kernel=varlen_kernel(kernel, device)))
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
    return routed_attention(*heads, Route(everything, kernel, scoring))[None], None


def as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """The model as `build_model` made it, whatever arm it was prepared for."""
    restore_model(model).set_attn_implementation("sdpa")
    for layer in parts_of(model).decoder.layers:
        layer._compiled_call_impl = None
    return model


def packed_work(work: Work, max_tokens: int | None = None) -> Work:
    """The same work with the sequences back to back, on the host.

    max_tokens: of a micro-batch. Sequences are cut as ours are, by the same collator: for it nothing is shared.
    """
    alone = [
        {**feature, "input_ids": np.append(index, feature["input_ids"][1:])}
        for index, feature in enumerate(work.features)
    ]
    members, arrays = StepCollator(max_tokens=max_tokens)(alone).members, token_rows(work.features)
    batches = [_packed([arrays[index] for index in group]) for group in members]
    return replace(work, ordinary=replace(work.ordinary, micro_batches=batches, members=members))


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
