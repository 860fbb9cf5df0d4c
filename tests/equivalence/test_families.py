"""Which model families train on unique tokens: Hugging Face's own classes, tiny and random, through `prepare_model`.

Each family gives the gradient of the ordinary model on every sequence alone, in float64 and in float32, with every
gradient alive; or it is refused, by an error that names the layer and the reason. Sequences are longer than every
sliding window, so that windows bite. README's table is written from this run: `RADIXTRAIN_WRITE_TABLE=1 make test`
writes it, and a row that says something else than its test found fails.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from radixtrain import RadixCollator, prepare_model, restore_model, verify_equivalence
from radixtrain.equivalence import compare_gradients
from radixtrain.errors import UserError
from radixtrain.oracle import float64_throughout, gradients_of

WRITING = bool(os.environ.get("RADIXTRAIN_WRITE_TABLE"))
README = Path(__file__).resolve().parents[2] / "README.md"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
WINDOW = 4
FEATURES = [
    {"input_ids": [7, 8, 9, 10, 11, 12, 1, 2, 3], "labels": [-100, -100, -100, -100, 11, 12, 1, 2, 3]},
    {"input_ids": [7, 8, 9, 10, 11, 12, 1, 4], "labels": [-100, -100, -100, -100, 11, 12, 1, 4]},
    {"input_ids": [7, 8, 9, 10, 11, 12, 5], "labels": [-100, -100, -100, -100, -100, -100, 5]},
    {"input_ids": [7, 8, 9, 6, 6, 6, 13, 14], "labels": [-100, 8, 9, 6, 6, 6, 13, 14]},
    {"input_ids": [30, 31, 32, 33, 34, 35, 36], "labels": [30, 31, 32, 33, 34, 35, 36]},
]


@dataclass(frozen=True)
class Family:
    """name: as people write it. classes: prefix of Hugging Face's. settings: of its configuration. what: it has."""

    name: str
    classes: str
    what: str = "full attention"
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    refused: str = ""

    def build(self, seed: int = 0, **changes: Any) -> Any:
        """A tiny model whose weights are of order one, so that every gradient is alive."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config or f"{self.classes}Config")
        model = getattr(transformers, f"{self.classes}ForCausalLM")(
            config(**{**SIZES, **HEADS, **self.settings, **changes})
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.copy_(noise + parameter if parameter.ndim == 1 else noise)
        return model


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
PASSING = [
    Family("Qwen3", "Qwen3", settings={"head_dim": 8}),
    Family("Qwen2.5", "Qwen2"),
    Family("Qwen3-MoE", "Qwen3Moe", "mixture of experts", {"head_dim": 8, **EXPERTS}),
    Family("Llama", "Llama"),
    Family("Mistral", "Mistral", "sliding window", {"sliding_window": WINDOW}),
    Family("Mixtral", "Mixtral", "mixture of experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Gemma 2", "Gemma2", "soft-cap, sliding window", {"head_dim": 8, **ALTERNATING}),
    Family("Gemma 3", "Gemma3", "sliding window", {"head_dim": 8, **ALTERNATING}, "Gemma3TextConfig"),
    Family("Phi-3", "Phi3", "sliding window", {"sliding_window": WINDOW}),
    Family("OLMo 2", "Olmo2"),
    Family("SmolLM3", "SmolLM3", "layers without positions", {"no_rope_layers": [1, 0]}),
    Family("Granite", "Granite", "scaled logits", {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    Family("GLM-4", "Glm4", settings={"head_dim": 8}),
    Family("Cohere 2", "Cohere2", "sliding window", ALTERNATING),
    Family(
        "gpt-oss",
        "GptOss",
        "sinks, sliding window, mixture of experts",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING},
    ),
    Family(
        "DeepSeek-V3",
        "DeepseekV3",
        "latent attention, mixture of experts",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
]
# DeepSeek balances its experts by a bias, and Hugging Face's class has no loss for it.
WITH_ROUTER_LOSS = [family for family in PASSING if "mixture" in family.what and family.classes != "DeepseekV3"]
REFUSED = [
    Family(
        "Qwen3-Next",
        "Qwen3Next",
        "linear attention",
        {
            "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "shared_expert_intermediate_size": 8, "num_hidden_layers": 4, **EXPERTS,
        },
        refused="layer 0 is 'linear_attention'",
    ),
    Family(
        "Llama 4",
        "Llama4",
        "chunked attention",
        {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 32, "attention_chunk_size": WINDOW},
        config="Llama4TextConfig",
        refused="layer 0 is 'chunked_attention'",
    ),
]  # fmt: skip


FAMILIES = [*PASSING, *REFUSED]


@pytest.mark.parametrize("family", PASSING, ids=lambda family: family.name)
def test_same_gradient(family: Family, record_property: Callable[[str, Any], None]) -> None:
    report = verify_equivalence(family.build(), FEATURES)
    assert report.passed and report.conclusive, str(report)
    float64, float32 = report["float64"], report["float32"]
    assert float64.worst.radix <= 1e-12
    figures = [f"{float64.worst.radix:.1e}", f"{float32.worst.radix:.1e}", f"{float32.worst_ordinary:.1e}"]
    check_row(family, figures, record_property)


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_refused_with_a_reason(family: Family, record_property: Callable[[str, Any], None]) -> None:
    with pytest.raises(UserError, match=re.escape(family.refused)):
        prepare_model(family.build())
    check_row(family, ["refused", "-", "-"], record_property)


def test_the_table_has_these_families_and_no_others() -> None:
    if not WRITING:
        assert sorted(table()) == sorted(family.name for family in FAMILIES)


@pytest.mark.parametrize("family", PASSING, ids=lambda family: family.name)
@pytest.mark.parametrize("attention", ["path", "expand", "reference"])
def test_every_strategy(family: Family, attention: str) -> None:
    report = verify_equivalence(family.build(seed=1), FEATURES, attention=attention, precisions=["float64"])
    assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)


@pytest.mark.parametrize("family", WITH_ROUTER_LOSS, ids=lambda family: family.name)
@pytest.mark.parametrize("pad_to_multiple_of", [None, 8])
def test_router_statistics_count_original_tokens(family: Family, pad_to_multiple_of: int | None) -> None:
    """The load-balancing loss is no sum over tokens, so its oracle is the whole padded batch, mask and all."""
    model = family.build(output_router_logits=True, router_aux_loss_coef=1.0)
    longest = max(len(feature["input_ids"]) for feature in FEATURES)
    padded = {
        name: torch.tensor([[*f[name], *[fill] * (longest - len(f[name]))] for f in FEATURES])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    mask = [[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in FEATURES]
    batch = RadixCollator(pad_to_multiple_of=pad_to_multiple_of)(FEATURES)
    with float64_throughout(model):
        truth = gradients_of(model, lambda: [model(**padded, attention_mask=torch.tensor(mask)).loss])
        radix = gradients_of(prepare_model(model), lambda: [model(**batch).loss])
        unique = gradients_of(model, lambda: [model(**batch).loss - model(**batch).aux_loss])
    restore_model(model)
    rung = compare_gradients("float64", truth, truth, radix)
    assert rung.passed and not rung.dead, rung.worst
    without = compare_gradients("float64", truth, truth, unique)
    assert without.worst.radix > 1e-3, "the router loss does not matter here, so nothing was tested"


def table() -> dict[str, list[str]]:
    """README's rows by family: what it has, and the figures."""
    block = README.read_text(encoding="utf-8").split("<!-- families: begin -->")[1].split("<!-- families: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines()[2:]]
    return {name: cells for name, *cells in rows}


def check_row(family: Family, figures: list[str], record_property: Callable[[str, Any], None]) -> None:
    """README says the same, but for the last digits, which are another machine's; or it is being written."""
    row = [family.what, *figures]
    record_property("family", json.dumps([len(FAMILIES), family.name, *row]))
    if WRITING:
        return
    said = table()[family.name]
    assert [cell for cell in said if not cell[0].isdigit()] == [cell for cell in row if not cell[0].isdigit()]
    for told, found in zip(said, row, strict=True):
        assert not told[0].isdigit() or 0.1 < float(told) / float(found) < 10, f"README says {said}, found {row}"
