"""`radixtrain verify` and `fit` with `verify_first_batch`: the command line, its table and its exit code."""

from collections.abc import Callable
from pathlib import Path

import pytest

from radixtrain.__main__ import main
from tests.support import FULL, cases
from tests.support.runs import errors_in
from tests.support.steps import with_wrong_keys

Arguments = Callable[..., list[str]]


@pytest.fixture
def broken_attention(monkeypatch: pytest.MonkeyPatch, without_the_trial: None) -> None:
    with_wrong_keys(monkeypatch)


def test_a_broken_attention_is_found_and_the_parameter_named(
    arguments: Arguments, capsys: pytest.CaptureFixture[str], broken_attention: None
) -> None:
    assert main(arguments("verify")) == 1
    captured = capsys.readouterr()
    [error] = errors_in(captured.err)
    assert "verify: step 0: float64: NOT EQUAL: model.layers.0.self_attn.k_" in error
    assert "worst element [" in error
    assert "Traceback" not in captured.err
    assert "NOT EQUAL" in captured.out


def test_lora_is_filled_so_that_all_of_it_is_tested(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="pip install peft")
    assert main(arguments("verify", model__use_peft=True, model__lora_r=4)) == 0
    assert "zero:" not in capsys.readouterr().out


@FULL
def test_weights_of_a_checkpoint_under_the_settings_that_were_typed(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments("fit", trainer__max_epochs=1)) == 0
    ckpt_path = tmp_path / "out" / "checkpoints" / "last"
    assert main(arguments("verify", ckpt_path=ckpt_path, trainer__precision="bf16-mixed")) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_the_first_sequences_of_a_step(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("verify", num_sequences=2)) == 0
    assert capsys.readouterr().out.startswith("step 0: 2 sequences, ")


class TestVerifyFirstBatch:
    @pytest.mark.parametrize("use_peft", cases([False, True], [False]))
    def test_a_run_that_is_verified_is_the_same_run(self, arguments: Arguments, tmp_path: Path, use_peft: bool) -> None:
        """Bit for bit: the check does not change weights, order and random state."""
        for name, wanted in (("plain", False), ("verified", True)):
            flags = {"output_dir": tmp_path / name, "model__verify_first_batch": wanted, "trainer__max_epochs": 1}
            assert main(arguments(**flags, model__use_peft=use_peft)) == 0
        plain, verified = (tmp_path / name / "model" / "model.safetensors" for name in ("plain", "verified"))
        assert plain.read_bytes() == verified.read_bytes()

    def test_a_mismatch_stops_the_run(
        self, arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken_attention: None
    ) -> None:
        assert main(arguments(model__verify_first_batch=True)) == 1
        error = capsys.readouterr().err
        assert "error: model.verify_first_batch: float64: NOT EQUAL: model.layers.0.self_attn.k_" in error
        assert "Nothing was trained" in error
        assert not (tmp_path / "out" / "model").exists()
