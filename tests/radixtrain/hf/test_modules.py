"""Which modules carry a state, by their source."""

from torch import nn

from radixtrain.hf.modules import (
    mixers_of,
)

# Class -> the mixers by path, and the number of layers that attend.


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
