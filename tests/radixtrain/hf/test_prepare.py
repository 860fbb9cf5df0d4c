"""`prepare_model`: ordinary behaviour without a plan, refusals with a reason, no radix batch on another attention."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import radixtrain.hf.hooks
from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.attention import tree_attention
from radixtrain.collators.unprepared import end_watch
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.prepare import prepared_options
from radixtrain.testing import relative_error

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}

NESTED = [
    {"input_ids": [7, 8, 9, 1, 2, 3, 4, 5, 6, 10], "labels": [7, 8, 9, 1, 2, 3, 4, 5, 6, 10]},
    {"input_ids": [7, 8, 9, 1, 2, 3, 11, 12], "labels": [7, 8, 9, 1, 2, 3, 11, 12]},
    {"input_ids": [7, 8, 9, 3, 3, 4], "labels": [-100, 8, 9, -100, 3, 4]},
    {"input_ids": [7, 8, 9, 1, 2, 3, 4, 5, 6, 12, 13], "labels": [7, 8, 9, 1, 2, 3, 4, 5, 6, 12, 13]},
    {"input_ids": [7, 8], "labels": [7, 8]},
]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"experts_implementation": "eager"}  # grouped matrix products take no float64
SLIDING = ["sliding_attention", "full_attention"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EAGER = {"attn_implementation": "eager"}  # transformers before 5.21 chooses sdpa, which leaves a soft-cap out
# Every family with a modifier, with a window that binds in NESTED: the settings besides TINY.
MODIFIED: dict[str, dict[str, Any]] = {
    "Gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5,
        "layer_types": SLIDING,
        **EAGER,
    },
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": SLIDING, **EXPERTS},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen2Moe": {  # its layers do not hand their window to the attention function
        "use_sliding_window": True,
        "layer_types": SLIDING,
        "shared_expert_intermediate_size": 8,
        **MOE,
        **EXPERTS,
    },
    "Gemma3": {"head_dim": 8, "layer_types": SLIDING},
    "Phi3": {},
    "Starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "Cohere2": {"layer_types": SLIDING},
    "Olmo3": {"layer_types": SLIDING},
    "VaultGemma": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5,
        "layer_types": SLIDING,
        **EAGER,
    },
}


def tiny(family: str, **changes: Any) -> Any:
    """A random model of Hugging Face's own class in float64, every parameter of order one, sinks included."""
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))(**TINY, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + 0.2 * noise)
    return model


def windowed(family: str, window: int = 4) -> Any:
    return tiny(family, sliding_window=window, **MODIFIED[family])


def ordinary_results(model: Any, features: list[dict]) -> dict[str, Tensor]:
    """Loss and gradients of the unmodified model, one sequence at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    model.zero_grad()
    for feature in features:
        ids = torch.tensor(feature["input_ids"])[None]
        targets = torch.tensor(feature.get("labels", feature["input_ids"]))[1:]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        total = total + nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        count += int((targets != -100).sum())
    return with_gradients(model, total / count)


def radix_results(model: Any, features: list[dict], **options: Any) -> dict[str, Tensor]:
    prepare_model(model, **options)
    model.zero_grad()
    results = with_gradients(model, model(**RadixCollator()(features)).loss)
    restore_model(model)
    return results


def with_gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def worst_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Relative L2, of the tensors that are not zero up to rounding, as a key's bias may be."""
    assert set(actual) == set(expected)
    noise = 1e-6 * max(float(x.norm()) for x in expected.values())
    alive = [name for name, x in expected.items() if x.norm() > noise]
    assert len(alive) > 0.8 * len(expected)
    return max(relative_error(actual[name], expected[name]) for name in alive)


# In float64 what remains are Hugging Face's own casts to float32 (norms, rotary embedding, softmax, loss): a unit
# roundoff of 6e-8, through two layers and back.
BAR = 1e-6


@pytest.mark.parametrize("family", MODIFIED)
def test_modifiers_are_exact(family):
    """Soft-cap, sinks and a window of 4: loss and gradients of the ordinary model, with any strategy that can."""
    model = windowed(family)
    expected = ordinary_results(model, NESTED)
    for attention in ("auto", "path", "expand", "reference"):
        assert worst_error(radix_results(model, NESTED, attention=attention), expected) <= BAR, attention


@pytest.mark.parametrize("family", ["Gemma2", "GptOss", "Mistral"])
@pytest.mark.parametrize("attention", ["auto", "cascade"])
def test_a_window_as_long_as_the_longest_sequence(family, attention):
    model = windowed(family, window=11)
    assert worst_error(radix_results(model, NESTED, attention=attention), ordinary_results(model, NESTED)) <= BAR


def test_full_layers_stay_on_cascade(monkeypatch):
    seen = []

    def spy(*args, **options):
        seen.append(options["window"])
        return tree_attention(*args, **options)

    monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", spy)
    prepare_model(windowed("Gemma3"))(**RadixCollator()(NESTED))
    assert seen == [4, None]


@pytest.mark.parametrize(
    ("family", "lost"), [("Gemma2", "softcap"), ("Gemma2", "window"), ("GptOss", "sinks"), ("Mistral", "window")]
)
def test_a_lost_modifier_is_caught(family, lost, monkeypatch):
    """The comparison above can fail."""
    model = windowed(family)
    expected = ordinary_results(model, NESTED)
    monkeypatch.setattr(
        radixtrain.hf.attention,
        "tree_attention",
        lambda *args, **options: tree_attention(*args, **{**options, lost: None}),
    )
    actual = {name: torch.zeros_like(x) for name, x in expected.items()} | radix_results(model, NESTED)
    assert worst_error(actual, expected) > 1e-3


def test_activation_checkpointing_recomputes_the_same_window():
    model = windowed("Mistral").train()
    expected = ordinary_results(model, NESTED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert worst_error(radix_results(model, NESTED), expected) <= BAR


def padded(features: list[dict]) -> dict[str, Tensor]:
    longest = max(len(feature["input_ids"]) for feature in features)

    def column(values_of: Callable[[dict], list[int]], fill: int) -> Tensor:
        return torch.tensor([values_of(f) + [fill] * (longest - len(f["input_ids"])) for f in features])

    ids, mask = column(lambda f: f["input_ids"], 0), column(lambda f: [1] * len(f["input_ids"]), 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": column(lambda f: f.get("labels", f["input_ids"]), -100)}


ROUTED = {
    "Qwen3Moe": {"head_dim": 8, **MOE, **EXPERTS},
    "Qwen2Moe": {"shared_expert_intermediate_size": 8, **MOE, **EXPERTS},
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, **EXPERTS},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **EXPERTS},
}


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("pad_to_multiple_of", [None, 16])
class TestRouterLoss:
    """Hugging Face's own loss over an ordinary padded batch, which counts each original token and no padding."""

    def both(self, model: Any, pad_to_multiple_of: int | None) -> list[dict[str, Tensor]]:
        results = []
        for batch in (padded(NESTED), RadixCollator(pad_to_multiple_of=pad_to_multiple_of)(NESTED)):
            if "attention_mask" not in batch:
                prepare_model(model)
            model.zero_grad()
            output = model(**batch)
            results.append({"aux": output.aux_loss.detach(), **with_gradients(model, output.loss)})
        return results

    def test_equals_the_padded_batch(self, family, pad_to_multiple_of):
        model = tiny(family, output_router_logits=True, router_aux_loss_coef=0.5, **ROUTED[family])
        expected, actual = self.both(model, pad_to_multiple_of)
        assert relative_error(actual["aux"], expected["aux"]) <= BAR
        assert worst_error(actual, expected) <= BAR

    def test_counting_unique_tokens_is_caught(self, family, pad_to_multiple_of, monkeypatch):
        monkeypatch.setattr(radixtrain.hf.hooks, "_expand_router_logits", lambda *_: None)
        model = tiny(family, output_router_logits=True, router_aux_loss_coef=0.5, **ROUTED[family])
        expected, actual = self.both(model, pad_to_multiple_of)
        assert relative_error(actual["aux"], expected["aux"]) > 100 * BAR
        assert worst_error(actual, expected) > 100 * BAR


def test_router_logits_asked_for_by_the_call():
    model = prepare_model(tiny("Qwen3Moe", **ROUTED["Qwen3Moe"]))
    output = model(**RadixCollator()(NESTED), output_router_logits=True)
    num_tokens = sum(len(feature["input_ids"]) for feature in NESTED)
    assert [x.shape for x in output.router_logits] == [(num_tokens, 4)] * 2
    assert model(**RadixCollator()(NESTED)).router_logits is None


class TestWithoutAPlan:
    @pytest.mark.parametrize("family", ["Gemma2", "GptOss", "VaultGemma", "Mistral"])
    def test_models_with_modifiers_are_bit_equal(self, family):
        """Soft-cap and sinks are beyond `sdpa`, so ordinary Hugging Face runs these models' own eager attention."""
        model = windowed(family).float().eval()  # in float64, eager's float32 softmax makes NaN of a padding row
        usual = model.config._attn_implementation
        assert usual == ("sdpa" if family == "Mistral" else "eager")
        ordinary = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10]])}
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        before = [model(**batch).logits for batch in (PADDED, ordinary)], model.generate(**PADDED, **options)
        prepare_model(model)
        after = [model(**batch).logits for batch in (PADDED, ordinary)], model.generate(**PADDED, **options)
        assert all(torch.equal(x, y) for x, y in zip(before[0], after[0], strict=True))
        assert torch.equal(before[1], after[1])
        assert restore_model(model).config._attn_implementation == usual

    def test_a_model_that_was_eager_stays_eager(self, tiny_qwen3):
        model = tiny_qwen3(attn_implementation="eager").eval()
        before = model(**PADDED).logits
        assert torch.equal(before, prepare_model(model)(**PADDED).logits)
        assert model(**RadixCollator()(FEATURES)).loss.isfinite()
        assert restore_model(model).config._attn_implementation == "eager"

    def test_padded_logits_are_bit_equal(self, tiny_qwen3):
        model = tiny_qwen3().eval()
        before = model(**PADDED).logits
        after = prepare_model(model)(**PADDED).logits
        assert torch.equal(before, after)

    def test_generation_is_the_same(self, tiny_qwen3):
        model = tiny_qwen3().eval()
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        before = model.generate(**PADDED, **options)
        assert torch.equal(before, prepare_model(model).generate(**PADDED, **options))

    def test_restore_undoes_it(self, tiny_qwen3):
        model = restore_model(prepare_model(tiny_qwen3()))
        assert model.config._attn_implementation == "sdpa"
        assert not backbone_of(model)._forward_hooks
        assert not backbone_of(model)._forward_pre_hooks

    def test_restore_does_not_change_a_model_that_was_never_prepared(self, tiny_qwen3):
        model = tiny_qwen3()
        assert restore_model(model) is model

    def test_preparing_twice_counts_once(self, tiny_qwen3):
        model = prepare_model(prepare_model(tiny_qwen3()), attention="path")
        assert len(backbone_of(model)._forward_hooks) == 1
        assert torch.isfinite(model(**RadixCollator()(FEATURES)).loss)

    def test_what_is_saved_is_an_ordinary_model(self, tiny_qwen3, tmp_path):
        prepare_model(tiny_qwen3()).save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.config._attn_implementation == "sdpa"

    def test_a_copy_of_a_prepared_model_still_trains(self, tiny_qwen3):
        model = copy.deepcopy(prepare_model(tiny_qwen3()))
        assert torch.isfinite(model(**RadixCollator()(FEATURES)).loss)


class TestNeverOnAnotherAttention:
    def test_switched_after_preparing(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3())
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="needs attn_implementation='radix', but it is now 'sdpa'"):
            model(**RadixCollator()(FEATURES))

    def test_never_prepared(self, tiny_qwen3):
        """Not even without the watch for such models."""
        end_watch()
        with pytest.raises(ValueError, match=r"batch_size \(6\).*batch_size \([78]\)"):
            tiny_qwen3()(**RadixCollator()(FEATURES))

    def test_a_layer_without_tree_attention(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3())
        attention = model.model.layers[1].self_attn

        class Other(nn.Module):
            def forward(self, hidden_states, **_):
                return attention.o_proj(attention.q_proj(hidden_states)), None

        model.model.layers[1].self_attn = Other()
        with pytest.raises(RuntimeError, match="ran in 1 of 2 layers of Qwen3Model"):
            model(**RadixCollator()(FEATURES))

    def test_a_lost_key(self, tiny_qwen3):
        batch = RadixCollator()(FEATURES)
        del batch["radix_subtree_ends"]
        with pytest.raises(ValueError, match="lost its entry 'radix_subtree_ends'"):
            prepare_model(tiny_qwen3())(**batch)

    def test_rows_of_another_batch(self, tiny_qwen3):
        batch = {**RadixCollator()(FEATURES), "input_ids": torch.tensor([[1, 2, 3]])}
        with pytest.raises(ValueError, match=r"needs input_ids \[1, 6\], got \(1, 3\)"):
            prepare_model(tiny_qwen3())(**batch)

    def test_no_square_mask_is_built(self, tiny_qwen3):
        seen = []
        model = prepare_model(tiny_qwen3())
        model.model.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        model(**RadixCollator()(FEATURES))
        assert seen[0].numel() == 0


def test_a_refused_choice_leaves_the_model_as_it_was(tiny_qwen3):
    model = prepare_model(tiny_qwen3(), attention="path")
    with pytest.raises(ValueError, match="attention must be auto"):
        prepare_model(model, attention="ring")
    assert prepared_options(model)["attention"] == "path"
    assert model(**RadixCollator(loss_on_all=True)(FEATURES)).loss.isfinite()


def test_something_that_is_no_model():
    with pytest.raises(TypeError, match=r"expected a transformers PreTrainedModel.*got Linear"):
        prepare_model(nn.Linear(2, 2))
