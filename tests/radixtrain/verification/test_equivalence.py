"""`verify_equivalence` and its report. What it proves is in tests/claims/equivalence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import radixtrain.hf.attention
from radixtrain import RadixCollator, prepare_model, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.prepare import prepared_options
from radixtrain.verification.equivalence import compare_gradients, verify_arms
from radixtrain.verification.oracle import Gradients, gradients_of, ordinary_alone
from radixtrain.verification.report import EquivalenceReport, Rung, TensorError

FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [-100, 8, 9, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]},
    {"input_ids": [7, 8, 5, 6, 4, 4], "labels": [-100, -100, 5, -100, 4, 4]},
]


def rung(precision: str = "float32", loss: float = 1.0, judged: bool = True, **errors: tuple[float, ...]) -> Rung:
    """A rung of parameters given as name=(norm, ordinary difference, radix difference)."""
    tensors = tuple(TensorError(name, *numbers) for name, numbers in errors.items())
    return Rung(precision, 1.0, 1.0, loss, tensors, judged)


HONEST = {"w": (1.0, 1e-6, 1e-6), "v": (1.0, 1e-6, 1e-6), "x": (1.0, 1e-6, 1e-6)}


class TestTheBars:
    @pytest.mark.parametrize(
        ("made", "passed"),
        [
            (rung("float64", w=(1.0, 1e-15, 9e-13)), True),
            (rung("float64", w=(1.0, 1e-15, 2e-12)), False),
            (rung("float64", loss=1.0 + 1e-11, w=(1.0, 0.0, 0.0)), False),
            (rung("float64", w=(1.0, 0.0, 0.0), small=(1e-4, 0.0, 1e-15)), True),
            (rung("float64", w=(1.0, 0.0, 0.0), small=(1e-4, 0.0, 2e-15)), False),
            (rung("float64", ill_conditioned=(1.0, 2e-13, 1e-11)), True),
            (rung("float64", ill_conditioned=(1.0, 2e-13, 3e-11)), False),
            (rung("float64", w=(1.0, 0.0, 0.0), tiny=(1e-9, 1e-16, 1e-17)), True),
            (rung("float64", w=(1.0, 0.0, 0.0), tiny=(1e-3, 1e-13, 2e-12)), False),
            (rung("float64", w=(1.0, 0.0, float("nan"))), False),
            (rung("float64", w=(1.0, 0.0, 0.0), zero=(1e-17, 1e-17, 1e-17)), True),
            (rung("float64", w=(1.0, 0.0, 0.0), zero=(0.0, 0.0, 1e-9)), False),
            (rung("float64", w=(1.0, 0.0, 0.0), zero=(0.0, 0.0, float("nan"))), False),
            (rung("float32", **HONEST), True),
            (rung("float32", **{**HONEST, "x": (1.0, 1e-6, 9e-6)}), True),
            (rung("float32", **{**HONEST, "x": (1.0, 1e-6, 1.1e-5)}), False),
            (rung("float32", **{**HONEST, "x": (1.0, 1e-8, 9e-6)}), True),
            (rung("float32", **{**HONEST, "x": (1.0, 0.9, 1e-6), "v": (1.0, 1e-6, 1.1e-5)}), False),
            (rung("float32", **dict.fromkeys("wvx", (1.0, 1e-6, 3e-6))), False),
            (rung("float32", loss=1.0 + 4e-6, **HONEST), False),
            (rung("float32", **HONEST, drowned=(1e-7, 1e-7, 9e-7)), True),
            (rung("float32", **HONEST, drowned=(1e-7, 1e-7, 1.1e-5)), False),
            (rung("float32", w=(0.0, 0.0, 0.0)), False),
            (rung("bfloat16", w=(1.0, 1e-2, float("inf"))), False),
            (rung("bfloat16", judged=False, w=(1.0, 1e-2, 9e-2)), True),
            (rung("bfloat16", judged=False, w=(1.0, 1e-2, 2e-1)), False),
            (rung("bfloat16", judged=False, w=(1.0, 1e-2, float("nan"))), False),
            (rung("bfloat16", judged=False, loss=float("nan"), w=(1.0, 1e-2, 1e-2)), False),
        ],
    )
    def test_what_passes(self, made: Rung, passed: bool) -> None:
        assert made.passed is passed
        assert bool(made.reason) is not passed

    def test_an_ordinary_model_that_disagrees_with_itself_gets_no_verdict(self) -> None:
        made = rung("float64", w=(1.0, 1e-3, 1e-3), v=(1.0, 2e-3, 2e-3))
        assert not made.passed
        assert made.reason == (
            "no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on its "
            "own, disagree by 2.0e-03 in v. Their losses agree (1): the gradient may be too ill-conditioned for float64"
        )

    @pytest.mark.parametrize("ordinary_loss", [1.655, float("nan")])
    def test_nor_one_whose_ordinary_loss_is_another(self, ordinary_loss: float) -> None:
        tensors = (TensorError("w", 1.0, 1e-3, 1e-3),)
        made = Rung("float64", 6.21, ordinary_loss, ordinary_loss, tensors)
        assert made.reason == (
            "no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on its "
            f"own, disagree by 1.0e-03 in w. So do their losses, {ordinary_loss:.9g} and 6.21: either the model "
            "computes something else for a sequence that has padding or other sequences beside it, or the padded "
            "batch does not have the model's own loss"
        )

    def test_a_gradient_that_is_truly_zero_proves_little(self) -> None:
        report = EquivalenceReport((rung("float64", w=(1.0, 0.0, 0.0), zero=(1e-17, 0.0, 1e-17)),))
        assert report.passed and not report.conclusive
        assert "zero: zero: the true gradient is zero on this data" in str(report)

    def test_one_that_is_not_zero_by_radix_fails(self) -> None:
        made = rung("float64", w=(1.0, 0.0, 0.0), zero=(0.0, 0.0, 5.0))
        assert "zero should be zero and is off by 5.0e+00" in made.reason

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
        assert "5 of 24 tensors, those nearest their bar" in lines[6]
        assert max(map(len, lines)) <= 120

    @pytest.mark.parametrize(("dtype", "rungs"), [(torch.float32, 2), (torch.bfloat16, 3), (torch.float64, 2)])
    def test_has_a_rung_for_the_training_dtype(
        self, tiny_qwen3: Callable[..., Any], dtype: torch.dtype, rungs: int
    ) -> None:
        report = verify_equivalence(tiny_qwen3().to(dtype), FEATURES)
        assert len(report.rungs) == rungs and report.passed, str(report)

    def test_lists_the_tensor_that_failed_whichever_rung_it_failed_in(self) -> None:
        names = [f"w{index}" for index in range(9)]
        exact = {name: (1.0, 1e-16, 1e-16 * (9 - index)) for index, name in enumerate(names)}
        rounded = {**dict.fromkeys(names, (1.0, 1e-2, 1e-2)), "w8": (1.0, 1e-2, 0.5)}
        report = EquivalenceReport((rung("float64", **exact), rung("bfloat16", **rounded)))
        assert str(report).splitlines()[7].endswith("  w8")

    @pytest.mark.parametrize("precision", ["bf16", "int8", "bfloat16"])
    def test_an_unknown_precision_is_said_at_once(self, tiny_qwen3: Callable[..., Any], precision: str) -> None:
        with pytest.raises(UserError, match=f"must be of float64, float32 for this model, got '{precision}"):
            verify_equivalence(tiny_qwen3(), FEATURES, precisions=[precision])

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

    def test_every_module_keeps_its_own_mode(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3().train()
        model.model.layers[0].eval()
        verify_equivalence(model, FEATURES)
        assert [layer.training for layer in model.model.layers] == [False, True]

    def test_has_no_gradients_where_an_arm_raises(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()

        def two_terms() -> Any:
            yield from ordinary_alone(model, FEATURES[:1])
            raise RuntimeError("between terms")

        with pytest.raises(RuntimeError, match="between terms"):
            gradients_of(model, two_terms)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_buffers_that_a_forward_pass_replaces_come_back(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        rotary = model.model.rotary_emb
        before, forward = rotary.inv_freq, rotary.forward

        def replacing(*args: Any, **options: Any) -> Any:
            rotary.register_buffer("inv_freq", rotary.inv_freq * 1.0, persistent=False)
            return forward(*args, **options)

        rotary.forward = replacing
        verify_equivalence(model, FEATURES)
        assert rotary.inv_freq is before and before.dtype == torch.float32

    def test_comes_back_where_something_raises(
        self, tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any, **options: Any) -> Any:
            raise RuntimeError("a kernel that fails")

        monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", broken)
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
        assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}

    def test_activation_checkpointing_stays_on_where_dropout_was_allowed(self, tiny_qwen3: Callable[..., Any]) -> None:
        """Evaluation mode would turn it off, and with it what is to be compared."""
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        config = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
        model = peft.get_peft_model(tiny_qwen3(), config).train()
        modes = []
        model.base_model.model.model.layers[0].register_forward_pre_hook(
            lambda module, _: modes.append(module.training)
        )
        verify_equivalence(prepare_model(model, allow_dropout=["lora_dropout"]), FEATURES)
        assert set(modes) == {True}

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


def test_a_router_loss_is_off_meanwhile() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_attention_heads=4, num_key_value_heads=2))
    report = verify_equivalence(model, FEATURES)
    assert report.passed, str(report)
    assert model.config.output_router_logits is True


def test_a_truth_that_is_not_finite_gives_no_verdict(tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match=r"the ordinary model's gradient of .* is not finite"):
        verify_equivalence(model, FEATURES)


def test_nothing_to_train_is_said(tiny_qwen3: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        verify_equivalence(tiny_qwen3().requires_grad_(False), FEATURES)


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
