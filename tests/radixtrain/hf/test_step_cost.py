"""What a layer costs, by fixed rates and by measured ones, and that a model computes what its batches chose by it."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tiers import cases
from tiny_models import tiny_model

from radixtrain import RadixCollator, calibrate, prepare_model, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf import step_cost
from radixtrain.hf.step_cost import non_negative_fit, step_cost_of
from radixtrain.tree.cost_model import CHOICES, FIXED_RATES, Rates

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

    def test_the_mean_layer_of_a_hybrid_model(self):
        cost = step_cost_of(qwen3_5())
        assert (cost.attention_share, cost.mixer_share) == (0.25, 0.75)
        assert cost.row_flops == 6 * (0.25 * 2 * 32 * (32 + 16) + 3 * 32 * 64)
        assert cost.run_cost.row == pytest.approx(FIXED_RATES["cpu"].flop * 60 * 32 * 32) and cost.run_cost.can_fork

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

    def test_it_computes_the_runs_of_its_batch(self):
        model = qwen3_5()
        collator = RadixCollator(step_cost=step_cost_of(model))
        assert collator(FORKING)["radix_runs_calls"] == ((1, 39, 1, ()), (6, 2, 0, ((0, 6),)))
        report = verify_equivalence(model, FORKING, collator=collator, precisions=["float64"])
        assert report["float64"].worst.radix <= 1e-12, str(report)


# Measured.

FLOPS = 6.0 * 512 * 32 * 128


@pytest.fixture
def clock(monkeypatch):
    """`clock(cost)`: a clock that obeys the formula; without a cost each run takes a second."""

    def install(cost=None):
        plans = step_cost._batches() if cost else ()
        seconds = iter([FLOPS * 1e-12] + [cost.seconds(plan, strategy) for plan in plans for strategy in CHOICES])

        def timed(runs, device, repeats, num_warmups):
            ((name, run),) = runs.items()
            run()
            return {name: [next(seconds) if cost else 1.0]}

        monkeypatch.setattr(step_cost, "seconds_in_turns", timed)

    return install


def test_the_rates_are_those_of_the_clock(tiny_qwen3, clock):
    """With a clock that obeys the formula, the rates of the formula come out, and nothing else of the cost changes."""
    fixed = step_cost_of(tiny_qwen3())
    rates = Rates(call=3e-5, rectangle=1e-6, pair=2e-10, element=1e-9, flop=0.0)
    clock(replace(fixed, rates=rates))
    cost = calibrate(tiny_qwen3())
    found, expected = ({**asdict(each), "runs": 0.0} for each in (cost.rates, rates))
    assert found == pytest.approx({**expected, "flop": 1e-12}, rel=1e-6)
    assert replace(cost, rates=fixed.rates) == fixed


def test_recurrent_layers_cost_as_much_more_as_a_matrix_product(tiny_hybrid, clock):
    model = tiny_hybrid("LFM2")
    clock()
    fixed, cost = step_cost_of(model), calibrate(model)
    assert cost.run_cost.row / fixed.run_cost.row == pytest.approx(cost.rates.flop / fixed.rates.flop)
    assert cost.run_cost.call / cost.run_cost.row == pytest.approx(64)


def test_the_fit_is_exact_if_it_can_be_and_never_negative():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 100, (12, 4))
    rates = np.array([1e-5, 0.0, 3e-9, 2e-7])
    assert np.allclose(non_negative_fit(work, work @ rates), rates, rtol=1e-9, atol=1e-15)
    assert min(non_negative_fit(work, work @ np.array([1e-5, -1e-6, 3e-9, 2e-7]))) >= 0


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_nothing_of_the_run_changes(tiny_qwen3, clock, context):
    """Neither random state nor gradients, in any mode of torch."""
    clock()
    model = tiny_qwen3()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with context():
        assert calibrate(model, dtype=torch.bfloat16).rates.flop > 0
    assert torch.equal(torch.rand(1), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_by_the_clock_of_this_machine(tiny_qwen3):
    rates = calibrate(tiny_qwen3(), attention="path").rates
    assert rates.flop > 0 and max(rates.call, rates.rectangle, rates.pair, rates.element) > 0
