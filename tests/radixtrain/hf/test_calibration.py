"""Rates that are measured once and kept."""

import json
import logging
from dataclasses import asdict

import pytest
import torch

from radixtrain import RadixCollator, calibrate, prepare_model, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf import calibration as calibration_module
from radixtrain.tree.cost_model import CHOICES, Rates
from radixtrain.tree.layout import MIN_SHARED_TOKENS

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, n, 5] for n in range(6, 12))]
RATES = Rates(call=1, rectangle=1, pair=1, element=1, flop=1)


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
    assert rates.pop("runs") is None, "no recurrent layers"
    assert all(rate >= 0 for rate in rates.values()) and rates["flop"] > 0 and rates["pair"] + rates["rectangle"] > 0
    written = json.loads(kept(folder).read_text())
    assert written["rates"] == {**rates, "runs": None} and "mixers" not in written
    assert written["torch"] == torch.__version__ and written["heads"] == [4, 2, 8]
    assert "calibrated in" in caplog.text
    monkeypatch.setattr(calibration_module, "_MEASURED", {})  # as in another process
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: pytest.fail("measured twice"))
    assert calibrate(tiny_qwen3()) == cost


def test_another_model_or_number_of_threads_is_measured_for_itself(tiny_qwen3, folder, monkeypatch):
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
    calibrate(tiny_qwen3())
    calibrate(tiny_qwen3(num_key_value_heads=4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibrate(tiny_qwen3())
    assert len(list(folder.glob("rates-*.json"))) == 3


def test_measurements_of_a_busy_machine_are_not_kept(tiny_qwen3, folder, monkeypatch, caplog):
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.9))
    calibrate(tiny_qwen3())
    assert "the calibration is 90 % off its own measurements" in caplog.text
    assert not folder.exists()


def test_in_inference_mode(tiny_qwen3):
    """Lightning builds the loaders of validate, test and predict in it."""
    model = tiny_qwen3()
    with torch.inference_mode():
        assert calibrate(model).rates.flop > 0


def test_the_dtype_of_the_computation_counts(tiny_qwen3, folder):
    calibrate(tiny_qwen3(), dtype=torch.bfloat16)
    assert json.loads(kept(folder).read_text())["dtype"] == "torch.bfloat16"


def test_given_rates_are_used(tiny_qwen3, folder):
    assert calibrate(tiny_qwen3(), rates=RATES).rates == RATES
    assert not folder.exists()


def test_a_model_on_another_device_is_refused(tiny_qwen3):
    with pytest.raises(UserError, match="a calibration needs the model on a CPU or a CUDA device, it is on meta"):
        calibrate(tiny_qwen3().to("meta"))


@pytest.mark.parametrize("text", ["{", "{}", '{"rates": {"call": -1}}', '{"rates": {"call": NaN}}'])
def test_a_damaged_file_is_measured_again_and_replaced(tiny_qwen3, folder, monkeypatch, caplog, text):
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
    calibrate(tiny_qwen3())
    monkeypatch.setattr(calibration_module, "_MEASURED", {})
    kept(folder).write_text(text)
    assert calibrate(tiny_qwen3()).rates == RATES
    assert "is damaged, and the machine is measured again" in caplog.text
    assert json.loads(kept(folder).read_text())["rates"] == asdict(RATES)


def test_a_folder_that_cannot_be_written(tiny_qwen3, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
    assert calibrate(tiny_qwen3()).rates == RATES
    assert "the calibration cannot be kept" in caplog.text
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: pytest.fail("measured for every loader"))
    calibrate(tiny_qwen3())


def test_an_attention_without_a_cost_is_refused(tiny_qwen3):
    with pytest.raises(UserError, match="attention must be auto or one of cascade, path, expand, got 'reference'"):
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
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
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


def test_another_choice_is_said_to_be_of_another_batch(tiny_qwen3, monkeypatch, caplog):
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
    model = tiny_qwen3()
    batch = RadixCollator(step_cost=calibrate(model, attention="path"))(FEATURES)
    prepare_model(model)
    with caplog.at_level(logging.INFO):
        for min_shared_tokens in (3, 5, 3):
            model(**{**batch, MIN_SHARED_TOKENS: min_shared_tokens})
    assert [message for message in caplog.messages if "fastest" in message] == [
        "the fastest way is chosen for each batch: for the first one attention=path, min_shared_tokens=3",
        "the fastest way for another batch: attention=path, min_shared_tokens=5",
    ]


def test_a_window_that_binds_is_kept_under_any_choice(monkeypatch):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = MistralForCausalLM(
        MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=3)
    )
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
    collator = RadixCollator(step_cost=calibrate(model, attention="cascade"))
    loss = prepare_model(model)(**collator(FEATURES)).loss
    expected = prepare_model(model)(**RadixCollator()(FEATURES)).loss
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert verify_equivalence(model, FEATURES).passed


def test_latent_attention_counts_its_own_head_dims(folder, monkeypatch):
    """Queries and keys are wider than values there, and tree attention runs with the wider."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    dims = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 12, "kv_lora_rank": 8}
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = DeepseekV3Config(**sizes, **dims, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=1)
    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
    cost = calibrate(DeepseekV3ForCausalLM(config))
    assert (cost.num_heads, cost.num_key_value_heads, cost.head_dim) == (4, 4, 24)
    assert json.loads(kept(folder).read_text())["heads"] == [4, 4, 24]


def test_a_width_that_the_configuration_does_not_say_is_four_times_the_hidden_size(monkeypatch):
    from transformers import BloomConfig, BloomForCausalLM

    monkeypatch.setattr(calibration_module, "measured_rates", lambda layer: (RATES, 0.0))
    cost = calibrate(BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)))
    assert cost.row_flops == 6 * (4 * 32 * 32 + 3 * 32 * 128)
