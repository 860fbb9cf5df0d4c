"""Random draws: a shared token would draw once, but an ordinary batch draws once per copy.

A pass that moved a generator is refused, or computed again as an ordinary one: no name of a module or of a setting
decides. `number_that_draws` is for the message. `without_dropout` and `evaluating` turn draws off for a while, to
compare or to measure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from radixtrain.errors import UserError

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DRAWS = re.compile(r"drop(out|$)|pdrop|layerdrop|jitter|noise")


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators from which a pass on this device draws."""
    of_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *of_device]


def has_drawn(device: torch.device, before: Sequence[Tensor]) -> bool:
    """Return whether a pass has drawn since `generator_states` returned these."""
    with _disable_current_modes():  # the states have values, also if a mode takes those of the model for fakes
        return not all(map(torch.equal, before, generator_states(device)))


def set_generator_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def number_that_draws(root: nn.Module, allowed: Collection[str] = ()) -> tuple[str, str]:
    """Name a number by which a module may draw, such as `layers.0.dropout=0.1`, and what would allow it: `dropout`.

    Both are empty without such a number in a module in training mode. PEFT's layers hold one for each adapter; those
    that are not active draw nothing.

    allowed: as `allow_dropout` of `share_prefixes`.
    """
    for path, module in root.named_modules():
        inside = path.split(".") if path else []
        for name, value in vars(module).items() if module.training else ():
            if name == "p" and isinstance(module, DROPOUTS):
                name_of_it = next((part for part in reversed(inside) if "drop" in part), inside[-1] if inside else name)
            elif DRAWS.search(name):
                name_of_it = name
            else:
                continue
            numbers = [value]
            if isinstance(value, dict):
                active = getattr(module, "active_adapters", None)  # a method of models, a list of PEFT's layers
                numbers = [each for key, each in value.items() if not isinstance(active, list) or key in active]
            number = next((each for each in numbers if type(each) in (int, float) and each), None)
            if number is not None and not {*inside, name}.intersection(allowed):
                return f"{'.'.join([*inside, name])}={number}", name_of_it
    return "", ""


def why_refused(what: str, root: nn.Module, allowed: Collection[str]) -> str:
    """Say that something draws, by which number, and how to go on. what: it does, such as `Qwen3Model draws`."""
    number, name = number_that_draws(root, allowed)
    cause = "a shared token would draw once, but an ordinary batch draws once per copy"
    if not name:
        return (
            f"{what}, by no number that a module holds: {cause}; leave out the layer that draws. If it is another "
            f"thread of the program, such as one that samples rows, give that thread a torch.Generator of its own"
        )
    return (
        f"{what} ({number}): {cause}; set it to 0 in the modules, which read the configuration only when they are "
        f"made, or allow it by name: allow_dropout=[{name!r}]"
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, then give every module its own mode back.

    A module has one mode for all threads: if it changed, another thread that calls the model gets a UserError.
    """
    training, thread = [module for module in model.modules() if module.training], get_ident()

    def check(*_: object) -> None:
        if get_ident() != thread:
            raise UserError(
                f"another thread has temporarily put {type(model).__name__} into evaluation mode (generate does so), "
                f"in which dropout would not draw: wait for it to finish, or call model.eval() first"
            )

    if not training:
        yield
        return
    hook = model.register_forward_pre_hook(check)
    model.eval()
    try:
        yield
    finally:
        hook.remove()
        for module in training:
            module.training = True


@contextmanager
def without_dropout(model: nn.Module, allowed: Collection[str]) -> Iterator[None]:
    """Switch off what is allowed to draw at random for a while, so that two passes can be compared.

    allowed: as `allow_dropout` of `share_prefixes`. These dropout modules, and the modules that hold a number of such a
        name, are in evaluation mode meanwhile.
    """
    off = [
        module
        for path, module in model.named_modules()
        if module.training and not _names_of_draws(path, module).isdisjoint(allowed)
    ]
    for module in off:
        module.training = False
    try:
        yield
    finally:
        for module in off:
            module.training = True


def _names_of_draws(path: str, module: nn.Module) -> set[str]:
    """Return the names by which what a module draws may be allowed."""
    return (
        set(path.split(".")) if isinstance(module, DROPOUTS) else {name for name in vars(module) if DRAWS.search(name)}
    )
