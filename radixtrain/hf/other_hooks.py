"""What others do when a module is called: hooks, or a `forward` of the instance.

A hook inside of a shared model sees the unique tokens, `[1, U, D]`, in place of `[B, L, D]`. A gradient for each sample
(Opacus), a penalty of activations, an attribution (Captum) or a steering vector at the last place would be another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
# Packages whose hooks care for weights, devices and gradients, whatever tokens a module computes.
CARING = {
    *("accelerate", "axolotl", "bitsandbytes", "deepspeed", "lightning", "lightning_fabric", "peft"),
    *("pytorch_lightning", "radixtrain", "torch", "transformers", "trl"),
}
# And what reads tokens there all the same: activations from which a LoRA starts, and observers of a quantizer.
READING = ("peft.tuners.lora.corda", "peft.tuners.lora.eva", "torch.ao")


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody else acts when the module is called: by a hook of any kind, or a `forward` on the instance."""
    return "forward" in vars(module) or bool(hooks_of_others(module, HOOKS))


def hooks_of_others(module: nn.Module, kinds: Sequence[str] = FORWARD_HOOKS) -> tuple[int, ...]:
    """The numbers of its hooks, which torch counts up and never gives twice, without those of radixtrain."""
    hooks = (hook for name in kinds for hook in getattr(module, name).items())
    return tuple(number for number, hook in hooks if not str(hook.__module__).startswith("radixtrain."))


def why_hooked_inside(backbone: nn.Module) -> str | None:
    """Name a hook on a module inside of a backbone, or on all modules there are, that may read tokens."""
    everywhere = _reading(getattr(nn.modules.module, f"_global{kind}") for kind in HOOKS)
    if everywhere is not None:
        return f"a hook on every module ({everywhere}) would see the unique tokens, [1, U, D]"
    for module in _hooked_inside(backbone):
        name = _reading(getattr(module, kind) for kind in HOOKS)
        if name is not None:
            path = next(path for path, each in backbone.named_modules() if each is module)
            return f"a hook on {path} ({name}) would see the unique tokens, [1, U, D]"
    return None


def _reading(hooks: Iterable[Mapping[int, Any]]) -> str | None:
    """Return the name of the first hook that may read tokens; None without any."""
    for hook in (hook for each in hooks for hook in each.values()):
        while isinstance(hook, partial):
            hook = hook.func
        if not _only_cares(hook):
            return f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
    return None


def _hooked_inside(backbone: nn.Module) -> Iterator[nn.Module]:
    """Walk the modules at every call: 0.8 ms of one core for 28 layers with LoRA (2,385 modules)."""
    level = [backbone]
    while level:
        inner = [module._modules for module in level if module._modules]
        level = [child for named in inner for child in named.values() if child is not None]
        yield from (
            x for x in level if x._forward_hooks or x._forward_pre_hooks or x._backward_hooks or x._backward_pre_hooks
        )


def _only_cares(hook: Any) -> bool:
    """Whether a hook is of a package of `CARING`, or does nothing but switch gradients on."""
    module = str(hook.__module__)
    is_known = module.partition(".")[0] in CARING and not module.startswith(READING)
    return is_known or set(getattr(getattr(hook, "__code__", None), "co_names", ())) == {"requires_grad_"}
