"""The public names: found by users, by type checkers, and in the same modules by both."""

import ast
from pathlib import Path

import radixtrain


def test_type_checkers_see_what_is_loaded() -> None:
    tree = ast.parse(Path(radixtrain.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == radixtrain._HOMES
    assert list(radixtrain._HOMES) == radixtrain.__all__ == dir(radixtrain)
