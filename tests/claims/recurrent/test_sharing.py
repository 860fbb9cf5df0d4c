"""`share_prefixes` of a hybrid: copies, pickles, what it leaves, and third-party hooks."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from radixtrain import restore_model, share_prefixes
from radixtrain.hf.backbone import mixers_of
from radixtrain.verification.oracle import float64_truth
from tests.claims.mistakes import state_of
from tests.support.batches import padded
from tests.support.models import tiny_hybrid
from tests.support.steps import FEATURES, ONE_KIND, ROWS, assert_exact, batch_of, mixers_in


@ONE_KIND
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy(kind: str, duplicate: Any) -> None:
    """It runs on its own weights, has its own calls, and is saved as an ordinary model."""
    model = tiny_hybrid(kind)
    truth = float64_truth(model, FEATURES)
    copied = duplicate(share_prefixes(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    modules = set(copied.modules())
    assert mixers_in(copied) and all(mixer.module in modules for mixer in mixers_in(copied))
    assert_exact(copied, truth)
    assert copied.state_dict().keys() == tiny_hybrid(kind).state_dict().keys()


@ONE_KIND
def test_restore_undoes_it(kind: str) -> None:
    model = tiny_hybrid(kind)
    model.gradient_checkpointing_enable()
    before = state_of(model)
    share_prefixes(model)
    model(**batch_of()).loss.backward()
    restore_model(model)
    assert state_of(model) == before


@pytest.mark.usefixtures("hooks_that_may_stay")
@ONE_KIND
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_accelerate(kind: str, when: str) -> None:
    """They replace the `forward` of a module, as ours do, in either order; ours runs inside or outside of it."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counts(ModelHook):
        number = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return args, kwargs

    model, hook = tiny_hybrid(kind), Counts()
    truth = float64_truth(model, FEATURES)
    if when == "after":
        share_prefixes(model)
    (path,) = mixers_of(model.model)
    mixer = model.model.get_submodule(path)
    add_hook_to_module(mixer, hook)
    replaced = mixer.forward
    if when == "before":
        share_prefixes(model)
    assert_exact(model, truth)
    assert hook.number > 0
    restore_model(model)
    assert mixer.forward is replaced
    stock = tiny_hybrid(kind)
    assert torch.equal(model(**padded(ROWS, "right")).logits, stock(**padded(ROWS, "right")).logits)


@ONE_KIND
@pytest.mark.usefixtures("without_the_trial")
def test_a_forward_that_replaces_ours_is_refused(kind: str) -> None:
    """As `kernelize` does, at every change between training and evaluation if `use_kernels` is set."""
    model = share_prefixes(tiny_hybrid(kind))
    module = mixers_in(model)[0].module
    module.forward = type(module).forward.__get__(module)
    with pytest.raises(RuntimeError, match=r"1 of 1 recurrent layers .* call share_prefixes again"):
        model(**batch_of())
    truth = float64_truth(tiny_hybrid(kind), FEATURES)
    assert_exact(share_prefixes(model), truth)
