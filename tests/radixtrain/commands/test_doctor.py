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


OLD = "older ones lack functions that radixtrain calls"


@pytest.mark.parametrize(
    ("name", "version", "problem", "fix", "blocks"),
    [
        ("peft", None, "not installed; it is for LoRA, DoRA", "pip install -U 'peft>=0.20'", False),
        ("peft", "0.0.3+cu1", OLD, "pip install -U 'peft>=0.20'", False),
        ("tokenizers", None, "not installed", "pip install -U tokenizers", True),
        ("torch", "0.0.3+cu1", WHY.get("torch", OLD), f"pip install -U 'torch>={OLDEST['torch']}'", True),
        ("transformers", "99.0", f"newer than tested ({TESTED['transformers']})", "", False),
        ("datasets", "0.0.3", WHY.get("datasets", OLD), f"pip install -U 'datasets>={FIT['datasets']}'", True),
    ],
)
def test_a_package(monkeypatch, capsys, name, version, problem, fix, blocks):
    """What training needs is in the error; an optional one, or one of the commands only, is not."""
    installed = module.installed
    monkeypatch.setattr(module, "installed", lambda each: version if each == name else installed(each))
    found = Finding("packages", name, version or "", problem, fix, blocks)
    assert of("packages")[name] == found
    is_error = blocks and name not in FIT
    assert main(["doctor"]) == is_error
    error = f"error: training cannot run here: {name} {found.text}\n"
    assert capsys.readouterr().err == (error if is_error else "")


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
