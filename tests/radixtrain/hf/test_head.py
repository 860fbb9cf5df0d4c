"""Which heads are one matrix product, and the rows that the loss starts from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from radixtrain import RadixCollator, prepare_model
from radixtrain.collators.padded import PaddedCollator
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of, parts_of
from radixtrain.hf.head import has_plain_head, hidden_rows, logits_rows
from radixtrain.testing import relative_error

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
PLAIN = {
    "Llama": ("Llama", "ForCausalLM", HEADS),
    "Qwen3, tied": ("Qwen3", "ForCausalLM", {**HEADS, "tie_word_embeddings": True}),
    "Gemma 3": ("Gemma3Text", "Gemma3ForCausalLM", HEADS),
    "OPT, another width": ("OPT", "ForCausalLM", {"word_embed_proj_dim": 16, "ffn_dim": 64, "dropout": 0.0}),
    "Phi, with a bias": ("Phi", "ForCausalLM", {"num_key_value_heads": 4}),
    "Granite, unscaled": ("Granite", "ForCausalLM", HEADS),
    "Mixtral": ("Mixtral", "ForCausalLM", {**HEADS, "num_local_experts": 2}),
}
NOT_PLAIN = {
    "ModernBERT-decoder": ("ModernBertDecoder", "ForCausalLM", {}),
    "BERT": ("Bert", "BertLMHeadModel", DECODER),
    "RoBERTa": ("Roberta", "ForCausalLM", DECODER),
    "ELECTRA, another width": ("Electra", "ForCausalLM", {**DECODER, "embedding_size": 16}),
    "Gemma 2, soft-cap": ("Gemma2", "ForCausalLM", HEADS),
    "Granite, scaled": ("Granite", "ForCausalLM", {**HEADS, "logits_scaling": 2.0}),
    "Cohere 2, scaled": ("Cohere2", "ForCausalLM", HEADS),
    "RecurrentGemma, soft-cap by another name": ("RecurrentGemma", "ForCausalLM", {**HEADS, "lru_width": 32}),
}
FEATURES = [
    {"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ([7, 8, 9, 1, 2, 3], [7, 8, 9, 3], [7, 8, 5, 6, 4])
]


def build(family: str, classes: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    name = f"{family}{classes}" if classes == "ForCausalLM" else classes
    return getattr(transformers, name)(config).eval()


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if "label" not in name and "weights" not in name}


class TestWhichIsPlain:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", PLAIN)
    def test_one_matrix(self, name: str, dtype: torch.dtype) -> None:
        assert has_plain_head(build(*PLAIN[name]).to(dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", NOT_PLAIN)
    def test_more_than_one_matrix(self, name: str, dtype: torch.dtype) -> None:
        assert not has_plain_head(build(*NOT_PLAIN[name]).to(dtype))

    @pytest.mark.parametrize("name", [*PLAIN, *NOT_PLAIN])
    def test_without_values_the_configuration_decides(self, name: str) -> None:
        with torch.device("meta"):
            model = build(*{**PLAIN, **NOT_PLAIN}[name])
        assert has_plain_head(model) is (name in PLAIN)

    @pytest.mark.parametrize(
        ("name", "line"),
        [
            ("Llama", "the head of LlamaForCausalLM is one matrix product: head and loss are fused"),
            (
                "BERT",
                "the head of BertLMHeadModel has parameters besides its last matrix (cls.predictions.transform.dense."
                "weight): its own head is used, which holds [P, vocab] logits",
            ),
            (
                "Cohere 2, scaled",
                "the head of Cohere2ForCausalLM does more than one matrix product: its own head is used, which holds "
                "[P, vocab] logits",
            ),
        ],
    )
    def test_one_line_says_which_and_why(self, name: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="radixtrain"):
            has_plain_head(build(*{**PLAIN, **NOT_PLAIN}[name]))
        assert [record.getMessage() for record in caplog.records] == [line]


def scaled(model: Any, logits: Tensor) -> Tensor:
    return logits * 1.01


def shifted(model: Any, logits: Tensor) -> Tensor:
    return logits + model.extra


def capped(model: Any, logits: Tensor) -> Tensor:
    """A power of two changes no bit of a small logit."""
    return 1024 * torch.tanh(logits / 1024)


def conditional(model: Any, logits: Tensor) -> Tensor:
    return torch.where(logits.abs() > 50, logits / 2, logits)


class TestMutations:
    """Changes to a plain head. With the fused loss each would train wrong."""

    def changed(self, model: Any, change: Callable[[Any, Tensor], Tensor]) -> Any:
        class Changed(type(model)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                output = super().forward(*args, **kwargs)
                output.logits = change(self, output.logits)
                return output

        model.__class__ = Changed
        return model

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("change", [scaled, capped, conditional])
    def test_logits_are_changed(self, change: Any, dtype: torch.dtype) -> None:
        model = build(*PLAIN["Llama"]).to(dtype)
        assert has_plain_head(model)
        assert not has_plain_head(self.changed(model, change))

    @pytest.mark.parametrize("value", [1.0, 0.0], ids=["one", "still zero"])
    def test_a_bias_is_added(self, value: float) -> None:
        model = build(*PLAIN["Llama"])
        model.extra = nn.Parameter(torch.full((50,), value))
        assert not has_plain_head(self.changed(model, shifted))

    def test_a_constant_is_added(self) -> None:
        model = build(*PLAIN["Llama"])
        model.register_buffer("extra", torch.full((50,), 1e-3))
        assert not has_plain_head(self.changed(model, shifted))

    def test_a_hook_on_the_head(self) -> None:
        model = build(*PLAIN["Llama"])
        model.lm_head.register_forward_hook(lambda module, args, output: output / 2)
        assert not has_plain_head(model)

    def test_another_forward_on_the_head(self) -> None:
        model = build(*PLAIN["Llama"])
        model.lm_head.forward = lambda hidden: nn.functional.linear(hidden.tanh(), model.lm_head.weight)
        assert not has_plain_head(model)

    def test_another_class_of_linear(self) -> None:
        class Quantized(nn.Linear):
            pass

        model = build(*PLAIN["Llama"])
        model.lm_head.__class__ = Quantized
        assert not has_plain_head(model)

    @pytest.mark.parametrize("head", [PLAIN["Llama"], NOT_PLAIN["Granite, scaled"]], ids=["plain", "scaled"])
    def test_of_zeros_nothing_is_known(self, head: Any, caplog: pytest.LogCaptureFixture) -> None:
        """The log said that a plain head does more than one matrix product."""
        model = build(*head)
        nn.init.zeros_(model.lm_head.weight)
        with caplog.at_level(logging.INFO, logger="radixtrain"):
            assert not has_plain_head(model)
        assert "is all zero, so its logits do not show whether it is one matrix product: its own head" in caplog.text

    def test_a_part_of_the_hidden_row(self) -> None:
        model = build(*PLAIN["Llama"])
        model.lm_head = nn.Linear(16, 50)
        model.lm_head.register_forward_pre_hook(lambda module, args: (args[0][..., :16],))
        assert not has_plain_head(model)

    @pytest.mark.parametrize("option", ["target_modules", "modules_to_save"])
    def test_an_adapter_on_the_head(self, option: str) -> None:
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        elsewhere = peft.get_peft_model(build(*PLAIN["Llama"]), peft.LoraConfig(target_modules=["q_proj"]))
        assert has_plain_head(elsewhere)
        options = {"target_modules": ["q_proj"], option: ["lm_head"]}
        assert not has_plain_head(peft.get_peft_model(build(*PLAIN["Llama"]), peft.LoraConfig(**options)))


class TestRefusals:
    def refused(self, forward: Callable[..., Any]) -> str:
        model = build(*PLAIN["Llama"])
        model.__class__ = type("Odd", (type(model),), {"forward": forward})
        with pytest.raises(UserError) as error:
            has_plain_head(model)
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_logits_need_more_than_ids(self) -> None:
        def forward(self: Any, input_ids: Tensor, images: Tensor) -> Any:
            raise NotImplementedError

        message = self.refused(forward)
        assert message.startswith("Odd computes no logits from input_ids only (TypeError: ")
        assert "'images'" in message

    def test_another_number_of_rows(self) -> None:
        def forward(self: Any, input_ids: Tensor) -> Any:
            output = super(type(self), self).forward(input_ids)
            return type(output)(logits=output.logits[:, -1:])

        assert "makes logits [1, 1, 50] of 3 hidden rows" in self.refused(forward)

    def test_rows_that_depend_on_one_another(self) -> None:
        def forward(self: Any, input_ids: Tensor) -> Any:
            output = super(type(self), self).forward(input_ids)
            return type(output)(logits=output.logits.cumsum(1))

        assert "gives a hidden row other logits if other rows are beside it" in self.refused(forward)


class TestTheModelIsLeftAsItWas:
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
    def test_measured(self, mode: Any) -> None:
        model = prepare_model(build(*PLAIN["Llama"]).train())
        model.model.norm.eval()
        modes, random = [module.training for module in model.modules()], torch.get_rng_state()
        ran = []
        model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
        with mode():
            assert has_plain_head(model)
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random)
        assert "forward" not in vars(model.model)
        assert not ran and all(parameter.grad is None for parameter in model.parameters())

    def test_refused(self) -> None:
        model = build(*PLAIN["Llama"]).train()
        own = model.model.forward
        model.model.forward = own  # as accelerate does
        model.lm_head.forward = None
        with pytest.raises(UserError):
            has_plain_head(model)
        assert vars(model.model)["forward"] is own and model.training


class TestRows:
    @pytest.mark.parametrize("name", [*PLAIN, *list(NOT_PLAIN)[:-1]])
    def test_of_a_padded_batch(self, name: str) -> None:
        """The logits of the rows that predict, and no other row goes through the head."""
        model = build(*{**PLAIN, **NOT_PLAIN}[name])
        batch = PaddedCollator()(FEATURES)
        expected = torch.cat([model(torch.tensor([f["input_ids"]])).logits[0, :-1] for f in FEATURES])
        seen = []
        model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
        logits = logits_rows(parts_of(model), inputs_of(batch))
        assert logits.shape == expected.shape == (12, 50)
        assert relative_error(logits, expected) <= 1e-6
        assert [shape[:-1] for shape in seen] == [(1, 12)]
        hidden = hidden_rows(parts_of(model), inputs_of(batch))
        assert len(hidden) == 12 and (name not in PLAIN or torch.equal(logits, model.get_output_embeddings()(hidden)))

    @pytest.mark.parametrize("name", ["Llama", "BERT", "ModernBERT-decoder", "Granite, scaled"])
    def test_of_a_radix_batch(self, name: str) -> None:
        model = build(*{**PLAIN, **NOT_PLAIN}[name])
        batch = RadixCollator(merge_labels=True)(FEATURES)
        sequences = [torch.tensor([f["input_ids"]]) for f in FEATURES]
        expected = torch.cat([model(ids).logits[0] for ids in sequences])[batch["radix_gather_indices"]]
        logits = logits_rows(parts_of(prepare_model(model)), inputs_of(batch))
        assert relative_error(logits, expected[batch["radix_predictor_indices"]]) <= 1e-6
        assert len(hidden_rows(parts_of(model), inputs_of(batch))) == len(logits) < 12

    def test_the_hook_goes_if_the_head_raises(self) -> None:
        model = build(*NOT_PLAIN["BERT"])
        model.cls.forward = None
        with pytest.raises(TypeError):
            logits_rows(parts_of(model), inputs_of(PaddedCollator()(FEATURES)))
        assert not backbone_of(model)._forward_hooks

    def test_positions_that_start_after_the_padding_index(self) -> None:
        """RoBERTa counts its own; positions that a feature has are used."""
        model = build(*NOT_PLAIN["RoBERTa"])
        shifted = [{**f, "position_ids": list(range(1, len(f["input_ids"]) + 1))} for f in FEATURES]
        parts = parts_of(model)
        own, given = (logits_rows(parts, inputs_of(PaddedCollator()(features))) for features in (FEATURES, shifted))
        assert relative_error(own, given) <= 1e-6
        moved = [{**f, "position_ids": list(range(5, len(f["input_ids"]) + 5))} for f in FEATURES]
        assert relative_error(logits_rows(parts, inputs_of(PaddedCollator()(moved))), own) > 1e-2
