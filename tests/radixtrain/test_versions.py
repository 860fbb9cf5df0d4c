"""Packages that are too old or missing: one line with the command. `test_cores.py`: nothing is imported for it."""

import re
from types import SimpleNamespace

import pytest
import torch

import radixtrain
from radixtrain import __main__ as entrance
from radixtrain import share_prefixes, sharing_report, versions
from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.hf import recurrent
from radixtrain.hf.padded import sharing
from radixtrain.versions import check_versions, installed, is_older
from tests.support.models import tiny_hybrid, tiny_model, tiny_qwen3


@pytest.fixture
def old(monkeypatch):
    """The machine of somebody with an old torch and no Rich."""
    changed = {"torch": "2.6.0+cu124", "rich": None}
    monkeypatch.setattr(versions, "installed", lambda name: changed.get(name, "999"))
    return (
        "torch 2.6.0+cu124 is older than 2.10, the oldest that works; rich is not installed: "
        "pip install -U 'rich>=13' 'torch>=2.10'"
    )


def test_a_command_says_it_in_one_line(old, capsys):
    assert main(["fit", "--config", "none.yaml"]) == 1
    problems, command = capsys.readouterr().err.removeprefix("error: ").rstrip("\n").split(": pip install -U ")
    wanted, packages = old.split(": pip install -U ")
    assert sorted(problems.split("; ")) == sorted(wanted.split("; "))
    assert sorted(command.split()) == sorted(packages.split())


def test_a_library_without_the_commands(monkeypatch, capsys):
    """Installed without its extra: nothing of it is needed by the public names."""
    monkeypatch.setattr(versions, "installed", lambda name: None if name in versions.FIT else "999")
    assert main(["fit"]) == 1
    wanted = " ".join(f"'{name}>={oldest}'" for name, oldest in versions.FIT.items())
    assert capsys.readouterr().err.endswith(f": pip install -U {wanted}\n")
    check_versions()


def test_an_older_transformers_is_named(monkeypatch):
    """At the end of a refusal; a version that is not known is no reason."""
    for version, older in (("5.20.2", True), ("5.21.0.dev0", False), ("unknown", False), (None, False)):
        monkeypatch.setattr(versions, "installed", lambda name, version=version: version)
        assert bool(versions.before("recurrent states that fork")) is older


def newer(monkeypatch):
    """The machine of somebody whose pip brought a later transformers."""
    monkeypatch.setattr(versions, "installed", lambda name: "5.99.1" if name == "transformers" else "999")


TESTED = r" \(radixtrain was last tested with transformers [\d.]+; this is 5\.99\.1\)"


def test_a_refusal_says_that_transformers_is_newer(monkeypatch):
    """Of a class, of a layer, of what a hook meets, and a report; and nothing if it is not newer."""
    unreachable = tiny_model("BloomForCausalLM")
    with pytest.raises(UserError, match=r"dedup: false\)$"):
        share_prefixes(unreachable)
    newer(monkeypatch)
    with pytest.raises(UserError, match=rf"^BloomForCausalLM .*{TESTED}$"):
        share_prefixes(unreachable)
    monkeypatch.setattr(recurrent, "is_cache", lambda *_: False)
    with pytest.raises(UserError, match=rf"does not name the cache .*{TESTED}$"):
        share_prefixes(tiny_hybrid("LFM2"))
    model = share_prefixes(tiny_qwen3())
    monkeypatch.setattr(sharing, "with_rows", lambda *_: setattr(object(), "cache", None))
    with pytest.raises(AttributeError, match=rf"no attribute 'cache'{TESTED}$"):
        model(input_ids=torch.tensor([[5, 6, 7], [5, 6, 8]]), use_cache=False)
    model(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    assert re.search(rf"calls? not shared: .*\n{TESTED.strip()}$", str(sharing_report(model)))


@pytest.mark.parametrize("module", [None, "plain", "nanobind"])
def test_the_end_is_quick_unless_a_library_would_list_leaks(module, monkeypatch):
    """Objects that Python does not look at any more are leaks to one that is built with nanobind."""
    part = type("nb_func", (), {"__module__": str(module)})()
    found, called = {"triton._C.libtriton": SimpleNamespace(part=part)} if module else {}, []
    monkeypatch.setattr(entrance, "sys", SimpleNamespace(modules=found))
    monkeypatch.setattr(entrance, "signal", SimpleNamespace(signal=lambda *_: None, SIGINT=2, SIG_IGN=1))
    monkeypatch.setattr(entrance, "gc", SimpleNamespace(freeze=lambda: called.append(True)))
    entrance._leave()
    assert bool(called) == (module != "nanobind")


def test_doctor_looks_further(old, monkeypatch):
    ran = []
    run = lambda settings, typed: ran.append(type(settings).__name__)  # noqa: E731
    monkeypatch.setattr(entrance, "import_module", lambda name: SimpleNamespace(run=run))
    assert main(["doctor"]) == 0 and ran == ["Doctor"]


def test_a_public_name_says_it_too(old, monkeypatch):
    """An attribute that an old package lacks; Python would say that share_prefixes does not exist."""

    def lacks(name):
        raise AttributeError("module 'transformers' has no attribute 'x'")

    monkeypatch.setattr(radixtrain, "import_module", lacks)
    with pytest.raises(UserError, match=r"torch 2\.6\.0"):
        radixtrain.share_prefixes  # noqa: B018
    monkeypatch.setattr(versions, "installed", lambda name: "999")
    with pytest.raises(
        ImportError, match=r"radixtrain\.share_prefixes cannot be imported: module 'transformers' has no"
    ):
        radixtrain.share_prefixes  # noqa: B018


def test_versions_are_numbers():
    for name, older, not_older in (
        ("lightning", ["2.6.5"], ["2.6.6", "2.10.0", "2.7", "2.6.6rc1"]),
        ("torch", ["2.9"], ["2.11.0a0+git1234", "2.10.0.dev20261101+cu130", "2.10rc1", "2.10+cu130.2"]),
        ("flash-attn-4", ["4.0.0b9"], ["4.0.0b36", "4.0.0b100.dev1", "4.0.0"]),
    ):
        assert [is_older(name, version) for version in (*older, *not_older)] == [True] + [False] * len(not_older)
    tested = versions.TESTED["transformers"]
    newer = {"5.99.0": True, "6.0.0.dev0": True, tested: False, "5.2.0": False, "unknown": False}
    assert {version: versions.is_newer_than_tested("transformers", version) for version in newer} == newer


def test_a_package_that_says_no_version(monkeypatch, tmp_path):
    """A folder in PYTHONPATH without metadata; and one of data that has a package's name."""
    (tmp_path / "jinja9.py").touch()
    (tmp_path / "wandb9").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("jinja9") == "unknown" and not is_older("jinja9", "unknown")
    assert installed("wandb9") is None
    monkeypatch.setattr("importlib.metadata.version", lambda name: None)  # a broken dist-info, in Python 3.11
    check_versions()
