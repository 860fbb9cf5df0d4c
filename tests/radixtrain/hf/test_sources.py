"""The source of a class, each file parsed once."""

import collections
import inspect
from typing import Any

import pytest
import transformers.models.gpt2.modeling_gpt2 as gpt2
import transformers.models.qwen3.modeling_qwen3 as qwen3
from torch import nn

from radixtrain.hf.sources import source_of_class


class Outer:
    """Has a class inside."""

    class Inner:
        """Is inside."""


def classes_of(module: Any) -> list[type]:
    return [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]


@pytest.mark.parametrize("module", [qwen3, gpt2])
def test_is_what_inspect_gives(module: Any) -> None:
    classes = classes_of(module)
    assert len(classes) > 8
    for each in classes:
        assert source_of_class(each) == inspect.getsource(each)


def test_a_class_in_a_class() -> None:
    source = source_of_class(Outer.Inner)
    assert source is not None
    assert "Is inside" in source
    assert "Has a class inside" not in source


def test_a_class_in_a_function() -> None:
    class Local(nn.Module):
        """Is local."""

    assert "Is local" in (source_of_class(Local) or "")


@pytest.mark.parametrize("without", [dict, collections.namedtuple("Pair", "a b"), type("Made", (), {})])
def test_a_class_without_source(without: type) -> None:
    assert source_of_class(without) is None
