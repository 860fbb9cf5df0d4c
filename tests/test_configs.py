"""Every shipped configuration is accepted by the real command line, and its first lines say how to run it."""

import re
from collections.abc import Callable

import pytest
import yaml

from radixtrain.training.answers.evaluate_generation import EvaluateGeneration
from tests.pages import ROOT, read

CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))


def header(config: str) -> str:
    """The comment that the file begins with."""
    lines = read(config).splitlines()
    comment = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(lines[:comment])


@pytest.mark.parametrize("config", CONFIGS)
def test_command_line_accepts_what_the_header_says(config: str, printed_by: Callable[..., str]) -> None:
    assert re.search(rf"python -m radixtrain fit\b.*--config {re.escape(config)}(?!\S)", header(config))
    assert "model_name_or_path" in printed_by("fit", "--config", config, "--print_config")


def test_the_default_for_own_data_is_safe() -> None:
    """A rate for trained weights, nothing of the demo, no validation file to be missed, and an output of its own."""
    config, demo = (yaml.safe_load(read(f"configs/{name}")) for name in ("sft.yaml", "demo.yaml"))
    assert config["model"]["learning_rate"] <= 5e-5 < demo["model"]["learning_rate"]
    assert -(-1200 // demo["data"]["batch_size"]) * demo["trainer"]["max_epochs"] <= 200, "steps of `make fit`"
    assert "demo" not in str(config) and "validation_file" not in config["data"]
    outputs = [yaml.safe_load(read(name)).get("output_dir") for name in CONFIGS]
    assert outputs.count(config["output_dir"]) == 1


def test_what_is_commented_out_has_keys_that_exist() -> None:
    text = read("configs/sft.yaml")
    block = re.findall(r"^# (evaluate_generation:.*\n(?:#  .*\n)+)", text, re.MULTILINE)[0].replace("\n# ", "\n")
    given = yaml.safe_load(block)["evaluate_generation"]
    assert EvaluateGeneration(**given).logged == "eval_exact_match"


def test_every_place_to_fill_is_marked() -> None:
    marked = re.findall(r"^ *(\w+): .*# <- ", read("configs/sft.yaml"), re.MULTILINE)
    assert marked == ["output_dir", "model_name_or_path", "train_file"]
