"""What `doctor` finds on a machine, and on broken ones."""

import json

import pytest
import torch

from radixtrain.__main__ import main
from radixtrain.commands import doctor as module
from radixtrain.commands.doctor import NEEDED, OPTIONAL, Finding, findings
from radixtrain.kernels.varlen import KERNELS
from radixtrain.versions import FIT, OLDEST, TESTED, WHY


def of(section):
    return {finding.name: finding for finding in findings() if finding.section == section}


def test_for_people(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for section in ("packages", "devices", "attention"):
        assert f"{section}\n  " in printed
    assert f"torch                    {torch.__version__}" in printed
    assert printed.endswith("Training can run here. `radixtrain verify` compares its gradient with the ordinary one.\n")


def test_for_machines(capsys):
    assert main(["doctor", "--json", "true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["can_train"] is True and found["can_fit"] is True
    torch_line = {"section": "packages", "name": "torch", "value": torch.__version__}
    assert {**torch_line, "problem": "", "fix": "", "blocks": False} in found["findings"]
    names = [each["name"] for each in found["findings"] if each["section"] == "packages"]
    assert names == ["radixtrain", "python", *NEEDED, *OPTIONAL]


def test_packages_that_are_too_old(monkeypatch, capsys):
    """All that training needs are in the error; an optional one blocks nothing."""
    oldest = OLDEST | FIT
    needed = sorted(oldest)
    monkeypatch.setattr(module, "installed", lambda name: "0.0.3+cu1" if name in (*needed, "peft") else "999")
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: training cannot run here: ")
    for name in needed:
        why = WHY.get(name, "older ones lack functions that radixtrain calls")
        line = f"{name} 0.0.3+cu1: {why}: pip install -U '{name}>={oldest[name]}'"
        assert f"{'`radixtrain fit` cannot run' if name in FIT else 'ERROR'}: 0.0.3+cu1: {why}" in captured.out
        assert (line in captured.err) is (name in OLDEST)
    assert of("packages")["peft"] == Finding(
        "packages",
        "peft",
        "0.0.3+cu1",
        "older ones lack functions that radixtrain calls",
        "pip install -U 'peft>=0.20'",
    )


def test_what_is_not_installed(monkeypatch):
    installed = module.installed
    monkeypatch.setattr(module, "installed", lambda name: None if name in ("peft", "tokenizers") else installed(name))
    found = of("packages")
    assert found["peft"].fix == "pip install -U 'peft>=0.20'" and not found["peft"].blocks
    assert found["tokenizers"] == Finding(
        "packages", "tokenizers", "", "not installed", "pip install -U tokenizers", True
    )


@pytest.mark.parametrize("version", [None, "0.0.3"])
def test_without_the_commands(version, monkeypatch, capsys):
    """`pip install .`: a trainer of one's own runs; old packages of the commands do not matter for it."""
    installed = module.installed
    monkeypatch.setattr(module, "installed", lambda name: version if name in FIT else installed(name))
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert not captured.err and "Your own trainer can run here" in captured.out
    assert captured.out.endswith("`radixtrain fit` cannot: in the folder of radixtrain, pip install '.[fit]'\n")
    assert main(["doctor", "--json", "true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["can_train"] is True and found["can_fit"] is False


def test_what_is_missing_is_said_without_a_stray_blank(monkeypatch, capsys):
    installed = module.installed
    monkeypatch.setattr(module, "installed", lambda name: None if name == "tokenizers" else installed(name))
    assert main(["doctor"]) == 1
    told = "error: training cannot run here: tokenizers not installed: pip install -U tokenizers\n"
    assert capsys.readouterr().err == told


def test_newer_than_tested(monkeypatch):
    """A newer package blocks nothing."""
    installed = module.installed
    monkeypatch.setattr(module, "installed", lambda name: "99.0" if name == "transformers" else installed(name))
    tested = f"newer than tested ({TESTED['transformers']})"
    assert of("packages")["transformers"] == Finding("packages", "transformers", "99.0", tested)
    assert of("packages")["numpy"].problem == ""


def test_a_library_that_does_not_load(monkeypatch, capsys):
    def broken():
        raise ImportError("libcudart.so.12: cannot open shared object file\nmore")
        yield

    monkeypatch.setattr(module, "_devices", broken)
    assert main(["doctor", "--json=true"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["can_train"] is False
    assert (
        "error: training cannot run here: devices unknown: libcudart.so.12: cannot open shared object" in captured.err
    )


def test_the_attention_that_would_run(monkeypatch):
    """As the functions that choose it say."""
    found = of("attention")
    assert set(found) == {"auto, float32", "auto, bfloat16", *KERNELS}
    if not torch.cuda.is_available():
        assert found["auto, float32"].value == "cascade on cpu, kernel torch"
        assert found["flash_attn"].value.startswith("cannot run in bfloat16: needs CUDA")
