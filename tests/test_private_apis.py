"""Names of other libraries that begin with an underscore, and so may go in any release: all that we use, in one table.

After an upgrade `test_it_is_still_there` says which file lost what. A new use must be entered here.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from transformers import LlamaConfig, LlamaModel, PretrainedConfig, PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]


class Private(NamedTuple):
    """name: dotted, from its package on. files: of ours, that use it. purpose: what for."""

    name: str
    files: tuple[str, ...]
    purpose: str


DISTRIBUTIONS = {"flash_attn": "flash-attn", "flash_attn_3": "flash-attn-3"}  # names to install what may be missing
TABLE = (
    Private(
        "triton._C.libtriton",
        ("radixtrain/__main__.py",),
        "is looked at, if it is loaded: built with nanobind, it lists as leaks what a process leaves at its end",
    ),
    Private(
        "lightning.pytorch.cli.LightningCLI._parse_ckpt_path",
        ("radixtrain/commands/lightning.py",),
        "is overridden, so that a checkpoint's settings do not replace those that were typed",
    ),
    Private(
        "lightning.pytorch.cli.LightningCLI._prepare_subcommand_kwargs",
        ("radixtrain/commands/lightning.py",),
        "is overridden, so that checkpoints are read as weights only",
    ),
    Private(
        "lightning.pytorch.cli.LightningCLI._run_subcommand",
        ("radixtrain/commands/lightning.py",),
        "is overridden, to load data and model before the trainer starts",
    ),
    Private(
        "lightning.pytorch.Trainer.fit_loop.epoch_loop._batches_that_stepped",
        ("radixtrain/training/fault_tolerance/position.py",),
        "is set by the position of a run that goes on, so that its log has the same steps",
    ),
    Private(
        "lightning.pytorch.Trainer.fit_loop._data_fetcher",
        ("radixtrain/training/fault_tolerance/position.py",),
        "is what `_should_check_val_fx` asks for",
    ),
    Private(
        "lightning.pytorch.Trainer.fit_loop.epoch_loop._should_check_val_fx",
        ("radixtrain/training/fault_tolerance/position.py",),
        "says whether a validation is due after this step, if the time of the run is up",
    ),
    Private(
        "lightning.pytorch.Trainer.fit_loop.epoch_loop._skip_next_val",
        ("radixtrain/training/fault_tolerance/position.py",),
        "leaves out the validation that Lightning adds when the time of a run is up",
    ),
    Private(
        "lightning.pytorch.strategies.DDPStrategy._timeout",
        ("radixtrain/training/devices/settings.py",),
        "is set to `ddp_timeout`, whoever has made the strategy",
    ),
    Private(
        "lightning.pytorch.strategies.DDPStrategy._ddp_kwargs",
        ("radixtrain/training/devices/settings.py",),
        "gets `gradient_as_bucket_view`, which a configuration sets to False with every other default",
    ),
    Private(
        "transformers.PretrainedConfig._attn_implementation",
        (
            "radixtrain/hf/cached_pass.py",
            "radixtrain/hf/hooks.py",
            "radixtrain/hf/padded/calls.py",
            "radixtrain/hf/prepare.py",
            "radixtrain/hf/refusals.py",
            "radixtrain/verification/oracle.py",
        ),
        "names the attention of a model",
    ),
    Private(
        "transformers.PretrainedConfig._attn_implementation_internal",
        ("radixtrain/hf/prepare.py",),
        "sets the attention of one part back, without the parts in it",
    ),
    Private(
        "transformers.PreTrainedModel._supports_sdpa",
        ("radixtrain/hf/prepare.py",),
        "says whether our attention can take the place of sdpa",
    ),
    Private(
        "transformers.PreTrainedModel._can_set_experts_implementation",
        ("radixtrain/verification/oracle.py",),
        "says whether experts can run as a loop, which float64 needs",
    ),
    Private(
        "transformers.GenerationConfig._get_default_generation_params",
        ("radixtrain/generation/options.py",),
        "gives the options that neither the user nor the model has set",
    ),
    Private(
        "transformers.GenerationMixin._get_logits_processor",
        ("radixtrain/generation/sampling.py",),
        "makes the logits processors of the options, in transformers' order",
    ),
    Private(
        "transformers.GenerationMixin._get_stopping_criteria",
        ("radixtrain/generation/stopping.py",),
        "makes the stopping criteria of the options",
    ),
    Private(
        "transformers.GenerationMixin._prepare_special_tokens",
        ("radixtrain/generation/sampling.py", "radixtrain/generation/stopping.py"),
        "sets the end tokens that both read",
    ),
    Private(
        "transformers.PreTrainedModel._from_config",
        ("radixtrain/bench/cells.py",),
        "makes a model with random weights in a dtype",
    ),
    Private(
        "torch.autograd.graph._engine_run_backward",
        ("radixtrain/verification/oracle.py",),
        "runs the backward pass under the mode that lifts casts",
    ),
    Private(
        "torch._C._functorch.is_batchedtensor",
        ("radixtrain/loss.py",),
        "says whether a batch of gradients is computed, which needs what was saved",
    ),
    Private(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        ("radixtrain/loss.py",),
        "says whether this is under retain_graph, which needs what was saved",
    ),
    Private(
        "torch.nn.Module._buffers",
        ("radixtrain/verification/oracle.py",),
        "puts buffers back that a forward pass replaced",
    ),
    Private(
        "torch.nn.Module._modules",
        ("radixtrain/hf/dropout.py",),
        "finds dropout modules in 0.3 ms",
    ),
    Private(
        "torch.nn.Module._parameters",
        ("radixtrain/hf/adapters.py",),
        "finds the modules that hold a shared matrix",
    ),
    Private(
        "torch.nn.Module._is_replica",
        ("radixtrain/hf/padded/calls.py", "radixtrain/hf/inputs.py"),
        "tells a copy that DataParallel made",
    ),
    Private(
        "torch.nn.Module._forward_pre_hooks",
        (
            "radixtrain/generation/fingerprint.py",
            "radixtrain/hf/hooks.py",
            "radixtrain/hf/padded/calls.py",
            "radixtrain/hf/padded/shared_head.py",
        ),
        "finds our hooks, on copies of a head too, those by which PEFT gives each row an adapter, and a user's",
    ),
    Private(
        "torch.nn.Module._forward_pre_hooks_with_kwargs",
        ("radixtrain/hf/hooks.py",),
        "is the option of a hook, which goes with it",
    ),
    Private(
        "torch.nn.Module._forward_hooks",
        ("radixtrain/generation/fingerprint.py", "radixtrain/hf/hooks.py"),
        "finds our hooks, and a user's, which empty a cache",
    ),
    Private(
        "torch.nn.Module._forward_hooks_with_kwargs",
        ("radixtrain/hf/hooks.py",),
        "is the option of a hook, which goes with it",
    ),
    Private(
        "torch.nn.Module._forward_hooks_always_called",
        ("radixtrain/hf/hooks.py",),
        "is the option of a hook, which goes with it",
    ),
    Private(
        "transformers.PreTrainedModel._gradient_checkpointing_func",
        ("radixtrain/hf/recurrent/layers.py",),
        "computes a layer again, without the layer's hooks",
    ),
    Private(
        "torch._C._will_engine_execute_node",
        ("radixtrain/hf/padded/shared_head.py",),
        "tells a backward pass to the weights from a gradient of hidden states that is asked for by itself",
    ),
    Private(
        "torch.Tensor._backward_hooks",
        ("radixtrain/hf/padded/shared_head.py",),
        "shows the hooks of a user on hidden states, also of a tensor that is gone",
    ),
    Private(
        "torch.Tensor._base",
        ("radixtrain/hf/padded/shared_head.py",),
        "finds the hidden states that the head's input is a view of",
    ),
    Private(
        "torch.Tensor._version",
        ("radixtrain/hf/padded/shared_head.py",),
        "tells whether hidden states were changed in place before the head",
    ),
    Private(
        "torch._C._functorch.maybe_current_level",
        ("radixtrain/hf/padded/calls.py",),
        "says whether torch.func transforms the model, whose tensors have no memory to read",
    ),
    Private(
        "torch.autograd.forward_ad._current_level",
        ("radixtrain/hf/padded/calls.py",),
        "says whether forward-mode differentiation runs",
    ),
    Private(
        "torch.ops.aten._flash_attention_forward.default._schema",
        ("kernels/flash.py",),
        "says whether torch's flash attention takes a window",
    ),
    Private(
        "torch.ops.aten._flash_attention_forward",
        ("kernels/flash.py",),
        "is flash attention on CUDA, and returns the log-sum-exp",
    ),
    Private(
        "torch.ops.aten._flash_attention_backward",
        ("kernels/flash.py",),
        "is its backward pass, with a merged log-sum-exp",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        ("kernels/cpu_loops.py",),
        "is flash attention on a CPU, and returns the log-sum-exp",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        ("kernels/cpu_loops.py",),
        "is its backward pass, with a merged log-sum-exp",
    ),
    Private(
        "flash_attn.flash_attn_interface._flash_attn_varlen_forward",
        ("kernels/flash.py",),
        "is flash attention over sequences of any length, and returns the log-sum-exp",
    ),
    Private(
        "flash_attn.flash_attn_interface._flash_attn_varlen_backward",
        ("kernels/flash.py",),
        "is its backward pass, with a merged log-sum-exp",
    ),
    Private(
        "flash_attn_3._C",
        ("kernels/flash.py",),
        "registers the operators of flash-attention 3 with torch",
    ),
    Private(
        "sys._getframe",
        ("collators/misuse_guard.py",),
        "reads which loader asks for a batch, which trainer calls the model, and whether generate() does",
    ),
    Private(
        "os._exit",
        (
            "radixtrain/data/workers.py",
            "radixtrain/training/devices/launch.py",
            "radixtrain/training/devices/rank_monitor.py",
            "radixtrain/training/fault_tolerance/signals.py",
        ),
        "ends a process at once: after a second signal, a worker whose run was killed, and a rank whose run has ended",
    ),
)


def checkpointed_layer() -> nn.Module:
    """A decoder layer of a model with activation checkpointing; the model itself has the attribute too."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=1))
    model.gradient_checkpointing_enable()
    return model.layers[0]


# What has an attribute only on instances. A copy of DataParallel has all of a module's, and one more.
INSTANCES: dict[Any, Callable[[], Any]] = {
    nn.Module: lambda: nn.Linear(1, 1)._replicate_for_data_parallel(),
    PretrainedConfig: PretrainedConfig,
    PreTrainedModel: checkpointed_layer,
    DDPStrategy: DDPStrategy,
    L.Trainer: lambda: L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False),
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


@pytest.mark.parametrize("private", TABLE, ids=[private.name for private in TABLE])
def test_it_is_still_there(private: Private) -> None:
    package = private.name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"pip install {DISTRIBUTIONS[package]}")
    try:
        resolve(private.name)
    except (AttributeError, ImportError) as error:
        release = version(packages_distributions()[package][0]) if package in packages_distributions() else sys.version
        pytest.fail(f"{package} {release}: {error}. In {', '.join(private.files)} it {private.purpose}")


def test_the_table_is_complete() -> None:
    entered = {(file, part) for private in TABLE for file in private.files for part in privates_of(private.name)}
    used = {
        (str(path.relative_to(ROOT)), name)
        for path in source_files()
        for name in used_in(path.read_text(encoding="utf-8")) | overridden_in(path)
    }
    assert not used - entered, f"enter in TABLE, or use a public name: {sorted(used - entered)}"
    assert not entered - used, f"no longer used: {sorted(entered - used)}"


def test_every_row_names_something_private_once() -> None:
    assert len({private.name for private in TABLE}) == len(TABLE)
    assert all(privates_of(private.name) for private in TABLE)


class TestTheScan:
    @pytest.mark.parametrize(
        ("source", "names"),
        [
            ("import torch._C", {"_C"}),
            ("import torch._dynamo.config as c", {"_dynamo"}),
            ("from torch.autograd.graph import _engine_run_backward as run", {"_engine_run_backward"}),
            ("from torch._inductor import config", {"_inductor"}),
            ("def f(x):\n    import torch._C", {"_C"}),
            ("x._schema", {"_schema"}),
            ("x._schema = 1", {"_schema"}),
            ("f(x)[0]._a._b()", {"_a", "_b"}),
            ("class A(B):\n    def f(self): return self._get()", {"_get"}),
            ("getattr(x, '_is_replica', False)", {"_is_replica"}),
            ("import_module('flash_attn_3._C')", {"_C"}),
        ],
    )
    def test_sees(self, source: str, names: set[str]) -> None:
        assert used_in(source) == names

    @pytest.mark.parametrize(
        "source",
        [
            "from a import b\nb.c.__dict__",
            "def _f(): ...\n_f()",
            "class _A: ...\nx._A",
            "class A:\n    def __init__(self): self._a = 1\n    def f(self, other): return self._a + other._a",
            "'a sentence about _C'",
            "f'{name}_internal'",
            "getattr(x, '_radix_call', None)",
            "for _ in x: ...",
        ],
    )
    def test_leaves_out_what_is_ours_or_public(self, source: str) -> None:
        assert not used_in(source)

    def test_sees_a_method_that_is_overridden(self) -> None:
        source = "class A(B):\n    def _get(self): ...\n    def f(self): ...\nclass C:\n    def _own(self): ..."
        assert private_methods(source) == {"A": {"_get"}}

        class Base:
            def _own(self) -> None: ...

        class Cli(Base, LightningCLI): ...

        assert overridden(Cli, {"_get", "_own", "_new"}, __name__) == {"_get"}

    def test_a_name_that_is_gone_raises(self) -> None:
        assert resolve("torch.nn.Module._buffers") == {}
        for name in ("torch.nn.Module._gone", "torch._gone", "torch.ops.aten._gone", "torch._gone.f"):
            with pytest.raises((AttributeError, ImportError)):
                resolve(name)
