"""`verify_equivalence` and its report. What it proves is in tests/equivalence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import radixtrain.layer_attention
from radixtrain import RadixCollator, prepare_model, verify_equivalence
from radixtrain.equivalence import compare_gradients, verify_arms
from radixtrain.equivalence_report import EquivalenceReport, Rung, TensorError
from radixtrain.model import prepared_options
from radixtrain.oracle import Gradients, ordinary_alone

FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [-100, 8, 9, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]},
    {"input_ids": [7, 8, 5, 6, 4, 4], "labels": [-100, -100, 5, -100, 4, 4]},
]


def rung(precision: str = "float32", loss: float = 1.0, **errors: tuple[float, float, float]) -> Rung:
    """A rung of large parameters given as name=(norm, ordinary error, radix error)."""
    tensors = tuple(TensorError(name, 10**6, *numbers) for name, numbers in errors.items())
    return Rung(precision, 1.0, 1.0, loss, tensors)


class TestTheBars:
    @pytest.mark.parametrize(
        ("made", "passed"),
        [
            (rung("float64", w=(1.0, 0.0, 9e-13)), True),
            (rung("float64", w=(1.0, 0.0, 2e-12)), False),
            (rung("float64", loss=1.0 + 1e-11, w=(1.0, 0.0, 0.0)), False),
            (rung("float64", w=(1.0, 0.0, 0.0), small=(1e-4, 0.0, 1e-11)), True),
            (rung("float64", w=(1.0, 0.0, 0.0), small=(1e-4, 0.0, 2e-11)), False),
            (rung("float64", w=(1.0, 0.0, float("nan"))), False),
            (rung("float32", w=(1.0, 1e-6, 2.9e-6)), True),
            (rung("float32", w=(1.0, 1e-6, 3.1e-6)), False),
            (rung("float32", w=(1.0, 9e-1, 1e-6), v=(1.0, 1e-6, 3.1e-6), x=(1.0, 1e-6, 1e-6)), False),
            (rung("float32", w=(1.0, 1e-6, 1e-6), v=(1.0, 1e-6, 1e-6), lucky=(1.0, 1e-8, 2.9e-6)), True),
            (rung("float32", loss=1.0 + 4e-6, w=(1.0, 1e-6, 1e-6)), False),
            (rung("float32", w=(1.0, 1e-6, 1e-6), drowned=(1e-7, 0.1, 9.0)), True),
            (rung("float32", w=(0.0, 0.0, 0.0)), False),
            (rung("bfloat16", w=(1.0, 1e-2, float("inf"))), False),
        ],
    )
    def test_what_passes(self, made: Rung, passed: bool) -> None:
        assert made.passed is passed

    @pytest.mark.parametrize(("size", "passed"), [(4, True), (8, True), (64, False)])
    def test_few_elements_have_more_luck(self, size: int, passed: bool) -> None:
        tensors = (TensorError("w", 1024, 1.0, 1e-6, 1e-6), TensorError("bias", size, 1.0, 1e-6, 5.9e-6))
        assert Rung("float32", 1.0, 1.0, 1.0, tensors).passed is passed

    def test_a_gradient_that_is_truly_zero_is_not_tested(self) -> None:
        report = EquivalenceReport((rung("float64", w=(1.0, 0.0, 0.0), zero=(1e-17, 0.0, 1.0)),))
        assert report.passed and not report.conclusive
        assert "not tested: zero: the true gradient is zero on this data" in str(report)

    def test_nothing_alive_is_no_pass(self) -> None:
        report = EquivalenceReport((rung("float64", w=(0.0, 0.0, 0.0)),))
        assert not report.passed
        assert "no gradient is alive" in report.reason


class TestTheReport:
    def test_names_the_parameter_the_element_and_its_values(self) -> None:
        truth = Gradients(1.0, {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)})
        off = torch.ones(2, 3)
        off[1, 2] = 1.5
        made = compare_gradients("float64", truth, truth, Gradients(1.0, {**truth.tensors, "a.weight": off}))
        reason = EquivalenceReport((made,)).reason
        assert reason.startswith("float64: NOT EQUAL: a.weight is off by 2.0e-01, at most 1.0e-12 is rounding")
        assert reason.endswith("worst element [1, 2]: radix 1.5, ordinary 1, truth 1")

    def test_names_the_loss_where_it_alone_is_wrong(self) -> None:
        reason = EquivalenceReport((rung("float64", loss=1.1, w=(1.0, 0.0, 0.0)),)).reason
        assert reason.startswith("float64: NOT EQUAL: the loss is 1.1 and in truth 1, 1.0e-01 apart")

    def test_is_a_table(self, tiny_qwen3: Callable[..., Any]) -> None:
        lines = str(verify_equivalence(tiny_qwen3().bfloat16(), FEATURES)).splitlines()
        assert [line.split()[0] for line in lines[2:5]] == ["float64", "float32", "bfloat16"]
        assert all(line.endswith("equal") for line in lines[2:5])
        assert "the worst 5 of 24 tensors" in lines[6]
        assert max(map(len, lines)) <= 120

    @pytest.mark.parametrize(("dtype", "rungs"), [(torch.float32, 2), (torch.bfloat16, 3), (torch.float64, 2)])
    def test_has_a_rung_for_the_training_dtype(
        self, tiny_qwen3: Callable[..., Any], dtype: torch.dtype, rungs: int
    ) -> None:
        report = verify_equivalence(tiny_qwen3().to(dtype), FEATURES)
        assert len(report.rungs) == rungs and report.passed, str(report)

    def test_precisions_can_be_chosen(self, tiny_qwen3: Callable[..., Any]) -> None:
        report = verify_equivalence(tiny_qwen3(), FEATURES, precisions=["float32"])
        assert [made.precision for made in report.rungs] == ["float32"]


class TestTheModel:
    def test_comes_back_as_it_was(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3().bfloat16().eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        verify_equivalence(model, FEATURES)
        assert model.config._attn_implementation == "sdpa"
        assert not model.training
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_stays_prepared(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = prepare_model(tiny_qwen3(), attention="path")
        assert verify_equivalence(model, FEATURES, attention="cascade").passed
        assert prepared_options(model)["attention"] == "path"
        assert torch.isfinite(model(**RadixCollator()(FEATURES)).loss)

    def test_comes_back_where_something_raises(
        self, tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any, **options: Any) -> Any:
            raise RuntimeError("a kernel that fails")

        monkeypatch.setattr(radixtrain.layer_attention, "tree_attention", broken)
        model = tiny_qwen3().bfloat16()
        with pytest.raises(RuntimeError, match="a kernel that fails"):
            verify_equivalence(model, FEATURES)
        assert model.dtype == torch.bfloat16
        assert model.config._attn_implementation == "sdpa"

    def test_dropout_that_was_allowed_is_off_meanwhile(self, tiny_qwen3: Callable[..., Any]) -> None:
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        config = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
        model = peft.get_peft_model(tiny_qwen3(), config).train()
        prepare_model(model, allow_dropout=["lora_dropout"])
        report = verify_equivalence(model, FEATURES)
        assert report.passed, str(report)
        assert model.training

    def test_a_fresh_lora_passes_and_is_not_conclusive(self, tiny_qwen3: Callable[..., Any]) -> None:
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        model = peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(target_modules="all-linear"))
        report = verify_equivalence(model, FEATURES)
        assert report.passed and not report.conclusive
        assert {tensor.name.split(".")[-3] for tensor in report["float64"].dead} == {"lora_A"}

    @pytest.mark.parametrize(
        "changes", [{"tie_word_embeddings": False}, {"num_key_value_heads": 4}, {"attention_bias": True}]
    )
    @pytest.mark.parametrize("attention", ["cascade", "path", "expand", "reference"])
    def test_variants(self, tiny_qwen3: Callable[..., Any], changes: dict[str, Any], attention: str) -> None:
        report = verify_equivalence(tiny_qwen3(**changes), FEATURES, attention=attention)
        assert report.passed and report.conclusive, str(report)


def test_a_mixture_of_experts_is_not_judged_in_sixteen_bits() -> None:
    """A token that is nearly tied goes to another expert, and no bar for rounding holds."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**sizes, **experts, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    report = verify_equivalence(Qwen3MoeForCausalLM(config).bfloat16(), FEATURES)
    assert [made.judged for made in report.rungs] == [True, True, False]
    assert report.passed, str(report)
    assert "bfloat16: not judged: rounding to 16 bits moves tokens between experts" in str(report)


def test_under_autocast(tiny_qwen3: Callable[..., Any]) -> None:
    """Mixed precision is a rung of its own, on float32 weights."""
    model = tiny_qwen3()
    batch = RadixCollator()(FEATURES)
    report = verify_arms(
        model, FEATURES, lambda: ordinary_alone(model, FEATURES), lambda: iter([model(**batch).loss]),
        autocast=torch.bfloat16,
    )  # fmt: skip
    assert [made.precision for made in report.rungs] == ["float64", "float32", "bfloat16"]
    assert report["bfloat16"].worst.radix > 1e-4, "the rung was not run in 16 bits"
    assert report.passed, str(report)


def test_features_without_loss_are_refused(tiny_qwen3: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="no token of these features bears loss"):
        verify_equivalence(tiny_qwen3(), [{"input_ids": [1, 2], "labels": [-100, -100]}])
