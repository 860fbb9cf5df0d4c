"""The source of a class, as `inspect.getsource` gives it, but each file is parsed once and not once per class.

Whether a model can be computed exactly is judged by the source of its modules. The file of a model takes 20 to 80 ms to
parse and has dozens of classes.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from functools import cache
from typing import Any

__all__ = ["source_of_class"]


def source_of_class(module_class: Any) -> str | None:
    """The code of a class without that of its parents; None without a source file."""
    try:
        file = inspect.getsourcefile(module_class)
        lines = linecache.getlines(file, vars(sys.modules[module_class.__module__])) if file else []
        first, last = _places(file, "".join(lines))[module_class.__qualname__]
    except (KeyError, OSError, SyntaxError, TypeError):  # built in, made by a function, or typed into a shell
        return _slowly(module_class)
    return "".join(lines[first - 1 : last])


@cache
def _places(file: str | None, source: str) -> dict[str, tuple[int, int]]:
    """The first and last line of every class in a file that is not inside a function, its decorators included."""
    places: dict[str, tuple[int, int]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                places[prefix + node.name] = first, node.end_lineno or first
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                visit([*node.body, *node.orelse], prefix)

    visit(ast.parse(source).body, "")
    return places


def _slowly(module_class: Any) -> str | None:
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):
        return None
