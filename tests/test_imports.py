"""What an import loads, in fresh processes. Which module may import which is in pyproject.toml, for import-linter."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from radixtrain.commands import COMMANDS
from radixtrain.versions import FIT
from tests.pages import ROOT


@cache
def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh process after `statement`."""
    code = (
        f"{statement}\nimport json, sys; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import radixtrain", {"torch", "triton", "transformers", "lightning", "numpy"}),
        ("import radixtrain.tree.plan", {"torch", "triton", "transformers", "lightning"}),
        ("import radixtrain.errors", {"torch", "triton", "transformers", "lightning", "numpy"}),
        ("import radixtrain.attention", {"transformers", "lightning", "triton"}),
        (
            "from radixtrain.__main__ import main; main(['fit', '--help'])",
            {"torch", "triton", "transformers", "lightning", "numpy", "pydantic"},
        ),
    ],
)
def test_import_leaves_out(statement: str, heavy: set[str]) -> None:
    baseline = loaded_by("pass")  # an installed .pth file may import things of its own
    assert not (loaded_by(statement) - baseline) & heavy


# The library where only its own dependencies are installed: what the extra `fit` brings cannot be found.
WITHOUT_FIT = """
import sys
from importlib.machinery import PathFinder
from radixtrain.commands import COMMANDS
from radixtrain.versions import FIT

hidden, find_spec = {*FIT, "matplotlib", "pyarrow", "pandas", "peft", "trl"}, PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *at: None if name.split(".")[0] in hidden else find_spec(name, *at))

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
import radixtrain

for name in radixtrain.__all__:
    getattr(radixtrain, name)
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8)).train()
rows = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]])
shared = radixtrain.share_prefixes(model)
shared(input_ids=rows, labels=rows).loss.backward()
assert radixtrain.sharing_report(shared).compression_ratio == 12 / 8
radixtrain.restore_model(shared)
assert len(radixtrain.generate(model, rows, max_new_tokens=2)) == 2
features = [{"input_ids": row, "labels": row} for row in rows.tolist()]
batch = radixtrain.RadixCollator()(features)
radixtrain.share_prefixes(model)(**batch).loss.backward()
assert radixtrain.verify_equivalence(model, features).passed
assert not set(FIT) & set(sys.modules)
"""


def test_the_library_needs_nothing_of_the_extra_fit() -> None:
    loaded_by(WITHOUT_FIT)


# The commands where packages that they do not need cannot be found, nor their versions.
BLOCKED = """
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from radixtrain.__main__ import main

hidden, find_spec, version = {hidden!r}, PathFinder.find_spec, metadata.version
PathFinder.find_spec = staticmethod(lambda name, *at: None if name.split(".")[0] in hidden else find_spec(name, *at))
metadata.version = lambda name: version("no-such-package" if name in hidden else name)
assert main({arguments!r}) == {code}
assert not hidden & set(sys.modules)
"""
OF_FIT = {*FIT, "wandb", "matplotlib", "peft", "trl"}


@pytest.mark.parametrize("flags", [[], ["--json", "true"]])
def test_doctor_needs_nothing_to_say_what_is_missing(flags: list[str]) -> None:
    loaded_by(BLOCKED.format(hidden=OF_FIT, arguments=["doctor", *flags], code=0))


@pytest.mark.parametrize(
    "command",
    [["report", "--max_seconds=0.1", "--config=configs/sft.yaml"], ["inspect"], ["fit", "--trainer.max_steps=1"]],
)
def test_a_command_needs_no_package_of_another(command: list[str], shop: Path, tmp_path: Path) -> None:
    """Nor of a key that is not set: Weights & Biases and Matplotlib, and where nothing is trained Lightning."""
    files = {
        "model.model_name_or_path": shop / "model",
        "data.train_file": shop / "train.jsonl",
        "output_dir": tmp_path,
    }
    arguments = [
        *command,
        *(f"--{name}={value}" for name, value in files.items()),
        f"--data.cache_dir={tmp_path}/cache",
    ]
    hidden = OF_FIT - set(COMMANDS[command[0]].needs) | {"requests", "trackio"}
    loaded_by(BLOCKED.format(hidden=hidden, arguments=arguments, code=0))


def test_public_names_are_found() -> None:
    """And a heavy import is seen, which one of them needs. An unknown name is an AttributeError."""
    statement = "import radixtrain\nfor name in radixtrain.__all__: getattr(radixtrain, name)"
    assert {"torch", "radixtrain"} <= loaded_by(statement)
    loaded_by("import radixtrain\ntry: radixtrain.nothing\nexcept AttributeError: pass")
