"""Classes that a configuration names: callbacks, loggers and other parts of Lightning's trainer, checked and made."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from types import NoneType
from typing import Any, get_type_hints

from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch.nn.parallel import DistributedDataParallel

from radixtrain.commands.keys import Key
from radixtrain.commands.reading import refusal
from radixtrain.errors import UsageError, UserError, first_line

# A configuration makes objects of these packages and kinds only: any other could run code, as `torch.hub.load` and
# `transformers.pipeline` do.
PACKAGES = ("radixtrain", "lightning", "torch", "transformers")
KINDS_OF = {
    "trainer.logger": (Logger,),
    "trainer.callbacks": (Callback,),
    "trainer.strategy": (Strategy,),
    "trainer.accelerator": (Accelerator,),
    "trainer.profiler": (Profiler,),
    "trainer.plugins": (Precision, CheckpointIO, ClusterEnvironment, LayerSync),
}
ANY = tuple(kind for kinds in KINDS_OF.values() for kind in kinds)
LOGGERS = ("wandb", "trackio", "swanlab", "tensorboard", "csv", "none")
# Names that a message suggests. All other texts of the keys that are not here are names of Lightning's own.
SUGGESTED = {
    "trainer.logger": (*LOGGERS, "WandbLogger", "TensorBoardLogger", "CSVLogger", "MLFlowLogger", "CometLogger"),
    "trainer.callbacks": ("EarlyStopping", "ModelCheckpoint", "LearningRateMonitor", "Timer"),
    "trainer.plugins": (),
}
PASSED_ON: dict[type, Any] = {DDPStrategy: DistributedDataParallel}  # what else takes the arguments of a class


def describe_classes(trainer: Any, command: str) -> None:
    """Write each class of the section `trainer` out: `class_path` in full, and `init_args` with their defaults.

    UsageError for what is no class of the key, is not imported from a configuration, or lacks or has other arguments.
    """
    for key, kinds in KINDS_OF.items():
        name = key.removeprefix("trainer.")
        value = getattr(trainer, name)
        found = [_described(key, each, kinds, command) for each in (value if isinstance(value, list) else [value])]
        is_list = isinstance(value, list) or (name == "callbacks" and value is not None)
        setattr(trainer, name, found if is_list else found[0])


def made(value: Any) -> Any:
    """The objects of what `describe_classes` has written out; names stay."""
    if isinstance(value, list):
        return [made(each) for each in value]
    if not _is_class(value):
        return value
    kind = resolve_name(value["class_path"])
    options = {name: made(each) for name, each in value["init_args"].items()}
    try:
        return kind(**{name: _option(kind, name, each) for name, each in options.items()})
    except UserError:
        raise
    except Exception as error:
        raise UsageError(f"trainer: {kind.__name__}: {first_line(error)}") from None


def _described(key: str, value: Any, kinds: tuple[type, ...], command: str) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _is_name(key, value, kinds)):
        return value
    written: Mapping[str, Any] = {"class_path": value} if isinstance(value, str) else value
    if unknown := [name for name in written if name not in ("class_path", "init_args", "dict_kwargs")]:
        raise UsageError(f"no key {unknown[0]} in {key} (`radixtrain {command} --help {key}` lists the keys)")
    kind = _class_named(key, str(written.get("class_path")), kinds)
    given = {**(written.get("init_args") or {}), **(written.get("dict_kwargs") or {})}
    _check_arguments(key, kind, given, command)
    described = {name: _described(key, each, ANY, command) if _is_class(each) else each for name, each in given.items()}
    return {"class_path": _path_of(kind), "init_args": {**_defaults(kind), **described}}


def _is_name(key: str, text: str, kinds: tuple[type, ...]) -> bool:
    """Whether a text stands for itself, and is not the name of a class."""
    if key in SUGGESTED:
        return key == "trainer.logger" and text in LOGGERS
    return "." not in text and text not in _subclasses(kinds)


def _class_named(key: str, name: str, kinds: tuple[type, ...]) -> Any:
    """The class of a path, or of a name without one."""
    if "." not in name:
        known = _subclasses(kinds)
        if name in known:
            return known[name]
        suggested = SUGGESTED.get(key, ())
        raise UsageError(f"{key}: no {name!r}{_meant(name, suggested)}")
    if name.partition(".")[0] not in PACKAGES:
        raise UsageError(
            f"class_path {name!r} is not imported: a configuration may name only classes of radixtrain, "
            f"lightning, torch and transformers. For other classes, call radixtrain from your own script"
        )
    try:
        kind = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{key}: class_path {name!r}: {first_line(error)}") from None
    if not (isinstance(kind, type) and issubclass(kind, kinds)):
        raise UsageError(
            f"{key}: class_path {name!r} is not made: expected a subclass of "
            f"{' or '.join(each.__name__ for each in kinds)}; for anything else, call radixtrain from your own script"
        )
    return kind


def _meant(name: str, classes: tuple[str, ...]) -> str:
    """`wandb` is near to WandbLogger, and so is `WandbLoger`."""
    spelt = {spelling: each for each in reversed(classes) for spelling in (each.lower(), each.lower()[:-6])}
    close = get_close_matches(name.lower(), spelt, n=1, cutoff=0.5)
    if close:
        return f", did you mean {spelt[close[0]]}?"
    return f"; there are {', '.join(classes)}, and others by their class_path" if classes else "; write its class_path"


def _subclasses(kinds: tuple[type, ...]) -> dict[str, type]:
    """The classes of some kinds that are imported, by their names."""
    return {each.__name__: each for kind in kinds for each in _below(kind)}


def _below(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield from _below(each)
        if each.__module__.partition(".")[0] in PACKAGES:
            yield each


def _check_arguments(key: str, kind: Any, given: Mapping[str, Any], command: str) -> None:
    """UsageError for an argument that the class does not have, lacks, or does not take."""
    known = _parameters(kind)
    rest = [name for name, each in known.items() if each.kind is each.VAR_KEYWORD]
    takes_all = bool([known.pop(name) for name in rest]) and kind not in PASSED_ON
    for name, value in given.items():
        if name not in known and not takes_all:
            raise UsageError(f"no key {name} in {key} (`radixtrain {command} --help {key}` lists the keys)")
        if not _is_class(value):
            try:
                _option(kind, name, value)
            except ValidationError:
                option = Key(f"{key}: {kind.__name__}: {name}", "", None, "", _hints(kind)[name])
                raise UsageError(refusal(option, value)) from None
    lacking = [name for name, value in known.items() if value.default is value.empty and name not in given]
    if lacking:
        raise UsageError(f"{key}: {kind.__name__} needs {', '.join(lacking)}, under its init_args")


def _is_class(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _parameters(kind: Any) -> dict[str, inspect.Parameter]:
    """The arguments of a class, and of what it passes them on to."""
    own = dict(inspect.signature(kind).parameters)
    passed_on = inspect.signature(PASSED_ON[kind]).parameters if kind in PASSED_ON else {}
    return {**{name: each for name, each in passed_on.items() if each.default is not each.empty}, **own}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of the arguments; none if some are only known to type checkers."""
    with suppress(NameError):
        return get_type_hints(kind.__init__)
    return {}


def _option(kind: Any, name: str, value: Any) -> Any:
    """The value as the class takes it: `00:30:00` for a timedelta. Raises pydantic's ValidationError."""
    if name not in _hints(kind):
        return value
    return TypeAdapter(_hints(kind)[name], config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)


def _defaults(kind: Any) -> dict[str, Any]:
    """The defaults of a class, as far as a file can have them."""
    plain = (bool, int, float, str, NoneType)
    return {
        name: each.default for name, each in inspect.signature(kind).parameters.items() if type(each.default) in plain
    }


def _path_of(kind: type) -> str:
    """The shortest path that a class is imported by."""
    packages = kind.__module__.split(".")
    paths = (".".join(packages[: number + 1]) for number in range(len(packages)))
    return next(
        f"{path}.{kind.__name__}" for path in paths if getattr(import_module(path), kind.__name__, None) is kind
    )
