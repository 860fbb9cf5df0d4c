"""Steps on a CUDA device without values, each a case: `main` prints what happened to each of a group.

A line has the `name` of the case, and `waits`, how often which function of ours waited for the device, or `error` and
`where`, what went wrong. `device.py` starts it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import peft
import torch
from inductor import SHARED, compile_without_running
from torch import nn
from torch.utils._python_dispatch import _pop_mode_temporarily
from transformers import AutoModelForCausalLM, Qwen3Config
from watch import DEVICE, FakeCUDA, Waits, move_module, moved

from radixtrain import RadixCollator, build_prefix_plan, share_prefixes, sharing_report
from radixtrain.attention import EVERYWHERE, tree_attention
from radixtrain.collators.steps import StepCollator
from radixtrain.hf.guards import code
from radixtrain.hf.padded import causes
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.kernels import functions
from radixtrain.kernels.merge_attention import fold_sinks, merge_piece
from radixtrain.loss import linear_cross_entropy
from radixtrain.testing import free_forks
from radixtrain.training.module import RadixModule
from radixtrain.tree.layout import TreeLayout
from radixtrain.verification.equivalence import verify_equivalence
from tests.support.models import tiny_hybrid, tiny_model, tiny_qwen3

code.KNOWN |= {__name__, "watch"}  # its modes, and the mistakes below
BF16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16
NESTED = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [2, 2, 1], [2, 2, 3, 3], [2, 2, 3, 4], [5, 1]]
FEATURES = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in NESTED]
Context = AbstractContextManager[Any]
Case = Callable[[], dict[str, int]]


def step(model: Any, batch: dict[str, Any], forward: Context | None = None, scaled: bool = False, fused: bool = True):
    """Forward, backward, clipping and AdamW. Every gradient must be on the device, in the dtype of its weight."""
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, waits = torch.optim.AdamW(trained, fused=fused), Waits()
    with model.mode, waits:
        with forward or nullcontext():
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert all(each.grad.is_cuda and each.grad.dtype == each.dtype for each in trained)
    return dict(waits.counts)


def on_device(model: Any, dtype: torch.dtype) -> Any:
    mode = FakeCUDA()
    model = move_module(model.to(dtype).train(), mode)
    model.mode = mode
    return model


def radix(model: Any, dtype: torch.dtype = BF16, attention: str = "auto", recompute: bool = False, **how: Any):
    """A step of a batch of a `RadixCollator`."""
    batch = RadixCollator()(FEATURES)
    model = share_prefixes(on_device(model, dtype), attention=attention)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with free_forks() if hasattr(model, "hybrid") else nullcontext():
        return step(model, moved(dict(batch), model.mode), **how)


def hybrid(kind: str) -> Any:
    model = tiny_hybrid(kind)
    model.hybrid = True
    return model


def lora() -> Any:
    return peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(target_modules="all-linear", r=2))


def mixed(dtype: torch.dtype) -> Context:
    return torch.autocast("cuda", dtype=dtype)


def attended(head_dim: int, num_rows: int = 600) -> dict[str, int]:
    """A layer of grouped heads on more than a block of rows, or on fewer."""
    mode, waits = FakeCUDA(), Waits()
    plan = build_prefix_plan(list(range(num_rows)), [0, num_rows])
    layout = moved(TreeLayout.from_plan(plan), mode)
    with mode, waits:
        heads = [torch.zeros(num_rows, n, head_dim, dtype=BF16, device="cuda:0", requires_grad=True) for n in (8, 2, 2)]
        tree_attention(*heads, layout, attention="tree").sum().backward()
    return dict(waits.counts)


def merged(rows: slice | None = None, sinks: bool = False) -> dict[str, int]:
    """Two pieces of bfloat16 become one, or a piece and sinks, on three numbers of rows."""
    with FakeCUDA(), Waits():
        for number in (600, 700, 1000):
            out, lse = torch.zeros(number, 16, 128, dtype=BF16, device=DEVICE), torch.zeros(16, number, device=DEVICE)
            if sinks:
                functions.fused(fold_sinks, out, lse.t(), torch.zeros(16, dtype=BF16, device=DEVICE))
            else:
                indices = torch.zeros(500, dtype=torch.int64, device=DEVICE)
                merge_piece(out, lse, indices if rows is None else rows, out[:500].clone(), lse[:, :500].clone())
    return {}


def head_and_loss(dtype: torch.dtype) -> dict[str, int]:
    """Of two chunks of rows: they are of one size or not, and compiled once."""
    mode, waits = FakeCUDA(), Waits()
    with mode, waits, torch.device(DEVICE):
        hidden, weight = (torch.zeros(n, 64, dtype=dtype, requires_grad=True) for n in (3000, 151_936))
        rows = torch.zeros(3000, dtype=torch.int64)
        linear_cross_entropy(hidden, weight, rows, rows, torch.ones(3000)).backward()
    return dict(waits.counts)


def step_of_fit(forward: Context | None = None, dtype: torch.dtype = FLOAT32, **collator: Any) -> dict[str, int]:
    """`RadixModule.take_step`: micro-batches, the loss fused with the head, clipping, AdamW, the schedule."""
    model = share_prefixes(on_device(tiny_qwen3(), dtype))
    module: Any = RadixModule("unused")
    module.model, module.plain_head = model, True
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    vars(module).update(optimizers=lambda: optimizer, lr_schedulers=lambda: scheduler)
    vars(module).update(manual_backward=lambda loss: loss.backward(), log_dict=lambda *_, **__: None)
    RadixModule.device = torch.device("cuda:0")
    given = StepCollator(max_tokens=12, **collator)(FEATURES)
    given.micro_batches = moved(given.micro_batches, model.mode)
    waits = Waits()
    with model.mode, waits, forward or nullcontext():
        module.training_step(given, 0)
    return dict(waits.counts)


def llava() -> Any:
    """A model that takes images, whose tower stays as it is."""
    model = tiny_model("LlavaForConditionalGeneration").requires_grad_(False)
    model.model.language_model.requires_grad_(True)
    return model


def padded(model: Any, **options: Any) -> dict[str, int]:
    """A step of `share_prefixes`. The plan is made of token ids, which the fakes lack: it gets those of the test."""
    width = max(map(len, NESTED))
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in NESTED])
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in NESTED])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    arrays, read = {"ids": ids.numpy(), "mask": mask.numpy()}, causes._on_host
    causes._on_host = lambda planes: (read(planes), arrays)[1]
    try:
        model = share_prefixes(on_device(model, BF16), min_ratio=1.0, **options)
        waits = step(model, moved(batch, model.mode))
        assert sharing_report(model).num_shared == 1
        return waits
    finally:
        causes._on_host = read


def verified() -> dict[str, int]:
    """That it runs, in float64 too; it may wait as it likes."""
    model = on_device(tiny_qwen3(), BF16)
    with model.mode, Waits():
        verify_equivalence(model, FEATURES, kernel="torch")  # which takes no float64 on CUDA
    return {}


def launches(attention: str) -> dict[str, int]:
    """Of a step of Qwen3-0.6B on 32 sequences of 2,048 shared and 256 own tokens, in a layer and beside the layers."""
    own = np.arange(32 * 256).reshape(32, 256) + 2048
    features = [{"input_ids": np.append(range(2048), ids), "labels": np.append([-100] * 2048, ids)} for ids in own]
    with FakeCUDA() as mode, torch.device(DEVICE):
        config = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
        configs = [Qwen3Config(num_hidden_layers=number, **config, **heads) for number in (1, 2)]
        models = [AutoModelForCausalLM.from_config(each, dtype=BF16) for each in configs]
    batch = moved(RadixCollator(merge_labels=True)(features), mode)
    for model in models:
        share_prefixes(model, attention=attention)
    with mode:
        one, two = (_launches(lambda model=model: forward_rows(model, batch, True).loss_sum()) for model in models)
    return {"a layer": two - one, "beside the layers": 2 * one - two}


def _launches(loss: Callable[[], torch.Tensor]) -> int:
    def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor) -> Any:
            seen.launches += 1
            with _pop_mode_temporarily():
                return function(*tensors)

        return run

    vars(functions)["_compiled"] = one_kernel
    with Waits() as seen:
        loss().backward()
    return seen.launches


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * grad.sum().item()


def mistaken(change: Callable[[Any, Any, Any], Any]) -> dict[str, int]:
    """A step whose attention is changed. change: module, arguments and output of the first attention -> its output."""
    model = tiny_qwen3()
    projection = model.model.layers[0].self_attn.o_proj
    forward = projection.forward
    projection.forward = lambda x: change(projection, (x,), forward(x))
    return radix(model)


MISTAKES: dict[str, Any] = {
    "another device": lambda _, args, out: out + torch.ones(out.shape[-1], dtype=out.dtype),
    "another dtype": lambda _, args, out: torch.nn.functional.linear(out, torch.eye(32, device="cuda:0")),
    "a value": lambda _, args, out: out * out.detach().sum().item(),
    "a shape": lambda _, args, out: out + out.detach().nonzero().sum(),
    "a copy": lambda _, args, out: out + torch.ones(out.shape[-1], dtype=out.dtype).to("cuda:0"),
    "backward": lambda _, args, out: Reads.apply(out),
}
WIDER = {"head_dim": 16}  # FlexAttention takes no narrower heads
FAMILIES = ("Qwen3Moe", "Gemma3", "Gemma2", "GptOss", "Mistral")  # routed; windows; soft-cap; sinks and windows; window
GROUPS: dict[str, dict[str, Case]] = {
    "strategies": {
        **{name: lambda name=name: radix(tiny_qwen3(), attention=name) for name in EVERYWHERE},
        "float32": lambda: radix(tiny_qwen3(), FLOAT32),
        "AdamW for each": lambda: radix(tiny_qwen3(), fused=False),
        "recomputed": lambda: radix(tiny_qwen3(), recompute=True),
        "bf16-mixed": lambda: radix(tiny_qwen3(), FLOAT32, forward=mixed(BF16), recompute=True),
        "float16 with a loss scale": lambda: radix(tiny_qwen3(), FLOAT32, forward=mixed(FLOAT16), scaled=True),
        "LoRA": lambda: radix(lora(), FLOAT32, forward=mixed(BF16)),
        **{name: lambda name=name: radix(tiny_model(f"{name}ForCausalLM")) for name in FAMILIES},
        **{name: lambda name=name: radix(hybrid(name)) for name in ("Qwen3.5", "Bamba", "LFM2")},
    },
    "commands": {
        "fit": lambda: step_of_fit(dtype=BF16),
        "fit bf16-mixed": lambda: step_of_fit(mixed(BF16)),
        "fit, labels not merged": lambda: step_of_fit(dtype=BF16, merge_labels=False),
        "share_prefixes": lambda: padded(tiny_qwen3()),
        "share_prefixes, path": lambda: padded(tiny_qwen3(), attention="path"),
        "share_prefixes, Qwen3.5": lambda: padded(hybrid("Qwen3.5")),
        "share_prefixes, text in LLaVA": lambda: padded(llava()),
        "verify": verified,
    },
    "launches": {name: lambda name=name: launches(name) for name in ("cascade", "path", "expand")},
    "compiled": {
        "tree": lambda: radix(tiny_qwen3(**WIDER), attention="tree"),
        "tree in float32, recomputed": lambda: radix(tiny_qwen3(**WIDER), FLOAT32, "tree", recompute=True),
        "bf16-mixed tree": lambda: radix(tiny_qwen3(**WIDER), FLOAT32, "tree", forward=mixed(BF16)),
        "windows and sinks": lambda: radix(tiny_model("GptOssForCausalLM", **WIDER), attention="tree"),
        **{f"heads of {dim}": lambda dim=dim: attended(dim) for dim in (128, 256)},
        "fewer rows than a block": lambda: attended(128, 71),
        **{f"the loss in {dtype}": lambda dtype=dtype: head_and_loss(dtype) for dtype in (BF16, FLOAT32)},
        "a merge of a slice": lambda: merged(slice(100, 600)),
        "a merge of indices": lambda: merged(),
        "a merge of sinks": lambda: merged(sinks=True),
    },
    "mistakes": {name: lambda change=change: mistaken(change) for name, change in MISTAKES.items()},
}


def main(group: str) -> None:
    """Print a line for each case of the group. The kernels of one that is compiled go into its line."""
    if group == "compiled":
        compile_without_running()
    for name, case in GROUPS[group].items():
        torch.compiler.reset()
        SHARED.clear()
        try:
            found: dict[str, Any] = {"launches" if group == "launches" else "waits": case(), "shared": list(SHARED)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
        print(json.dumps({"name": name, **found}))
