"""Shares the prefixes of every model that this process loads by `from_pretrained`, for `radixtrain run`.

    RADIXTRAIN=1 --radixtrain-run.pth, as Python starts--> watch() --import transformers--> from_pretrained shares

The file `radixtrain-run.pth` lies beside the installed package. Python reads it in every process of the environment,
and it does nothing unless RADIXTRAIN is one of `ON`. RADIXTRAIN_OPTIONS holds the options of `share_prefixes` as JSON,
and

    only: names of models to share, by class, by the path that `from_pretrained` got, or by the last part of it;
    reports: a folder where each process writes what it shared, for `radixtrain run` to sum. Without it, each prints.

A model that cannot be shared runs as if radixtrain were not installed, and the last lines of the output say why.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from radixtrain.errors import UserError
from radixtrain.screen import printable

MODULE = "transformers.modeling_utils"
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")  # values of RADIXTRAIN, in any case
SHOWN = 80  # characters of a value in a message
SUMMED = {"num_shared", "num_tokens", "num_unique_tokens", "num_generating"}  # fields of a SharingReport


@dataclass
class LoadedModel:
    """What happened to a model: `report` has the fields of its SharingReport, `reason` says why it was not shared."""

    name: str
    reason: str = ""
    num_processes: int = 1
    report: dict[str, Any] = field(default_factory=dict)

    def add(self, other: LoadedModel) -> None:
        """Add the report of another process about the same model."""
        self.num_processes += other.num_processes
        for key in SUMMED & other.report.keys():
            self.report[key] += other.report[key]
        self.report["not_shared"] = Counter(self.report.get("not_shared")) + Counter(other.report.get("not_shared"))

    def __str__(self) -> str:
        """Summarise in one line."""
        processes = f" on {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"radixtrain: {self.name}{processes}: {f'not shared: {self.reason}' if self.reason else self._calls()}"

    def _calls(self) -> str:
        num_shared, others = self.report["num_shared"], Counter(self.report["not_shared"])
        generation = f"{num} calls of generation" if (num := self.report["num_generating"]) else ""
        num_calls = num_shared + others.total()
        if not num_calls:
            return f"only {generation}" if generation else "its forward pass was not called"
        ratio = self.report["num_tokens"] / max(1, self.report["num_unique_tokens"])
        shared = (
            f"r = {ratio:.2f}, {num_shared} of {num_calls} calls shared"
            if num_shared
            else (f"none of {num_calls} calls shared")
        )
        reasons = [f"{count} not: {reason}" for reason, count in others.most_common()]
        return "; ".join(filter(None, (shared, *reasons, generation)))


def watch() -> None:
    """Wrap `from_pretrained` as soon as transformers is imported. Imports neither it nor torch."""
    if MODULE in sys.modules:
        _wrap_from_pretrained()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module, as the other finders do, and wraps `from_pretrained` once it has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _wrap_from_pretrained()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def read_options() -> dict[str, Any]:
    """Read RADIXTRAIN_OPTIONS. Raises UserError if it is not a JSON object, or `only` or `reports` has a wrong type."""
    text = os.environ.get("RADIXTRAIN_OPTIONS") or "{}"
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"RADIXTRAIN_OPTIONS is not JSON ({error}): {text[:SHOWN]}") from None
    if not isinstance(options, dict):
        raise UserError(f"RADIXTRAIN_OPTIONS: expected a JSON object, got {text[:SHOWN]}")
    only, folder = options.get("only") or [], options.get("reports") or ""
    if not (isinstance(only, list) and all(isinstance(name, str) for name in only) and isinstance(folder, str)):
        raise UserError(f"RADIXTRAIN_OPTIONS: only must be a list of names, and reports a folder; got {text[:SHOWN]}")
    return options


def _wrap_from_pretrained() -> None:
    transformers: Any = sys.modules[MODULE]
    try:
        options, wrong = read_options(), ""
    except UserError as error:  # then no model is shared, and the import continues as without radixtrain
        options, wrong = {}, str(error)
    only, folder = options.pop("only", None), options.pop("reports", None)
    loaded: list[tuple[LoadedModel, Any]] = []
    atexit.register(_report, loaded, folder)
    original = transformers.PreTrainedModel.from_pretrained.__func__
    loading, lock = threading.local(), threading.Lock()

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: object, **kwargs: object) -> Any:
        is_part = getattr(loading, "is_on", False)  # a model may load its parts by from_pretrained
        loading.is_on = True
        try:
            result = original(cls, *args, **kwargs)
        finally:
            loading.is_on = is_part
        model = result[0] if isinstance(result, tuple) else result  # output_loading_info=True returns a pair
        path = str(args[0] if args else kwargs.get("pretrained_model_name_or_path") or model.name_or_path)
        if not is_part and (not only or {type(model).__name__, path, Path(path).name} & set(only)):
            name = f"{type(model).__name__} of {path}"
            with lock:
                count = sum(entry.name.partition(" (")[0] == name for entry, _ in loaded)
                name = f"{name} ({count + 1})" if count else name
                loaded.append((LoadedModel(name, wrong), None) if wrong else _share(model, name, options))
        return result

    transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _share(model: Any, name: str, options: dict[str, Any]) -> tuple[LoadedModel, Any]:
    """Share a model. Return its entry and its SharingReport, which is None if it cannot be shared."""
    from radixtrain.versions import check_versions

    try:
        check_versions()
        from radixtrain.hf.share import leave_refused_calls, share_prefixes, sharing_report

        leave_refused_calls(share_prefixes(model, **options))
        return LoadedModel(name), sharing_report(model)
    except Exception as error:  # a model may be unlike all known ones; its program must continue
        return LoadedModel(name, str(error) if isinstance(error, UserError) else repr(error)), None


def _report(loaded: Iterable[tuple[LoadedModel, Any]], folder: str | None) -> None:
    """Write the entries for `radixtrain run` when the process ends, or print them."""
    for model, report in loaded:
        model.report = vars(report) if report is not None else {}
    models = [model for model, _ in loaded]
    if folder is None:
        sys.stderr.writelines(f"{printable(model)}\n" for model in models)
    elif Path(folder).is_dir():
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps([vars(model) for model in models]))


_asked = os.environ.get("RADIXTRAIN", "").strip().lower()
if _asked in ON:
    watch()
elif _asked not in OFF:
    sys.stderr.write(
        f"radixtrain: RADIXTRAIN={printable(os.environ['RADIXTRAIN'][:SHOWN])}: no model is shared; "
        f"set it to 1 to share, or to 0\n"
    )
