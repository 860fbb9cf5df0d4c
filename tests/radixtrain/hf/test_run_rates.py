"""The rates of recurrent layers: fitted to the clock, on the mixers of the model."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from radixtrain import RadixCollator, calibrate, prepare_model, verify_equivalence
from radixtrain.hf import calibration, run_rates
from radixtrain.hf.layer_kinds import LayerKinds, kinds_of_mixers
from radixtrain.hf.rates import Layer
from radixtrain.hf.rates_file import read_rates
from radixtrain.hf.run_rates import measured_run_cost, mixers_key
from radixtrain.hf.shape import ModelDimensions
from radixtrain.tree.cost_model import Rates
from radixtrain.tree.runs import RunCost

RATES = Rates(call=1.0, rectangle=1.0, pair=1.0, element=1.0, flop=1.0)
RUNS = RunCost(call=1.0, row=1.0, chunk=1.0, state=1.0)
FEATURES = [{"input_ids": [*range(1, 40), n], "labels": [*range(1, 40), n]} for n in range(40, 46)]
NUMBERS = ("call", "row", "chunk", "state")


def qwen3_5(**changes):
    """Three layers of four are recurrent."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return tiny_model("Qwen3_5ForCausalLM", num_hidden_layers=4, layer_types=kinds, **changes)


def jamba():
    """Its mixers cannot start from a state."""
    return tiny_model("JambaForCausalLM")


def layer_of(model, dtype=torch.float32):
    dimensions, kinds, mixers = (
        ModelDimensions.of(model.config),
        LayerKinds.of(model.model),
        kinds_of_mixers(model.model),
    )
    return Layer(model=dimensions, device=torch.device("cpu"), dtype=dtype, kernel="torch", kinds=kinds, mixers=mixers)


@pytest.fixture
def clock(monkeypatch):
    """`clock(rates)`: a clock that obeys the formula, for any mixer. The trees that were timed."""

    def install(*rates):
        timed, current = [], []
        monkeypatch.setattr(run_rates, "fastest", lambda run, device, repeats: current[0])

        def step(layer, mixer, table):
            index = [id(each) for each, _ in layer.mixers].index(id(mixer))
            current[:] = [table.cost(rates[index])]
            timed.append(table)

        monkeypatch.setattr(run_rates, "_step", step)
        return timed

    return install


class TestFit:
    @pytest.mark.parametrize("chunk_rows", [64, 128, 256])
    def test_the_rates_are_those_of_the_clock(self, clock, chunk_rows):
        truth = RunCost(call=3e-3, row=1e-4, chunk=2e-3, chunk_rows=chunk_rows, state=5e-4)
        timed = clock(truth)
        found, error = measured_run_cost(layer_of(qwen3_5()))
        assert found == replace(truth, **{name: pytest.approx(getattr(truth, name)) for name in NUMBERS})
        assert error < 1e-9 and sum(table.num_forks for table in timed) == 2

    def test_mixers_count_as_often_as_the_model_has_them(self, clock):
        """Three of a kind, one of which is changed: it is timed by itself, and the mean is that of all three."""
        model = qwen3_5()
        model.model.layers[1].linear_attn.out_proj = torch.nn.Linear(16, 32)
        clock(RunCost(call=1.0, row=0.0, state=0.0), RunCost(call=4.0, row=0.0, state=0.0))
        assert measured_run_cost(layer_of(model))[0].call == pytest.approx((2 * 1 + 4) / 3)

    def test_mixers_that_cannot_start_from_a_state_get_no_forks(self, clock):
        timed = clock(RUNS)
        found, _ = measured_run_cost(layer_of(jamba()))
        assert not found.can_fork and found.state == 0 and not any(table.num_forks for table in timed)


class TestMeasuring:
    """By a clock for which everything takes a second."""

    @pytest.fixture(autouse=True)
    def seconds(self, monkeypatch):
        monkeypatch.setattr(run_rates, "fastest", lambda run, device, repeats: run() or 1.0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_real_mixer(self, dtype):
        """Nothing of the run changes: no gradient, no random state, and the weights keep their dtype."""
        model = prepare_model(qwen3_5())
        torch.manual_seed(0)
        expected = torch.rand(1)
        torch.manual_seed(0)
        found, error = measured_run_cost(layer_of(model, dtype))
        assert torch.equal(torch.rand(1), expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert found.can_fork and found.call + found.row + found.chunk > 0 and error >= 0

    def test_autocast_computes_in_the_dtype_of_the_layer(self):
        dtypes = []
        model = qwen3_5()
        projection = model.model.layers[0].linear_attn.out_proj
        projection.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        measured_run_cost(layer_of(model, torch.bfloat16))
        assert set(dtypes) == {torch.bfloat16}

    def test_frozen_weights_get_no_gradient(self, monkeypatch):
        asked = []
        grad = torch.autograd.grad
        monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kw: asked.append(len(args[1])) or grad(*args, **kw))
        measured_run_cost(layer_of(qwen3_5().requires_grad_(False)))
        assert set(asked) == {1}, "the input"


class TestKept:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(calibration, "_MEASURED", {})
        monkeypatch.setattr(calibration, "measured_rates", lambda layer: (RATES, 0.0))
        monkeypatch.setattr(calibration, "measured_run_cost", lambda layer: (RUNS, 0.0))
        monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_with_the_rates_of_attention(self, folder, monkeypatch):
        cost = calibrate(qwen3_5())
        assert cost.run_cost == RUNS and (cost.attention_share, cost.mixer_share) == (0.25, 0.75)
        assert cost.row_flops == 6 * (0.25 * 2 * 32 * (32 + 16) + 3 * 32 * 64)
        (path,) = folder.glob("rates-*.json")
        assert read_rates(path) == cost.rates == Rates(**vars(RATES) | {"runs": RUNS})
        assert json.loads(path.read_text())["mixers"][0][0]["class"] == "Qwen3_5GatedDeltaNet"
        monkeypatch.setattr(calibration, "_MEASURED", {})  # as in another process
        monkeypatch.setattr(calibration, "measured_run_cost", lambda layer: pytest.fail("measured twice"))
        assert calibrate(qwen3_5()) == cost

    def test_that_no_layer_forks_is_said_in_every_process(self, folder, monkeypatch, caplog):
        """The worker asks for no forks then, so no layer tries one and says why."""
        monkeypatch.setattr(calibration, "measured_run_cost", lambda layer: (replace(RUNS, can_fork=False), 0.0))
        for _ in range(2):
            monkeypatch.setattr(calibration, "_MEASURED", {})
            caplog.clear()
            for _ in range(2):
                calibrate(jamba())
            assert [
                each.message
                for each in caplog.records
                if each.name.startswith("radixtrain") and each.levelno >= logging.WARNING
            ] == [
                "JambaMambaMixer cannot start from a state with a gradient, so recurrent layers compute every sequence "
                "from its first token on; all else is shared"
            ]

    def test_other_mixers_are_measured_for_themselves(self, folder):
        models = [qwen3_5(), qwen3_5(linear_num_value_heads=4), qwen3_5(linear_conv_kernel_dim=3), qwen3_5()]
        for model in models:
            calibrate(model)
        calibrate(models[-1].requires_grad_(False))
        assert len(list(folder.glob("rates-*.json"))) == 4

    def test_kernels_that_were_installed_since(self, monkeypatch):
        layer = layer_of(qwen3_5())
        before = mixers_key(layer)
        version = run_rates._version
        monkeypatch.setattr(run_rates, "_version", lambda name: version(name) or "1.0")
        assert mixers_key(layer) != before

    def test_a_prepared_model_computes_the_runs_of_its_batch_and_says_so(self, caplog):
        model = qwen3_5()
        collator = RadixCollator(step_cost=calibrate(model))
        assert collator(FEATURES)["radix_runs_calls"] == ((1, 39, 1, ()), (6, 2, 0, ((0, 6),)))
        with caplog.at_level(logging.INFO):
            prepare_model(model)(**collator(FEATURES))
        assert "forks of the recurrent state: 1" in caplog.text
        report = verify_equivalence(model, FEATURES, collator=collator, precisions=["float64"])
        assert report["float64"].worst.radix <= 1e-12, str(report)
