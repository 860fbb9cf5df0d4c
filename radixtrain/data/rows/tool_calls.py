"""Calls of tools in an assistant's turn, and what functions may be called: one form for every template."""

from __future__ import annotations

from typing import Any

from radixtrain.data.files.rows import explain, parse
from radixtrain.errors import DataError

__all__ = ["read_calls", "read_tools"]

Fields = dict[str, Any]


def read_calls(calls: Any, name: str, where: str) -> list[Fields]:
    """The calls as templates expect them, with their arguments as objects: text would be rendered as it stands.

    calls: a list of `{"type": "function", "function": {"name", "arguments"}}`, or of `{"name", "arguments"}`; arguments
        are an object, or its JSON as text.
    name: the turn, for errors.

    Raises DataError for another value, a call without a name, arguments that are not the JSON of an object.
    """
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
        raise DataError(where, f"{name}: tool_calls: expected a list of objects, found {repr(calls)[:60]}")
    return [_read_call(call, f"{name}: tool_calls: call {number}", where) for number, call in enumerate(calls, start=1)]


def read_tools(tools: Any, where: str) -> list[Fields]:
    """The function descriptions of a row: a list, or its JSON as text. Raises DataError for anything else."""
    if isinstance(tools, str):
        try:
            tools = parse(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(where, f"tools: {explain(error)}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(where, f"tools: expected a list of function descriptions, found {repr(tools)[:60]}")
    return tools


def _read_call(call: Fields, name: str, where: str) -> Fields:
    given = {key: value for key, value in call.items() if value is not None}  # columnar files fill up with nulls
    function = given.get("function", given)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(where, f"{name}: expected the name of a function, found {repr(call)[:60]}")
    name = f"{name} of the tool {function['name']!r}"
    read = function | {"arguments": _arguments(function.get("arguments"), name, where)}
    return given | {"function": read} if "function" in given else read


def _arguments(arguments: Any, name: str, where: str) -> Fields:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments)
        except (ValueError, RecursionError) as error:
            raise DataError(where, f"{name}: arguments: {explain(error)}") from None
    if not isinstance(arguments, dict):
        raise DataError(where, f"{name}: arguments: expected an object, found {repr(arguments)[:60]}")
    return arguments
