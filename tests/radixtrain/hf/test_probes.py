"""A later transformers has other names: what it computes is still the same, or is refused by name. Never another."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from renamed_transformers import renamed
from tiers import cases
from tiny_models import tiny_model
from transformers import masking_utils

from radixtrain import share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf import probes

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2, 3, 4, 5, 6], [7, 8, 9, 3, 5, 6, 7])]
SWITCHED_ON = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
WINDOWED: dict[str, dict[str, Any]] = {  # a window of 4 tokens; the layers of Qwen2-MoE and PhiMoE obey only their mask
    "Mistral": {},
    "Gemma2": {"attn_implementation": "eager"},
    "Qwen2Moe": SWITCHED_ON,
    "Phimoe": {"sliding_window": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "GptOss": {},
}


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    probes._broken.cache_clear()
    yield
    probes._broken.cache_clear()


def model_of(family: str) -> Any:
    return tiny_model(f"{family}ForCausalLM", **WINDOWED.get(family, {}))


def file_of(family: str) -> Any:
    return sys.modules[getattr(transformers, f"{family}Model").__module__]


@pytest.mark.parametrize("family", cases(["Llama", *WINDOWED], quick=["Llama", "Qwen2Moe"]))
def test_a_renamed_local_variable_changes_nothing(family, monkeypatch):
    changed = renamed(file_of(family), {"attention_interface": "attention_function"}, monkeypatch)
    monkeypatch.setattr(transformers, f"{family}ForCausalLM", getattr(changed, f"{family}ForCausalLM"))
    report = verify_equivalence(model_of(family), FEATURES, precisions=["float64"])
    assert report["float64"].worst.radix <= 1e-12, str(report)


@pytest.mark.parametrize("family", cases(WINDOWED, quick=["Mistral", "Qwen2Moe"]))
@pytest.mark.parametrize("prepare", [share_prefixes])
def test_a_mask_with_a_renamed_keyword(family, prepare, monkeypatch):
    """Qwen2-MoE and PhiMoE lost their window, without an error."""
    changed = renamed(masking_utils, {"local_size=": "window_size="}, monkeypatch)
    changed.ALL_MASK_ATTENTION_FUNCTIONS = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    model = model_of(family)
    for name in ("create_sliding_window_causal_mask", "create_masks_for_generate"):
        monkeypatch.setattr(file_of(family), name, getattr(changed, name), raising=False)
    with pytest.raises(UserError, match="requests its mask with window_size, which this version"):
        verify_equivalence(prepare(model), FEATURES, precisions=["float64"])


@pytest.mark.parametrize(
    ("family", "names", "sentence"),
    [
        ("Gemma2", {"scaling=self.scaling": "scale=self.scaling"}, "its scale as `scaling`"),
        ("Gemma2", {"sliding_window=self": "window=self"}, "its window as `sliding_window`"),
        ("Gemma2", {"ALL_ATTENTION_FUNCTIONS.get_interface": "_interface"}, "every layer calls the attention"),
    ],
)
def test_a_renamed_keyword_of_attention(family, names, sentence, monkeypatch):
    """Refused before any model trains: whoever only reads a keyword would take its default."""
    changed = renamed(file_of(family), names, monkeypatch)
    changed._interface = lambda name, default: default
    monkeypatch.setattr(transformers, f"{family}Model", getattr(changed, f"{family}Model"))
    with pytest.raises(UserError, match=rf"transformers [\d.]+: it no longer holds that .*{sentence}"):
        share_prefixes(model_of("Llama"))


def test_the_random_state_stays():
    before = torch.random.get_rng_state()
    assert probes._broken() is None
    assert torch.equal(torch.random.get_rng_state(), before)
