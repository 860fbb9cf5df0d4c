"""What a mixer gets on the runs of a tree: its arguments and its runs; and where it may stand.

That values and gradients are those of each sequence: tests/claims/equivalence/test_recurrent_tries.py. That a layer has
the tree of its batch, also when activations are recomputed: tests/claims/recurrent.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from radixtrain import share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.backbone import mixers_of
from radixtrain.hf.recurrent import ForkedStates, arguments_by_name, cache_argument, run_on_tree
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.runs import runs_of_segments, tree_runs
from tests.support.batches import plan_of
from tests.support.steps import FEATURES, Build, batch_of


class Sums(nn.Module):
    """The sum of the rows so far, which is its state; it speaks Hugging Face's cache protocol."""

    def forward(self, hidden_states, cache_params=None):
        if cache_params is None:
            return hidden_states.cumsum(1)
        before = cache_params.get_recurrent_state(0)
        sums = hidden_states.cumsum(1) + (0 if before is None else before[:, None])
        cache_params.update_recurrent_state(sums[:, -1], 0)
        return sums


def test_literally():
    """1 2 3 -> 4 | 5, and 6 7. Only calls that fork have a cache: the others run on the training kernels of a mixer."""
    seen = []

    def forward(hidden_states, cache_params):
        seen.append(type(cache_params))
        return Sums()(hidden_states, cache_params)

    plan = plan_of([[1, 2, 3, 4], [1, 2, 3, 5], [6, 7]])
    runs = runs_of_segments(plan.segment_starts, plan.segment_parents, min_saved=2)
    rows = torch.tensor([1.0, 2, 3, 4, 1, 2, 3, 5, 6, 7])[torch.tensor(plan.gather_indices)][None, :, None]
    sums = run_on_tree(Sums(), forward, {"hidden_states": rows}, runs)[0, :, 0]
    assert sums[torch.tensor(plan.inverse_indices)].tolist() == [1, 3, 6, 10, 1, 3, 6, 11, 6, 13]
    assert seen == [ForkedStates, type(None), ForkedStates]


class TestArguments:
    def test_a_subclass_that_passes_everything_on(self):
        class Twice(Sums):
            def forward(self, *args, **kwargs):
                return 2 * super().forward(*args, **kwargs)

        assert cache_argument(Twice()) == cache_argument(Sums())
        assert arguments_by_name(Twice(), ("rows",), {}) == {"hidden_states": "rows"}

    @pytest.mark.parametrize("annotation", [Cache | None, "Qwen3NextDynamicCache | None"])
    def test_the_cache_by_its_annotation(self, annotation):
        """Whatever a later transformers calls it; an old name that a layer still passes is left out."""

        class Renamed(Sums):
            def forward(self, hidden_states, kept_states=None):
                return super().forward(hidden_states, kept_states)

        Renamed.forward.__annotations__["kept_states"] = annotation
        assert cache_argument(Renamed()) == "kept_states"
        plan = plan_of([[1, 2, 3], [1, 2, 4]])
        runs = runs_of_segments(plan.segment_starts, plan.segment_parents, min_saved=2)
        given = {"hidden_states": torch.ones(1, 4, 1), "cache_params": None}
        assert run_on_tree(Renamed(), Renamed().forward, given, runs)[0, :, 0].tolist() == [1, 2, 3, 3]

    def test_a_cache_without_a_name(self):
        class Unnamed(nn.Module):
            def forward(self, *args, **kwargs):
                raise NotImplementedError

        with pytest.raises(UserError, match=r"Unnamed has a recurrent state, and its forward does not name the cache"):
            cache_argument(Unnamed())


def test_runs_of_the_batch_are_not_read_back():
    """On meta tensors, as on a device under capture, reading a value raises."""
    layout = TreeLayout.from_plan(plan_of([[1, 2, 3], [4, 5]])).to("meta")
    assert all(tree_runs(layout, forks).rows.device == torch.device("meta") for forks in (True, False))


FORKS = pytest.mark.usefixtures("free_forks")
KINDS = ["linear_attention", "linear_attention", "full_attention"]


@FORKS
class TestInstalling:
    def test_outside_of_a_layer(self, tiny_hybrid: Build) -> None:
        """A model that is refused is as it was."""
        model = tiny_hybrid("Qwen3.5")
        before = model.config._attn_implementation
        model.model.front = model.model.layers[0].linear_attn
        with pytest.raises(UserError, match=r"GatedDeltaNet \(front\) carries .* outside of the decoder layers"):
            share_prefixes(model)
        assert model.config._attn_implementation == before
        assert "forward" not in vars(model.model.front)

    def test_two_layers_that_share_a_mixer(self, tiny_hybrid: Build) -> None:
        """In the second one it had no call, and read all unique rows as one sequence."""
        model = tiny_hybrid("Qwen3.5", num_hidden_layers=3, layer_types=KINDS)
        model.model.layers[1].linear_attn = model.model.layers[0].linear_attn
        report = verify_equivalence(model, FEATURES)
        assert report.passed, str(report)


@FORKS
def test_the_same_bits_every_time(tiny_hybrid: Build) -> None:
    """Rows and states of several runs are added up in one order."""
    model = share_prefixes(tiny_hybrid("Qwen3.5"))

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(**batch_of()).loss, list(model.parameters()))

    assert all(map(torch.equal, gradients(), gradients()))


class PassesNothingOn(nn.Module):
    """Calls a decoder layer with nothing but its rows: no mask, none of the arguments of the model's call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return self.layer(hidden, position_embeddings=kwargs["position_embeddings"])


@FORKS
@pytest.mark.usefixtures("hooks_that_may_stay")
def test_a_layer_that_passes_nothing_on(tiny_hybrid: Build) -> None:
    """Its mixer would read all unique rows as one sequence."""
    model = share_prefixes(tiny_hybrid("Qwen3.5"))
    model.model.layers[0] = PassesNothingOn(model.model.layers[0])
    with pytest.raises(UserError, match="computes a token from others"):
        model(**batch_of())


class Protocol(nn.Module):
    """Speaks the cache protocol."""

    def forward(self, x, cache_params=None):
        return x if cache_params is None else cache_params.update_conv_state(x, 0)


class Inherits(Protocol):
    pass


class Mentions(nn.Module):
    """Passes a cache on and asks its has_previous_state, which does not make it a mixer."""

    def __init__(self):
        super().__init__()
        self.inner = Protocol()

    def forward(self, x, past_key_values=None):
        assert not past_key_values.has_previous_state(0)
        return self.inner(x, past_key_values)


def test_by_its_source_or_that_of_what_it_inherits_from():
    model = nn.ModuleDict({"one": Protocol(), "two": Inherits(), "three": Mentions(), "four": nn.Conv1d(2, 2, 3)})
    assert list(mixers_of(model)) == ["one", "two", "three.inner"]


def test_a_class_without_a_source_file():
    """Typed at a prompt, as it were."""
    namespace = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x, state=None): return x.update_conv_state(x)", namespace)
    assert list(mixers_of(nn.ModuleList([namespace["Typed"]()]))) == ["0"]
