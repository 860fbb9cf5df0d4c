"""Rates that are measured once and kept."""

import json
import logging
from dataclasses import asdict

import pytest
import torch
from tiers import cases
from tiny_models import tiny_model

from radixtrain import RadixCollator, calibrate, prepare_model, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf import calibration as calibration_module
from radixtrain.hf import rates as rates_module
from radixtrain.tree.cost_model import CHOICES, Rates
from radixtrain.tree.layout import MIN_SHARED_TOKENS

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, n, 5] for n in range(6, 12))]
RATES = Rates(call=1, rectangle=1, pair=1, element=1, flop=1)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of this test. Nothing has been measured in this process."""
    monkeypatch.setattr(calibration_module, "_MEASURED", {})
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch):
    """Measuring takes no time, and finds RATES. The layers that were measured."""
    layers = []
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (layers.append(layer) or RATES, 0.0))
    return layers


def kept(folder):
    (path,) = folder.glob("rates-*.json")
    return path


def test_rates_are_measured_once_and_kept(tiny_qwen3, folder, measured, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        cost = calibrate(tiny_qwen3(), dtype=torch.bfloat16)
    assert cost.on_host and (cost.num_heads, cost.num_key_value_heads, cost.head_dim) == (4, 2, 8)
    assert cost.row_flops == 6 * (2 * 32 * (32 + 16) + 3 * 32 * 64)
    assert cost.rates == RATES and cost.rates.runs is None, "no recurrent layers"
    written = json.loads(kept(folder).read_text())
    assert written["rates"] == asdict(RATES) and "mixers" not in written
    assert written["torch"] == torch.__version__ and written["heads"] == [4, 2, 8]
    assert written["dtype"] == "torch.bfloat16", "of the computation"
    assert "calibrated in" in caplog.text
    monkeypatch.setattr(calibration_module, "_MEASURED", {})  # as in another process
    assert calibrate(tiny_qwen3(), dtype=torch.bfloat16) == cost
    assert len(measured) == 1


def test_another_model_or_number_of_threads_is_measured_for_itself(tiny_qwen3, measured, monkeypatch):
    calibrate(tiny_qwen3())
    calibrate(tiny_qwen3(num_key_value_heads=4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibrate(tiny_qwen3())
    assert len(measured) == 3


def test_measurements_of_a_busy_machine_are_not_kept(tiny_qwen3, folder, monkeypatch, caplog):
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.9))
    calibrate(tiny_qwen3())
    assert "the calibration is 90 % off its own measurements" in caplog.text
    assert not folder.exists()


def test_in_inference_mode(tiny_qwen3, monkeypatch):
    """Lightning builds the loaders of validate, test and predict in it."""
    monkeypatch.setattr(rates_module, "fastest", lambda run, device: run() or 1.0)
    model = tiny_qwen3()
    with torch.inference_mode():
        assert calibrate(model).rates.flop > 0


def test_given_rates_are_used(tiny_qwen3, folder):
    assert calibrate(tiny_qwen3(), rates=RATES).rates == RATES
    assert not folder.exists()


def test_a_model_on_another_device_is_refused(tiny_qwen3):
    with pytest.raises(UserError, match="a calibration needs the model on a CPU or a CUDA device, it is on meta"):
        calibrate(tiny_qwen3().to("meta"))


def test_a_damaged_file_is_measured_again_and_replaced(tiny_qwen3, folder, measured, monkeypatch, caplog):
    calibrate(tiny_qwen3())
    monkeypatch.setattr(calibration_module, "_MEASURED", {})
    kept(folder).write_text("{")
    assert calibrate(tiny_qwen3()).rates == RATES and len(measured) == 2
    assert "is damaged, and the machine is measured again" in caplog.text
    assert json.loads(kept(folder).read_text())["rates"] == asdict(RATES)


def test_a_folder_that_cannot_be_written(tiny_qwen3, tmp_path, measured, monkeypatch, caplog):
    """The rates are not measured again for every loader."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "file"))
    assert calibrate(tiny_qwen3()).rates == RATES
    assert "the calibration cannot be kept" in caplog.text
    calibrate(tiny_qwen3())
    assert len(measured) == 1


def test_an_attention_without_a_cost_is_refused(tiny_qwen3):
    with pytest.raises(UserError, match="attention must be auto or one of cascade, path, expand, got 'reference'"):
        calibrate(tiny_qwen3(), attention="reference")


@pytest.mark.parametrize("strategy", cases(CHOICES, quick=CHOICES[:1]))
def test_a_prepared_model_does_what_its_batch_chose(tiny_qwen3, measured, monkeypatch, caplog, strategy):
    import radixtrain.hf.attention

    asked = []
    attend = radixtrain.hf.attention.tree_attention

    def spy(*args, attention, **options):
        asked.append(attention)
        return attend(*args, attention=attention, **options)

    monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", spy)
    model = tiny_qwen3()
    collator = RadixCollator(step_cost=calibrate(model, attention=strategy))
    prepare_model(model)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            model(**collator(FEATURES))
    assert set(asked) == {strategy}
    said = [message for message in caplog.messages if "fastest" in message]
    assert len(said) == 1
    first = f"the fastest way is chosen for each batch: for the first one attention={strategy}, min_shared_tokens="
    assert said[0].startswith(first)
    asked.clear()
    prepare_model(model, attention="path")(**collator(FEATURES))
    assert set(asked) == {"path"}, "a strategy that was asked for by name is kept"


def test_another_choice_is_said_to_be_of_another_batch(tiny_qwen3, caplog):
    model = tiny_qwen3()
    batch = RadixCollator(step_cost=calibrate(model, attention="path", rates=RATES))(FEATURES)
    prepare_model(model)
    with caplog.at_level(logging.INFO):
        for min_shared_tokens in (3, 5, 3):
            model(**{**batch, MIN_SHARED_TOKENS: min_shared_tokens})
    assert [message for message in caplog.messages if "fastest" in message] == [
        "the fastest way is chosen for each batch: for the first one attention=path, min_shared_tokens=3",
        "the fastest way for another batch: attention=path, min_shared_tokens=5",
    ]


def test_a_window_that_binds_is_kept_under_any_choice():
    model = tiny_model("MistralForCausalLM", sliding_window=3)
    collator = RadixCollator(step_cost=calibrate(model, attention="cascade", rates=RATES))
    report = verify_equivalence(model, FEATURES, collator=collator, precisions=["float64"])
    assert report["float64"].worst.radix <= 1e-12, str(report)


def test_latent_attention_counts_its_own_head_dims():
    """Queries and keys are wider than values there, and tree attention runs with the wider."""
    dims = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    cost = calibrate(tiny_model("DeepseekV3ForCausalLM", **dims), rates=RATES)
    assert (cost.num_heads, cost.num_key_value_heads, cost.head_dim) == (4, 4, 24)


def test_a_width_that_the_configuration_does_not_say_is_four_times_the_hidden_size():
    cost = calibrate(tiny_model("BloomForCausalLM"), rates=RATES)
    assert cost.row_flops == 6 * (4 * 32 * 32 + 3 * 32 * 128)
