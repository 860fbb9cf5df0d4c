"""Names of other libraries that begin with an underscore, and so may go in any release: all that we use, in one table.

After an upgrade `test_it_is_still_there` says which file lost what. A new use must be entered here.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from accelerate.hooks import ModelHook, add_hook_to_module
from lightning.pytorch.loggers import WandbLogger
from torch import nn
from transformers import LlamaConfig, LlamaModel, PretrainedConfig, PreTrainedModel

from radixtrain.versions import installed
from tests.pages import ROOT

# Module -> the distribution that brings it, of those that may be missing. Two own `flash_attn`.
OPTIONAL = {
    "flash_attn.flash_attn_interface": "flash-attn",
    "flash_attn.cute": "flash-attn-4",
    "flash_attn_3": "flash-attn-3",
}
# By file of ours: the names that it uses, dotted from their package on, and what each does there.
TABLE: dict[str, dict[str, str]] = {
    "collators/misuse_guard.py": {
        "sys._getframe": (
            "reads which loader asks for a batch, which trainer calls the model, and whether generate() does"
        ),
    },
    "kernels/cpu_loops.py": {
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": (
            "is flash attention on a CPU, and returns the log-sum-exp"
        ),
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": (
            "is its backward pass, with a merged log-sum-exp"
        ),
    },
    "kernels/efficient.py": {
        "torch.ops.aten._efficient_attention_forward": "takes float32 and any head dim, and returns the log-sum-exp",
        "torch.ops.aten._efficient_attention_backward": "is its backward pass, with a merged log-sum-exp",
    },
    "kernels/functions.py": {
        "torch._dynamo.mark_static": "makes the length of a row a constant of what is compiled for any number of rows",
        "torch._C._functorch.is_legacy_batchedtensor": "says whether a gradient is several, of is_grads_batched=True",
    },
    "kernels/flash.py": {
        "torch.ops.aten._scaled_dot_product_cudnn_attention": "is cuDNN's, and returns the log-sum-exp",
        "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": "is its backward pass, with a merged one",
        "torch.ops.aten._flash_attention_forward": "is flash attention on CUDA, and returns the log-sum-exp",
        "torch.ops.aten._flash_attention_backward": "is its backward pass, with a merged log-sum-exp",
        "flash_attn.flash_attn_interface._flash_attn_varlen_forward": (
            "is flash attention over sequences of any length, and returns the log-sum-exp"
        ),
        "flash_attn.flash_attn_interface._flash_attn_varlen_backward": (
            "is its backward pass, with a merged log-sum-exp"
        ),
        "flash_attn_3._C": "registers the operators of flash-attention 3 with torch",
        "flash_attn.cute.interface._flash_attn_fwd": "is flash attention in CuTe, and returns the log-sum-exp",
        "flash_attn.cute.interface._flash_attn_bwd": "is its backward pass, with a merged log-sum-exp",
    },
    "radixtrain/__main__.py": {
        "triton._C.libtriton": (
            "is looked at, if it is loaded: built with nanobind, it lists as leaks what a process leaves at its end"
        ),
    },
    "radixtrain/commands/loggers.py": {
        "lightning.pytorch.loggers.WandbLogger._id": "is the run at Weights & Biases, which a resumed run continues",
        "lightning.pytorch.loggers.WandbLogger._wandb_init": "are the arguments with which that run begins",
    },
    "radixtrain/data/workers.py": {
        "multiprocessing.context.ForkProcess._Popen": "makes the process of a worker",
        "multiprocessing.popen_fork.Popen._launch": "forks, which is tried again",
        "multiprocessing.process.BaseProcess._bootstrap": "is the first that a worker runs",
        "multiprocessing.queues.Queue._on_queue_feeder_error": "hears of a batch that a worker cannot hand over",
        "os._exit": "ends a worker whose run was killed",
    },
    "radixtrain/hf/attention_interface.py": {
        "transformers.PretrainedConfig._attn_implementation": "names the attention of a model",
        "torch.nn.Module._parameters": "says in every layer whether it has sinks, without a call of Python",
    },
    "radixtrain/hf/guards/draws.py": {
        "torch.utils._python_dispatch._disable_current_modes": "no mode counts or fakes how generators are compared",
    },
    "radixtrain/hf/guards/model.py": {
        "torch.utils._python_dispatch._disable_current_modes": "no mode counts the operations of a trial",
        "torch._subclasses.fake_tensor.FakeTensor": "has no values, so a model of such tensors is not tried",
        "torch.Tensor._backward_hooks": "tells parameters with a user's hook, which may see no gradient of a trial",
    },
    "radixtrain/hf/guards/rules.py": {
        "transformers.PretrainedConfig._attn_implementation": "names the attention of a model",
    },
    "radixtrain/hf/hooks.py": {
        "torch._dynamo.config": "has the compiler look at the hooks of a model, so that two of one class are not one",
        "torch._dynamo.maybe_mark_dynamic": "keeps the second batch from compiling layers again",
        "torch.nn.Module._forward_pre_hooks": ("finds our hooks, on copies of a head too, and a user's"),
        "torch.nn.Module._forward_pre_hooks_with_kwargs": "is the option of a hook, which goes with it",
        "torch.nn.Module._forward_hooks": "finds our hooks, and a user's, which empty a cache",
        "torch.nn.Module._forward_hooks_with_kwargs": "is the option of a hook, which goes with it",
        "torch.nn.Module._forward_hooks_always_called": "is the option of a hook, which goes with it",
    },
    "radixtrain/hf/padded/calls.py": {"torch.nn.Module._is_replica": "tells a copy that DataParallel made"},
    "radixtrain/hf/padded/causes.py": {
        "torch.utils._pytree": "makes the masks that wait, one or several, for a call unshared",
        "torch.Tensor._backward_hooks": "says whether someone waits for the gradient of embeddings",
        "torch._C._will_engine_execute_node": "says whether torch.autograd.grad asks for the gradient of embeddings",
    },
    "radixtrain/hf/padded/row_functions.py": {
        "torch.utils._pytree": "finds the tensors among the arguments of a function",
        "torch.Tensor._is_view": "says of a tensor without memory whether a function made a view or a copy",
        "trl.trainer.utils._ChunkedLogProbFunction": "scores hidden states without calling the head",
    },
    "radixtrain/hf/pictures.py": {
        "torch.nn.Module._backward_hooks": "tells whether someone reads a gradient before the text decoder",
        "torch.nn.Module._backward_pre_hooks": "tells whether someone reads a gradient before the text decoder",
    },
    "radixtrain/hf/backbone.py": {
        "transformers.PreTrainedModel._gradient_checkpointing_func": (
            "computes a layer again, without the layer's hooks, and may be a user's"
        ),
    },
    "radixtrain/hf/padded/spread_rows.py": {
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "the ordinary tensor is made for all",
        "torch.utils._python_dispatch._disable_current_modes": "no mode counts or fakes how it is made",
        "torch._C._autograd._top_saved_tensors_default_hooks": "says whether a checkpoint counts what is saved",
        "torch.utils._pytree": "finds the tensors among the arguments of a function",
        "torch.Tensor._make_wrapper_subclass": "makes a tensor without memory, which stands for rows of a table",
        "torch.Tensor._version": "tells whether hidden states or logits were changed in place",
        "torch._functorch.utils.unwrap_dead_wrappers": "is what every autograd.Function does with what it gets",
        "torch._C._are_functorch_transforms_active": "says whether torch.func transforms what reads the tensor",
        "torch._C._set_throw_on_mutable_data_ptr": "makes an error of C code that takes the memory of such a tensor",
        "torch._C.DisableTorchFunctionSubclass": "asks such a tensor for its shape and dtype",
    },
    "radixtrain/hf/guards/batch.py": {
        "torch.nn.Module._is_replica": "tells a copy that DataParallel made",
        "torch.nn.Module._parameters": "finds the modules that hold a shared matrix",
    },
    "radixtrain/hf/guards/code.py": {
        **dict.fromkeys(
            ("torch.nn.Module._call_impl", "torch.nn.Module._compiled_call_impl"),
            "are called in place of `forward` if an instance has one of its own",
        ),
        "torch.nn.Module._modules": "walks thousands of modules at every call, in less time than `modules()`",
        "transformers.PretrainedConfig._attn_implementation": "names the attention of each part of a model",
        "transformers.PretrainedConfig._experts_implementation": "names the function that the experts of a model call",
        **dict.fromkeys(
            ("torch.nn.Module._forward_pre_hooks", "torch.nn.Module._forward_hooks"),
            "tells third-party hooks, which a fused head would not run, which empty a cache and see unique tokens",
        ),
        **dict.fromkeys(
            ("torch.nn.Module._backward_pre_hooks", "torch.nn.Module._backward_hooks"),
            "tells third-party hooks, which a fused head would not run and which see unique tokens",
        ),
        "torch.nn.Identity._hf_hook": "is the hook of Accelerate's that a `forward` runs",
        "torch.overrides._get_current_function_mode_stack": "tells third-party modes, which see unique tokens",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "tells third-party modes of the other kind",
        "torch._C._functorch.maybe_current_level": (
            "says whether torch.func transforms the model, whose tensors have no memory to read"
        ),
        "torch.autograd.forward_ad._current_level": "says whether forward-mode differentiation runs",
    },
    "radixtrain/data/steps.py": {
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": (
            "ends the workers with their run; Python may collect the circle that holds their loader much later"
        ),
    },
    "radixtrain/hf/windows.py": {
        "torch.utils._python_dispatch._disable_current_modes": "no mode counts or fakes what is asked of a mask",
    },
    "radixtrain/tree/layout.py": {
        "torch.utils._python_dispatch._disable_current_modes": "no mode fakes the numbers of a plan",
    },
    "radixtrain/loss.py": {
        "torch._C._functorch.is_batchedtensor": (
            "says whether a batch of gradients is computed, which needs what was saved"
        ),
        "torch._C._autograd._get_current_graph_task_keep_graph": (
            "says whether this is under retain_graph, which needs what was saved"
        ),
    },
    "radixtrain/training/devices/launch.py": {
        "os._exit": "ends a rank whose run has ended",
    },
    "radixtrain/training/fault_tolerance/signals.py": {
        "os._exit": "ends the process at once after a second signal",
    },
    "radixtrain/training/start/loading.py": {
        "transformers.PreTrainedModel._can_set_experts_implementation": (
            "says whether experts can run as a loop, which float64 needs"
        ),
    },
    "radixtrain/verification/oracle.py": {
        "transformers.PretrainedConfig._attn_implementation": "names the attention of a model",
        "transformers.PretrainedConfig._experts_implementation": "names how experts run, and sets it back",
        "transformers.PreTrainedModel._can_set_experts_implementation": (
            "says whether experts can run as a loop, which float64 needs"
        ),
        "torch.autograd.graph._engine_run_backward": "runs the backward pass under the mode that lifts casts",
        "torch.nn.Module._buffers": "puts buffers back that a forward pass replaced",
    },
}


def checkpointed_layer() -> nn.Module:
    """A decoder layer of a model with activation checkpointing; the model itself has the attribute too."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=1))
    model.gradient_checkpointing_enable()
    return model.layers[0]


# What has an attribute only on instances. A copy of DataParallel has all of a module's, and one more.
INSTANCES: dict[Any, Callable[[], Any]] = {
    nn.Module: lambda: nn.Linear(1, 1)._replicate_for_data_parallel(),
    nn.Identity: lambda: add_hook_to_module(nn.Identity(), ModelHook()),
    PretrainedConfig: PretrainedConfig,
    PreTrainedModel: checkpointed_layer,
    WandbLogger: lambda: WandbLogger(offline=True),
}

PRIVATE = re.compile(r"_[A-Za-z]\w*")  # not dunder names, which Python documents
OUR_MARK = "_radix"  # attributes that we set on objects of others
DOCUMENTED = {"_asdict", "_fields", "_replace"}  # of a NamedTuple, whose methods all begin with an underscore


def privates_of(name: str) -> set[str]:
    return {part for part in name.split(".") if PRIVATE.fullmatch(part)}


def resolve(name: str) -> Any:
    """The object of a dotted name. A class that lacks an attribute is asked for an instance."""
    first, *parts = name.split(".")
    found, path = import_module(first), first
    for part in parts:
        path = f"{path}.{part}"
        if isinstance(found, type) and not hasattr(found, part):
            found = INSTANCES[found]()
        if not hasattr(found, part):
            import_module(path)
        found = getattr(found, part)
    return found


def source_files() -> list[Path]:
    """Every source file once, under its real path."""
    folders = [ROOT / "radixtrain", ROOT / "kernels", ROOT / "collators"]
    own = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted({path for path in own if path.resolve() == path})


def defined_in(tree: ast.AST) -> set[str]:
    """Functions, classes, variables, and what is set on `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def named_in(tree: ast.AST) -> Iterator[str]:
    """Dotted names in imports, attributes, and strings that are dotted names, for `getattr` and `import_module`."""
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            yield from [node.value] if re.fullmatch(r"[\w.]+", node.value) else []


def used_in(source: str) -> set[str]:
    """Private names that a source uses and does not define."""
    tree = ast.parse(source)
    names = {private for name in named_in(tree) for private in privates_of(name)}
    return {name for name in names - defined_in(tree) - DOCUMENTED if not name.startswith(OUR_MARK)}


def overridden_in(path: Path) -> set[str]:
    """Private methods of other libraries that a file's classes override. A file without any private is not imported."""
    methods = private_methods(path.read_text(encoding="utf-8"))
    if not methods:
        return set()
    parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "radixtrain"]
    module = import_module(".".join(["radixtrain", *parts]))
    return {name for kind, names in methods.items() for name in overridden(getattr(module, kind), names, "radixtrain")}


def private_methods(source: str) -> dict[str, set[str]]:
    """Class -> its private methods, of the classes that have bases."""
    kinds = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.bases]
    methods = {kind.name: {node.name for node in kind.body if isinstance(node, ast.FunctionDef)} for kind in kinds}
    private = {kind: {name for name in names if PRIVATE.fullmatch(name)} for kind, names in methods.items()}
    return {kind: names for kind, names in private.items() if names}


def overridden(kind: type, names: set[str], package: str) -> set[str]:
    """Those of the names that a base class from outside the package has."""
    foreign = [base for base in kind.__mro__ if not f"{base.__module__}.".startswith(f"{package}.")]
    return {name for name in names if any(name in vars(base) for base in foreign)}


@pytest.mark.parametrize("name", sorted({name for names in TABLE.values() for name in names}))
def test_it_is_still_there(name: str) -> None:
    package = name.partition(".")[0]
    brought_by = next((by for module, by in OPTIONAL.items() if f"{name}.".startswith(f"{module}.")), None)
    if brought_by is not None and installed(brought_by) is None:
        pytest.skip(f"pip install {brought_by}")
    try:
        resolve(name)
    except (AttributeError, ImportError) as error:
        release = version(packages_distributions()[package][0]) if package in packages_distributions() else sys.version
        lost = [f"in {file} it {names[name]}" for file, names in TABLE.items() if name in names]
        pytest.fail(f"{package} {release}: {error}. {'; '.join(lost)}")


def test_the_table_is_complete() -> None:
    entered = {(file, part) for file, names in TABLE.items() for name in names for part in privates_of(name)}
    used = {
        (str(path.relative_to(ROOT)), name)
        for path in source_files()
        for name in used_in(path.read_text(encoding="utf-8")) | overridden_in(path)
    }
    assert not used - entered, f"enter in TABLE, or use a public name: {sorted(used - entered)}"
    assert not entered - used, f"no longer used: {sorted(entered - used)}"
    assert all(privates_of(name) for names in TABLE.values() for name in names)


class TestTheScan:
    """What it finds in a source is in the table, which names every kind of use, and nothing else is."""

    def test_sees_an_import_in_a_function(self) -> None:
        assert used_in("def f(x):\n    import torch._C") == {"_C"}

    def test_sees_a_method_that_is_overridden(self) -> None:
        source = "class A(B):\n    def _get(self): ...\n    def f(self): ...\nclass C:\n    def _own(self): ..."
        assert private_methods(source) == {"A": {"_get"}}

        class Base:
            def _own(self) -> None: ...

        class Layer(Base, nn.Module): ...

        assert overridden(Layer, {"_apply", "_own", "_new"}, __name__) == {"_apply"}

    def test_a_name_that_is_gone_raises(self) -> None:
        assert resolve("torch.nn.Module._buffers") == {}
        for name in ("torch.nn.Module._gone", "torch._gone", "torch.ops.aten._gone", "torch._gone.f"):
            with pytest.raises((AttributeError, ImportError)):
                resolve(name)
