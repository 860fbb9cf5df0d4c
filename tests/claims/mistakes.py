"""How the tests are tested: a mistake is planted in the source, and a check has to see it."""

from collections.abc import Callable
from copy import copy
from functools import cached_property, partial
from inspect import getattr_static
from typing import Any

import pytest
import torch
from torch import Tensor

import radixtrain.hf.attention_interface
from radixtrain.attention import tree_attention
from radixtrain.errors import UserError
from radixtrain.tree.layout import TreeLayout
from radixtrain.verification.equivalence import EquivalenceReport

# What shows a mistake: a comparison, the model's own error, or a refusal.
SEEN = (AssertionError, RuntimeError, ValueError, UserError, pytest.fail.Exception)


def plant(patch: pytest.MonkeyPatch, owner: Any, name: Any, mistake: Callable[..., Any]) -> None:
    """Put `mistake(real, *arguments)` in the place of a function, method, property, entry of a table, or value."""
    if isinstance(owner, dict):
        patch.setitem(owner, name, partial(mistake, owner.get(name)))
        return
    real = getattr_static(owner, name)
    if isinstance(real, property | cached_property):
        real = real.fget if isinstance(real, property) else real.func
        patch.setattr(owner, name, property(partial(mistake, real)))
        return
    real = getattr(owner, name)
    is_value = not callable(real)
    patch.setattr(owner, name, mistake(real) if is_value else lambda *args, **options: mistake(real, *args, **options))


def returning(value: Any) -> Callable[..., Any]:
    """The mistake of a function that always returns this."""
    return lambda real, *args, **options: value


WEIGHTS = ("_parameters", "_buffers")


def state_of(model: torch.nn.Module) -> list[Any]:
    """All that may be left changed on a model, apart from weights: hooks, modes, functions, settings, and of torch."""
    is_changed_in_place = lambda x: isinstance(x, dict | set) or hasattr(x, "to_dict")  # noqa: E731 - configurations
    kept = [
        {name: copy(x) if is_changed_in_place(x) else x for name, x in vars(module).items() if name not in WEIGHTS}
        for module in model.modules()
    ]
    return [kept, [parameter.requires_grad for parameter in model.parameters()], torch.is_grad_enabled()]


def assert_caught(report: EquivalenceReport) -> None:
    for precision in ("float64", "float32"):
        assert not report[precision].passed, f"{precision} lets it through:\n{report}"
    assert "NOT EQUAL" in str(report)


# What a row sees: mistakes of the ends of subtrees, in the rows of a tree.


def sibling_leak(layout: TreeLayout) -> Tensor:
    """Only causal over the rows: every branch sees the ones before it."""
    return torch.full_like(layout.subtree_ends, layout.num_rows)


def forgotten_prompt(layout: TreeLayout) -> Tensor:
    """Each segment sees only itself."""
    return layout.segment_starts[1:].clone()


def one_level(layout: TreeLayout) -> Tensor:
    """A mask of prompt and completions on a nested trie: the middle of a path is not seen."""
    ends = layout.subtree_ends.clone()
    nested = layout.segment_starts[:-1] > 0
    ends[nested] = layout.segment_starts[1:][nested]
    return ends


def plant_ends(patch: pytest.MonkeyPatch, ends_of: Callable[[TreeLayout], Tensor]) -> None:
    """Attend with other ends of subtrees."""

    def mutated(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, **options: Any) -> Tensor:
        wrong = TreeLayout(layout.host, layout.rows)
        wrong.subtree_ends = ends_of(layout)
        return tree_attention(query, key, value, wrong, **{**options, "attention": "reference"})

    patch.setattr(radixtrain.hf.attention_interface, "tree_attention", mutated)
