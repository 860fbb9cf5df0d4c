"""`share_prefixes`: what modifies attention is not lost, and no radix batch runs on another attention."""

import pytest

from radixtrain import RadixCollator, share_prefixes, verify_equivalence
from radixtrain.attention import tree_attention
from radixtrain.collators.misuse_guard import end_watch
from radixtrain.collators.steps import PaddedCollator
from radixtrain.errors import UserError
from radixtrain.hf.guards.model import Verdict
from tests.support.models import EAGER, tiny_model
from tests.support.steps import FEATURES

# A soft-cap that these small scores reach.
MODIFIED = {"Gemma2": {"attn_logit_softcapping": 0.5, **EAGER}, "GptOss": {}, "Mistral": {}}


def error_of(model):
    """The worst relative L2 error of a gradient in float64."""
    return verify_equivalence(model, FEATURES)["float64"].worst.radix


@pytest.mark.parametrize(
    ("family", "lost"), [("Gemma2", "softcap"), ("Gemma2", "window"), ("GptOss", "sinks"), ("Mistral", "window")]
)
def test_a_lost_modifier_is_caught(family, lost, monkeypatch):
    """By the probe, and by the comparison without it."""
    model = tiny_model(f"{family}ForCausalLM", **MODIFIED[family])
    monkeypatch.setattr(
        "radixtrain.hf.attention_interface.tree_attention",
        lambda *args, **options: tree_attention(*args, **{**options, lost: None}),
    )
    with pytest.raises(UserError, match="computes a token from others"):
        error_of(model)
    monkeypatch.setattr(Verdict, "why_not", lambda *_, **__: None)
    assert error_of(model) > 1e-3


class TestNeverOnAnotherAttention:
    """A layer that does not attend: test_attention_interface.py. One that is switched: test_hooks.py."""

    def test_never_prepared(self, tiny_qwen3):
        """Not even without the watch for such models, whether another model was prepared or not."""
        batch = RadixCollator()(FEATURES)
        end_watch()
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            tiny_qwen3()(**batch)

    def test_a_padded_batch(self, tiny_qwen3):
        with pytest.raises(UserError, match="has no plan: give an ordinary model its input_ids"):
            share_prefixes(tiny_qwen3())(**PaddedCollator()(FEATURES))
