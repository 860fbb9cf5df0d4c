"""Rates that are measured once and kept."""

import json
import logging
from dataclasses import asdict

import numpy as np
import pytest
import torch

from radixtrain import RadixCollator, calibrate, prepare_model, verify_equivalence
from radixtrain.hf import calibration as calibration_module
from radixtrain.hf.calibration import cache_folder
from radixtrain.tree.cost_model import CHOICES, Rates

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, n, 5] for n in range(6, 12))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_module, "_MEASURED", {})
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(folder):
    (path,) = folder.glob("rates-*.json")
    return path


def test_rates_are_measured_and_kept(tiny_qwen3, folder, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        cost = calibrate(tiny_qwen3())
    assert cost.on_host and (cost.num_heads, cost.num_key_value_heads, cost.head_dim) == (4, 2, 8)
    assert cost.row_flops == 6 * (2 * 32 * (32 + 16) + 3 * 32 * 64)
    rates = asdict(cost.rates)
    assert all(rate >= 0 for rate in rates.values()) and rates["flop"] > 0 and rates["pair"] + rates["rectangle"] > 0
    written = json.loads(kept(folder).read_text())
    assert written["rates"] == rates and written["torch"] == torch.__version__ and written["heads"] == [4, 2, 8]
    assert "calibrated in" in caplog.text
    monkeypatch.setattr(calibration_module, "_MEASURED", {})  # as in another process
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: pytest.fail("measured twice"))
    assert calibrate(tiny_qwen3()) == cost


def test_another_model_or_number_of_threads_is_measured_for_itself(tiny_qwen3, folder, monkeypatch):
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: (Rates(1, 1, 1, 1, 1), 0.0))
    calibrate(tiny_qwen3())
    calibrate(tiny_qwen3(num_key_value_heads=4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibrate(tiny_qwen3())
    assert len(list(folder.glob("rates-*.json"))) == 3


def test_the_rates_are_those_of_the_clock(tiny_qwen3, monkeypatch):
    """With a clock that obeys the formula, the rates of the formula come out."""
    shape = calibration_module._Shape(tiny_qwen3().config, torch.device("cpu"), torch.float32, "auto")
    truth = shape.cost(Rates(call=3e-5, rectangle=1e-6, pair=2e-10, element=1e-9, flop=0.0))
    seconds = iter([truth.seconds(plan, strategy) for plan in calibration_module._batches() for strategy in CHOICES])
    monkeypatch.setattr(calibration_module, "_fastest", lambda run, device: next(seconds, 6.0 * 512 * 32 * 64))
    rates, error = calibration_module._measure(shape)
    assert asdict(rates) == pytest.approx({**asdict(truth.rates), "flop": 1.0}, rel=1e-6)
    assert error < 1e-6


def test_what_a_busy_machine_measures_is_not_kept(tiny_qwen3, folder, monkeypatch, caplog):
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: (Rates(1, 1, 1, 1, 1), 0.9))
    calibrate(tiny_qwen3())
    assert "the calibration is 90 % off its own measurements" in caplog.text
    assert not folder.exists()


def test_random_state_is_left_alone(tiny_qwen3):
    model = tiny_qwen3()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    calibrate(model)
    assert torch.equal(torch.rand(1), expected)


def test_in_inference_mode(tiny_qwen3):
    """Lightning builds the loaders of validate, test and predict in it."""
    model = tiny_qwen3()
    with torch.inference_mode():
        assert calibrate(model).rates.flop > 0


def test_the_dtype_of_the_computation_counts(tiny_qwen3, folder):
    calibrate(tiny_qwen3(), dtype=torch.bfloat16)
    assert json.loads(kept(folder).read_text())["dtype"] == "torch.bfloat16"


def test_rates_that_are_given_are_taken(tiny_qwen3, folder):
    assert calibrate(tiny_qwen3(), rates=Rates(1, 2, 3, 4, 5)).rates == Rates(1, 2, 3, 4, 5)
    assert not folder.exists()


def test_a_model_on_another_device_is_refused(tiny_qwen3):
    with pytest.raises(ValueError, match="a calibration needs the model on a CPU or a CUDA device, it is on meta"):
        calibrate(tiny_qwen3().to("meta"))


def test_the_fit_is_exact_where_it_can_be_and_never_negative():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 100, (12, 4))
    rates = np.array([1e-5, 0.0, 3e-9, 2e-7])
    assert np.allclose(calibration_module._fit(work, work @ rates), rates, rtol=1e-9, atol=1e-15)
    assert min(calibration_module._fit(work, work @ np.array([1e-5, -1e-6, 3e-9, 2e-7]))) >= 0


@pytest.mark.parametrize("text", ["{", "{}", '{"rates": {"call": -1}}', '{"rates": {"call": NaN}}'])
def test_a_broken_file_is_measured_again_and_left_alone(tiny_qwen3, folder, monkeypatch, caplog, text):
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: (Rates(1, 1, 1, 1, 1), 0.0))
    calibrate(tiny_qwen3())
    monkeypatch.setattr(calibration_module, "_MEASURED", {})
    kept(folder).write_text(text)
    assert calibrate(tiny_qwen3()).rates == Rates(1, 1, 1, 1, 1)
    assert "cannot be read and is measured again" in caplog.text


def test_the_first_of_two_processes_counts(tiny_qwen3, folder, monkeypatch):
    shape = calibration_module._Shape(tiny_qwen3().config, torch.device("cpu"), torch.float32, "auto")
    path = folder / "rates-x.json"
    assert calibration_module._keep(path, Rates(1, 1, 1, 1, 1), shape) == Rates(1, 1, 1, 1, 1)
    assert calibration_module._keep(path, Rates(2, 2, 2, 2, 2), shape) == Rates(1, 1, 1, 1, 1)
    assert list(folder.iterdir()) == [path]


def test_a_folder_that_cannot_be_written(tiny_qwen3, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: (Rates(1, 1, 1, 1, 1), 0.0))
    assert calibrate(tiny_qwen3()).rates == Rates(1, 1, 1, 1, 1)
    assert "the calibration cannot be kept" in caplog.text
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: pytest.fail("measured for every loader"))
    calibrate(tiny_qwen3())


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("RADIXTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "radixtrain"


def test_an_attention_without_a_cost_is_refused(tiny_qwen3):
    with pytest.raises(ValueError, match="attention must be auto or one of cascade, path, expand, got 'reference'"):
        calibrate(tiny_qwen3(), attention="reference")


@pytest.mark.parametrize("strategy", CHOICES)
def test_a_prepared_model_does_what_its_batch_chose(tiny_qwen3, monkeypatch, caplog, strategy):
    import radixtrain.hf.attention

    asked = []
    attend = radixtrain.hf.attention.tree_attention

    def spy(*args, attention, **options):
        asked.append(attention)
        return attend(*args, attention=attention, **options)

    monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", spy)
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: (Rates(1, 1, 1, 1, 1), 0.0))
    model = tiny_qwen3()
    collator = RadixCollator(step_cost=calibrate(model, attention=strategy))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            prepare_model(model)(**collator(FEATURES))
    assert set(asked) == {strategy}
    assert f"a batch is fastest with attention={strategy}, min_shared_tokens=" in caplog.text
    asked.clear()
    prepare_model(model, attention="path")(**collator(FEATURES))
    assert set(asked) == {"path"}, "what was asked for by name is not overruled"


def test_a_window_that_binds_is_kept_whatever_was_chosen(monkeypatch):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = MistralForCausalLM(
        MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=3)
    )
    monkeypatch.setattr(calibration_module, "_measure", lambda shape: (Rates(1, 1, 1, 1, 1), 0.0))
    collator = RadixCollator(step_cost=calibrate(model, attention="cascade"))
    loss = prepare_model(model)(**collator(FEATURES)).loss
    expected = prepare_model(model)(**RadixCollator()(FEATURES)).loss
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert verify_equivalence(model, FEATURES).passed
