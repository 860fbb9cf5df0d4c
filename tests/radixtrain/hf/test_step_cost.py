"""What a layer costs, and that a model computes what its batches chose by it."""

import pytest
from older_transformers import NEEDS_FORKS
from tiers import cases
from tiny_models import tiny_model

from radixtrain import RadixCollator, prepare_model, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.step_cost import step_cost_of
from radixtrain.tree.cost_model import CHOICES, FIXED_RATES

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, n, 5] for n in range(6, 12))]
FORKING = [{"input_ids": [*range(1, 40), n], "labels": [*range(1, 40), n]} for n in range(40, 46)]


def qwen3_5():
    """Three layers of four are recurrent."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return tiny_model("Qwen3_5ForCausalLM", num_hidden_layers=4, layer_types=kinds)


class TestDimensions:
    def test_literal(self, tiny_qwen3):
        cost = step_cost_of(tiny_qwen3())
        assert cost.on_host and (cost.num_heads, cost.num_key_value_heads, cost.head_dim) == (4, 2, 8)
        assert cost.row_flops == 6 * (2 * 32 * (32 + 16) + 3 * 32 * 64)
        assert cost.rates == FIXED_RATES["cpu"] and cost.strategies == CHOICES

    @NEEDS_FORKS
    def test_the_mean_layer_of_a_hybrid_model(self):
        cost = step_cost_of(qwen3_5())
        assert (cost.attention_share, cost.mixer_share) == (0.25, 0.75)
        assert cost.row_flops == 6 * (0.25 * 2 * 32 * (32 + 16) + 3 * 32 * 64)
        assert cost.run_cost.row == pytest.approx(FIXED_RATES["cpu"].flop * 60 * 32 * 32) and cost.run_cost.can_fork

    @NEEDS_FORKS
    def test_that_no_layer_forks_is_said(self, caplog):
        """The worker asks for no forks then, so no layer tries one and says why."""
        assert not step_cost_of(tiny_model("JambaForCausalLM")).run_cost.can_fork
        assert [record.message for record in caplog.records if record.name.startswith("radixtrain")] == [
            "JambaMambaMixer cannot start from a state with a gradient, so recurrent layers compute every sequence "
            "from its first token on; all else is shared"
        ]


class TestRefusals:
    def test_a_model_on_another_device(self, tiny_qwen3):
        with pytest.raises(UserError, match="known on a CPU or a CUDA device, and the model is on meta"):
            step_cost_of(tiny_qwen3().to("meta"))

    def test_an_attention_without_a_cost(self, tiny_qwen3):
        with pytest.raises(UserError, match="attention must be auto or one of cascade, path, expand, got 'reference'"):
            step_cost_of(tiny_qwen3(), attention="reference")


class TestPreparedModel:
    @pytest.mark.parametrize("strategy", cases(CHOICES, quick=CHOICES[:1]))
    def test_it_does_what_its_batch_chose(self, tiny_qwen3, monkeypatch, strategy):
        import radixtrain.hf.attention_interface

        asked = []
        attend = radixtrain.hf.attention_interface.tree_attention

        def spy(*args, attention, **options):
            asked.append(attention)
            return attend(*args, attention=attention, **options)

        monkeypatch.setattr(radixtrain.hf.attention_interface, "tree_attention", spy)
        model = tiny_qwen3()
        collator = RadixCollator(step_cost=step_cost_of(model, strategy))
        prepare_model(model)
        model(**collator(FEATURES))
        assert set(asked) == {strategy}
        asked.clear()
        prepare_model(model, attention="path")(**collator(FEATURES))
        assert set(asked) == {"path"}, "a strategy that was asked for by name is kept"

    def test_a_window_that_binds_is_kept_under_any_choice(self):
        model = tiny_model("MistralForCausalLM", sliding_window=3)
        collator = RadixCollator(step_cost=step_cost_of(model, "cascade"))
        report = verify_equivalence(model, FEATURES, collator=collator, precisions=["float64"])
        assert report["float64"].worst.radix <= 1e-12, str(report)

    @NEEDS_FORKS
    def test_it_computes_the_runs_of_its_batch(self):
        model = qwen3_5()
        collator = RadixCollator(step_cost=step_cost_of(model))
        assert collator(FORKING)["radix"].layout.runs.calls == ((1, 39, 1, ()), (6, 2, 0, ((0, 6),)))
        report = verify_equivalence(model, FORKING, collator=collator, precisions=["float64"])
        assert report["float64"].worst.radix <= 1e-12, str(report)
