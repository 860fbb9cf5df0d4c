"""Finds code in a model that is not its own: hooks, another `forward`, other modules, modes of torch.

Inside a shared model such code gets the unique tokens, `[1, U, D]`, instead of `[B, L, D]`. Code of a third party is
refused by name: per-sample gradients (Opacus), a penalty on activations, an attribution (Captum) or a steering vector
at the last token depend on places or copies, which no trial shows. Code of torch, transformers and the model's own
package, put where the model's file has other code, is tried (`model.py`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from radixtrain.hf.backbone import attends, names_in

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
# Packages whose code in a model handles weights, devices and gradients, or computes each token independently. The last
# two lines: layers of 2 to 8 bits, fused modules and image towers, put into a model by transformers or by its user.
KNOWN = frozenset(
    {
        *("accelerate", "axolotl", "bitsandbytes", "deepspeed", "lightning", "lightning_fabric", "peft"),
        *("pytorch_lightning", "radixtrain", "torch", "transformers", "trl"),
        *("aqlm", "auto_round", "gptqmodel", "hqq", "optimum", "spqr_quant", "vptq"),
        *("fla", "liger_kernel", "timm"),
    }
)
# Their exceptions: what initializes a LoRA from activations, a quantizer's observers, a log, and compiled user code.
READ_TOKENS = (
    *("peft.tuners.lora.corda", "peft.tuners.lora.eva", "torch.ao", "transformers.model_debugging_utils", "torch.jit"),
)
# Modules of torch that compute each token from its last axis only. Dropouts: `draws.py` refuses those that draw.
PLAIN = {
    *(nn.Module, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential, nn.Identity),
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout),
}
SETTLED = PLAIN - {nn.Dropout, nn.Embedding}  # all that they hold is in the shapes of their weights
SETTINGS = {bool, float, str}
COUNTS = {int, dict, OrderedDict, type(None)}  # of what modules hold, what a pass may change; and what torch keeps
# Where transformers has modules for all of its models. Those of known packages other than `TRIED` have been measured.
BESIDE_MODELS = (
    "transformers.activations",
    "transformers.integrations",
    "transformers.modeling_",
    "transformers.pytorch",
)
TRIED = {"fla", "timm", "torch", "transformers"}
CHUNKS = "chunk_size_feed_forward"  # a whole number, of a layer of the BERT kind
ADAPTERS = "active_adapter"  # a property of PEFT's layers
CALLED = {"forward", "__call__", "_call_impl", "_compiled_call_impl"}  # by torch
FUNCTIONS = FunctionType, MethodType, partial
COMPILED = "__compiled_fn_", "__resume_at_"  # what torch.compile adds to the module whose code it has compiled
OURS = "radixtrain.hf.hooks"
UNIQUE_TOKENS = (
    "would see the unique tokens, [1, U, D] (if it treats each token independently, declare it position_wise)"
)

Code = TypeVar("Code", bound=Callable[..., Any])
_POSITION_WISE: WeakSet[Callable[..., Any]] = WeakSet()


def position_wise(code: Code) -> Code:
    """Declare that code in a model treats each token independently, or only looks, so that its calls are shared.

    Otherwise such code is refused, or the model's calls run unshared. `verify_equivalence` checks the claim.

    code: a function (a hook, a method, what replaces a `forward`), or a class of modules, hooks or torch modes; a
        subclass that defines a `forward` needs its own. Works as a decorator.
    Returns it. Raises TypeError for anything else.

    >>> @position_wise
    ... def steer(module, args, output):
    ...     return output + 0.1
    >>> handle = model.get_decoder().layers[0].mlp.register_forward_hook(steer)
    """
    if not isinstance(code, type | FunctionType):
        raise TypeError(
            f"position_wise takes a function or a class, but got an object of {type(code).__qualname__}; pass its "
            f"class, or the function of a bound method"
        )
    _POSITION_WISE.add(code)
    if isinstance(code, type) and issubclass(code, nn.Module):
        _POSITION_WISE.update(_functions(vars(code).get("forward")))
    return code


def is_hooked(module: nn.Module) -> bool:
    """Return whether the module has a third-party hook of any kind, or a `forward` on the instance."""
    return "forward" in vars(module) or bool(third_party_hooks(module, HOOKS))


def third_party_hooks(module: nn.Module, kinds: Sequence[str] = FORWARD_HOOKS) -> tuple[int, ...]:
    """Return the ids of a module's hooks other than radixtrain's; torch counts them up and never reuses one."""
    hooks = (hook for name in kinds for hook in getattr(module, name).items())
    return tuple(number for number, hook in hooks if not str(hook.__module__).startswith("radixtrain."))


def hooks_of(module: nn.Module) -> list[Any]:
    """List the hooks of a module of all kinds."""
    return [hook for kind in HOOKS for hook in getattr(module, kind).values()]


def hooks_between_ours(backbone: nn.Module) -> list[Any]:
    """List the hooks of a shared backbone that run while its tokens are the unique ones.

    These are pre-hooks registered after `share_prefixes`, and forward hooks registered with `prepend`.
    """
    before, after = (list(getattr(backbone, kind).values()) for kind in FORWARD_HOOKS)
    first, last = (
        next(place for place, hook in enumerate(hooks) if type(getattr(hook, "__self__", None)).__module__ == OURS)
        for hooks in (before, after)
    )
    return before[first + 1 :] + after[:last]


def has_unknown_code(module: nn.Module) -> bool:
    """Return whether a module has a hook, or a `forward` of its class or its own, that no known package defines."""
    code = *hooks_of(module), *_on_instance(module), _of_class(type(module), "forward")
    return _unknown(_functions(*code), KNOWN) is not None


def has_third_party_code(module: nn.Module, own: Collection[str] = KNOWN) -> bool:
    """Return whether a hook of a module, or a `forward` of its class or its own, is of no known package.

    It may be declared `position_wise`. own: the known packages, and that of the model.
    """
    code = *hooks_of(module), *_on_instance(module), *(_of_class(type(module), name) for name in CALLED)
    return any(_origin(each)[1].partition(".")[0] not in own for each in _functions(*code))


def has_third_party_code_around() -> bool:
    """Return whether no known package defines a mode of torch that is on, or a hook on every module."""
    modes = map(type, [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()])
    everywhere = (getattr(nn.modules.module, f"_global{kind}").values() for kind in HOOKS)
    functions = *modes, *_functions(*chain(*everywhere))
    return any(_origin(each)[1].partition(".")[0] not in KNOWN for each in functions)


def why_recorded() -> str | None:
    """Say what records or changes this call around the model, for other tokens too; None if nothing does."""
    if torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func or forward-mode differentiation runs"
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return "torch.export or torch.jit.trace records the call, for other tokens too"
    modes = map(type, [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()])
    if (name := _unknown(modes, KNOWN)) is not None:
        return f"a mode of torch ({name}) {UNIQUE_TOKENS}"
    everywhere = (getattr(nn.modules.module, f"_global{kind}").values() for kind in HOOKS)
    if (name := _unknown(_functions(*chain(*everywhere)), KNOWN)) is not None:
        return f"a hook on every module ({name}) {UNIQUE_TOKENS}"
    return None


class OtherCode(NamedTuple):
    """The code in what gets the unique tokens of a call, as one look finds it; judged only if its `state` is new.

    roots: the decoder, and a head. reached: the modules that get unique tokens. hooked: those with hooks, and these.
    strange: modules that may compute a token from others, by code which the files of the decoder do not have.
    placed: what instances hold and can call. functions: what these files, torch and their classes name.
    experts: the function of its experts_implementation. own: further known packages of classes.
    kinds: the classes of the modules in the roots.
    state: of all code and its settings; another one if any has changed.
    """

    roots: list[Any]
    reached: list[nn.Module]
    hooked: list[tuple[nn.Module, list[Any]]]
    strange: list[nn.Module]
    placed: list[Any]
    functions: list[Any]
    experts: Any
    own: frozenset[str]
    kinds: frozenset[type]
    state: Hashable

    @property
    def refused(self) -> str | None:
        """Name code of a third party: a hook, or a `forward` of a class or of an instance. None without any.

        Or a layer with another attention than its decoder, whose mask it gets.
        """
        usual = self.roots[0].config._attn_implementation
        for module in filter(lambda each: attends(type(each)), self.reached):
            name = getattr(getattr(module, "config", None), "_attn_implementation", usual)
            if name != usual:
                return f"{_path(self.roots, module)} has attn_implementation {name!r}, and its decoder {usual!r}"
        sites = [
            *(("a hook on {}", module, each, KNOWN) for module, hooks in self.hooked for each in hooks),
            ("its experts_implementation", self.roots[0], self.experts, self.own),
            *(
                ("{}.forward", module, _of_class(type(module), name), self.own)
                for module in self.reached
                for name in CALLED
            ),
            *(("{}.forward", module, each, KNOWN) for module in self.reached for each in _on_instance(module)),
        ]
        for where, module, code, known in sites:
            if (name := _unknown(_functions(code), known)) is not None:
                return f"{where.format(_path(self.roots, module))} ({name}) {UNIQUE_TOKENS}"
        return None

    @property
    def tried(self) -> str:
        """Name code that is not the model's own and may be tried; empty without any."""
        if self.strange:
            found = f"{_path(self.roots, self.strange[0])}, a {type(self.strange[0]).__qualname__}"
        else:
            functions = _functions(*self.placed, *self.functions)
            found = _unknown(functions, {*KNOWN, *sys.stdlib_module_names, "typing_extensions"}) or ""
        return found and f"code that is not the model's own ({found})"


def code_in(
    model: nn.Module,
    decoder: Any,
    head: nn.Module | None = None,
    outer: Sequence[nn.Module] = (),
    hooks: Iterable[Any] | None = None,
    besides: nn.Module | None = None,
) -> OtherCode:
    """Return the code in what gets the unique tokens of this call: a decoder, and a head.

    model: its own package counts as known. outer: modules around the decoder that get unique tokens too.
    hooks: those of the decoder that get unique tokens; None for all. besides: a part of it that gets all tokens.

    A hook or a `forward` on an instance may come from the packages of `KNOWN`, a class or its `forward` also from the
    model's package, and either may be declared `position_wise`. Whatever of that is not of the decoder's own files, nor
    known to treat each token independently, is tried.

    This runs in every pass, so it calls nothing of Python for a module.
    """
    roots = [decoder] if head is None else [decoder, head]
    inner = [each for root in roots for each in _modules_in(root)]
    beyond = set() if besides is None else {*besides.modules()}
    reached = [each for each in (*outer, *inner) if each not in beyond]
    hooked = [
        (each, list(hooks) if each is decoder and hooks is not None else hooks_of(each))
        for each in reached
        if each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
    ]
    kinds = frozenset(map(type, inner))
    files = {each.__module__ for each in type(decoder).__mro__ if each.__module__.startswith("transformers.models.")}
    classes = {each for kind in kinds for each in kind.__mro__ if each.__module__ in files}
    strange = {kind for kind in kinds if not _is_own(kind, files, classes)}
    found = [each for each in inner if type(each) in strange]
    spaces = map(vars, (torch, torch.Tensor, nn.Module, nn.functional, *map(sys.modules.__getitem__, files), *classes))
    functions = [
        each
        for space in spaces
        for name, each in space.items()
        if isinstance(each, FUNCTIONS) and not name.startswith(COMPILED)
    ]
    held = [
        value
        for each in inner
        if type(each) not in SETTLED or not CALLED.isdisjoint(each.__dict__)
        for value in each.__dict__.values()
        if type(value) not in COUNTS
    ]
    placed = [value for value in held if callable(value)]
    configs = {id(each.__dict__.get("config")): each.__dict__.get("config") for each in inner}
    experts = ALL_EXPERTS_FUNCTIONS.get(getattr(decoder.config.get_text_config(), "_experts_implementation", None))
    of_classes = [
        vars(each)[name] for kind in {*map(type, reached)} for each in kind.__mro__ for name in CALLED & {*vars(each)}
    ]
    state = (
        *map(ref, (*outer, *inner)),
        *map(id, map(type, (*outer, *inner))),
        *map(ref, functions),
        *map(_identity, [experts, *of_classes, *placed]),
        frozenset(_origin(each) for _, those in hooked for each in _functions(*those)),
        *(f"{getattr(each, ADAPTERS)} {each.disable_adapters}" for each in inner if hasattr(type(each), ADAPTERS)),
        *(each.extra_repr() for each in found),
        *[value for value in held if type(value) in SETTINGS],
        *[each.__dict__.get(CHUNKS) for each in inner],
        *(repr(getattr(each, "__dict__", None)) for each in configs.values()),
    )
    own = KNOWN.union(each.__module__.partition(".")[0] for each in type(model).__mro__)
    return OtherCode(roots, reached, hooked, found, placed, functions, experts, own, kinds, state)


def _modules_in(root: nn.Module) -> list[nn.Module]:
    """List a module and those inside, except parametrizations, which get weights and no tokens.

    Faster than `nn.Module.modules`, which calls Python for each.
    """
    found: list[nn.Module] = []
    level = [root]
    while level:
        found += level
        inner = [module._modules for module in level if module._modules]
        children = chain.from_iterable([named.values() for named in inner])
        level = [child for child in children if child is not None and type(child) is not ParametrizationList]
    return found


def _identity(value: object) -> Hashable:
    """Return what tells a function from every other one, also from one that gets its address after it is gone.

    A weak reference: a function may hold the model, which whoever keeps the identity would then keep too. Partial
    calls of the same are one: transformers makes a new one each time that activation checkpointing is switched on.
    """
    if isinstance(value, partial):
        items = (*value.args, *chain.from_iterable(value.keywords.items()))
        return (_identity(value.func), *(each if type(each) in SETTINGS else _identity(each) for each in items))
    kind = type(value)
    is_one = isinstance(value, FUNCTIONS) or (kind.__hash__ is object.__hash__ and kind.__weakrefoffset__)
    return ref(value) if is_one else id(value)


def _origin(function: Any) -> tuple[Any, str, bool]:
    """Return by what a function, object or class is known: its code or class, where that is from, if it is declared.

    A program may register a hook anew for every call, each a function of its own, with the same code.
    """
    kind = function if isinstance(function, type) else type(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return kind, str(kind.__module__), kind in _POSITION_WISE
    return code, str(function.__globals__.get("__name__")), function in _POSITION_WISE


def _is_own(kind: type, files: Collection[str], classes: Collection[type]) -> bool:
    """Return whether a class of modules is of these files, named by their classes, or computes each token by itself.

    Wrappers of torch.distributed, and the class that FSDP2 makes of a module's own, compute what is inside.
    """
    wrappers = {each for each in kind.__mro__ if each.__module__.startswith("torch.distributed.")}
    made = next(each for each in kind.__mro__ if wrappers.isdisjoint((each, *each.__bases__)))
    package = made.__module__.partition(".")[0]
    is_known = made in PLAIN or made in _POSITION_WISE or made.__module__.startswith(BESIDE_MODELS)
    is_known = is_known or made.__module__ in files or (package in KNOWN and package not in TRIED)
    return is_known or any(made.__name__ in names_in(each) for each in classes)


def _of_class(kind: type, name: str) -> Any:
    """Return an attribute as stored in a class: `getattr` fails for the `forward` of a compiled script's class."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _on_instance(module: nn.Module) -> Iterator[Any]:
    """Yield what the `forward` of an instance runs besides that of its class, and the classes of Accelerate's hooks."""
    own = module.__dict__
    if "forward" in own:
        of_class = _functions(_of_class(type(module), "forward"))
        yield from (function for function in _functions(own["forward"]) if function not in of_class)
        if (hook := own.get("_hf_hook")) is not None:
            yield from map(type, (hook, *getattr(hook, "hooks", ())))


def _path(roots: Sequence[nn.Module], module: nn.Module) -> str:
    """Return where a module is in one of these; the class of any other, and of a root."""
    named = (path for root in roots for path, each in root.named_modules() if each is module)
    return next(named, "") or type(module).__name__


def _unknown(functions: Iterable[Any], known: Collection[str]) -> str | None:
    """Name the first function, object or class that no known package defines."""
    for function in functions:
        # A wrapper copies the names of what it wraps, but not its code, the code's globals, or its class.
        code, module, is_declared = _origin(function)
        is_known = module.partition(".")[0] in known and not module.startswith(READ_TOKENS)
        is_class = isinstance(code, type)
        if not (is_known or is_declared or (not is_class and {*code.co_names} == {"requires_grad_"})):
            return f"{module}.{code.__qualname__ if is_class else code.co_qualname}"
    return None


def _functions(*callables: Any) -> list[Any]:
    """List functions, and those inside of their wrappers, bound methods and partial calls."""
    found, todo = [], [*callables]
    while todo:
        code = todo.pop()
        if isinstance(code, MethodType):  # `replaced` is what the `Mixer` of a recurrent layer stands in for
            todo += (code.__func__, getattr(code.__self__, "__dict__", {}).get("replaced"))
        elif code is not None:
            todo.append(getattr(code, "__dict__", {}).get("__wrapped__"))
            if isinstance(code, partial):
                todo += (code.func, *(each for each in code.args if isinstance(each, FunctionType | MethodType)))
            else:
                found.append(code)
    return found
