"""Classes that a configuration names, such as callbacks and loggers of Lightning's trainer: found and made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any, get_type_hints

from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from radixtrain.commands.keys import Key
from radixtrain.commands.reading import refusal
from radixtrain.commands.typed import shortened
from radixtrain.errors import UsageError, UserError, first_line

# A configuration makes objects of these packages and kinds only: any other could run code, as `torch.hub.load` and
# `transformers.pipeline` do.
PACKAGES = ("radixtrain", "lightning", "torch", "transformers")
KINDS: dict[str, tuple[type, ...]] = {
    "trainer.logger": (Logger,),
    "trainer.callbacks": (Callback,),
    "trainer.plugins": (Precision, CheckpointIO, ClusterEnvironment, LayerSync),
    "trainer.strategy": (Strategy,),
    "trainer.accelerator": (Accelerator,),
    "trainer.profiler": (Profiler,),
}
ANY = sum(KINDS.values(), ())
LOGGERS = ("wandb", "trackio", "swanlab", "tensorboard", "csv", "none")
# Keys whose texts name classes, and what a message suggests. Texts of the other keys may be names of Lightning's own.
SUGGESTED = {
    "trainer.logger": (*LOGGERS, "WandbLogger", "TensorBoardLogger", "CSVLogger", "MLFlowLogger", "CometLogger"),
    "trainer.callbacks": ("EarlyStopping", "ModelCheckpoint", "LearningRateMonitor", "Timer"),
    "trainer.plugins": (),
}
UNKNOWN = "unexpected_keyword_argument"
LACKING = ("missing_argument", "missing_keyword_only_argument")


def describe_classes(trainer: object) -> None:
    """Write each class of the section `trainer` as `class_path` and `init_args`.

    Raises UsageError for what is not a class of the key, or not one that a configuration may name.
    """
    for key, kinds in KINDS.items():
        name = key.removeprefix("trainer.")
        value = getattr(trainer, name)
        is_list = isinstance(value, list) or (name == "callbacks" and value is not None)
        found = [_described(key, each, kinds) for each in (value if isinstance(value, list) else [value])]
        setattr(trainer, name, found if is_list else found[0])


def made(key: str, value: Any, command: str) -> Any:
    """Make the objects that `describe_classes` has written, also inside arguments; the rest is returned unchanged.

    Raises UsageError for an argument that is unknown or missing, or whose value a class does not take.
    """
    if isinstance(value, list):
        return [made(key, each, command) for each in value]
    if not is_class(value):
        return value
    kind = _class_named(key, value["class_path"], ANY)
    options = {name: made(key, each, command) for name, each in value["init_args"].items()}
    try:
        return _called(kind, options)
    except ValidationError as error:
        raise UsageError(_refusal(key, kind, error, command)) from None
    except UserError:
        raise
    except Exception as error:
        raise UsageError(f"trainer: {kind.__name__}: {first_line(error)}") from None


def is_class(value: object) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _called(kind: Any, options: Mapping[str, Any]) -> Any:
    """Make an object, converting each option to the type of its class: `00:30:00` to a timedelta."""
    try:
        adapter = TypeAdapter(kind.__init__, config=ConfigDict(arbitrary_types_allowed=True))
    except (NameError, PydanticUserError):  # annotated with a type that only type checkers import, such as WandbLogger
        return kind(**options)
    instance = kind.__new__(kind)
    adapter.validate_python(ArgsKwargs((instance,), dict(options)))
    return instance


def _refusal(key: str, kind: Any, refused: ValidationError, command: str) -> str:
    """Write the message for an unknown option; without any, for one that is missing or has a wrong value."""
    error = min(refused.errors(), key=lambda each: each["type"] != UNKNOWN)
    option = str(error["loc"][0])
    if error["type"] == UNKNOWN:
        return f"no key {option} in {key} (`radixtrain {command} --help {key}` lists the keys)"
    if error["type"] in LACKING:
        return f"{key}: {kind.__name__} needs {option}, under its init_args"
    taken = get_type_hints(kind.__init__)[option]
    return refusal(Key(f"{key}: {kind.__name__}: {option}", "", None, "", taken), error["input"])


def _described(key: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _is_name(key, value, kinds)):
        return value
    written: Mapping[str, Any] = {"class_path": value} if isinstance(value, str) else value
    if unknown := written.keys() - {"class_path", "init_args"}:
        raise UsageError(f"no key {min(unknown)} in {key}: write options of a class in its init_args")
    options = written.get("init_args") or {}
    if not isinstance(options, Mapping) or not all(isinstance(option, str) for option in options):
        raise UsageError(f"{key}: init_args must be a mapping of names to values; got {shortened(options)}")
    path = str(written.get("class_path"))
    _class_named(key, path, kinds)
    return {"class_path": path, "init_args": {name: _inside(key, each) for name, each in options.items()}}


def _inside(key: str, value: object) -> Any:
    """Describe an argument of a class, which may describe a class itself."""
    if isinstance(value, list):
        return [_inside(key, each) for each in value]
    return _described(key, value, ANY) if is_class(value) else value


def _is_name(key: str, text: str, kinds: tuple[type, ...]) -> bool:
    """Return whether a text is a short name such as `csv` or `simple`, not the name of a class."""
    if key in SUGGESTED:
        return key == "trainer.logger" and text in LOGGERS
    return "." not in text and text not in _subclasses(kinds)


def _class_named(key: str, name: str, kinds: tuple[type, ...]) -> Any:
    """Find the class of a path, or of a name without one among those that Lightning or radixtrain has imported."""
    if "." not in name:
        known = _subclasses(kinds)
        if name not in known:
            raise UsageError(f"{key}: no {name!r}{_meant(name, SUGGESTED.get(key, ()))}")
        return known[name]
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
            f"{key}: class_path {name!r} is not accepted: expected a subclass of "
            f"{' or '.join(each.__name__ for each in kinds)}; for anything else, call radixtrain from your own script"
        )
    return kind


def _meant(name: str, classes: tuple[str, ...]) -> str:
    """Suggest a class: WandbLogger for `wandb` and for `WandbLoger`."""
    spelt = {spelling: each for each in reversed(classes) for spelling in (each.lower(), each.lower()[:-6])}
    close = get_close_matches(name.lower(), spelt, n=1, cutoff=0.5)
    if close:
        return f", did you mean {spelt[close[0]]}?"
    return f"; there are {', '.join(classes)}, and others by their class_path" if classes else "; write its class_path"


def _subclasses(kinds: tuple[type, ...]) -> dict[str, type]:
    return {each.__name__: each for kind in kinds for each in _below(kind)}


def _below(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield from _below(each)
        if each.__module__.partition(".")[0] in PACKAGES:
            yield each
