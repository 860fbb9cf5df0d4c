"""The record of another suite: what it holds, and what the comparison of two says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_qwen3, train_tokenizer

OTHER_SUITES = Path(__file__).resolve().parents[2] / "recipes" / "other_suites"
SUITE = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def test_trains(tmp_path):
    model = AutoModelForCausalLM.from_pretrained("MODEL")
    rows = [{"input_ids": [*range(8), n], "labels": [*range(8), n]} for n in range(4)]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2, save_strategy="no")
    Trainer(model, arguments, train_dataset=rows).train()

def test_fails():
    assert False
"""


@pytest.mark.full
def test_a_suite_untouched_and_shared(tmp_path):
    tokenizer = train_tokenizer(["a b c"], 300)
    tiny_qwen3(tokenizer, hidden=64).save_pretrained(tmp_path / "model")
    (tmp_path / "test_it.py").write_text(SUITE.replace("MODEL", str(tmp_path / "model")))
    python = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "recording", "--arithmetic", "float64"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(OTHER_SUITES.parents[1]), str(OTHER_SUITES)])}
    for name, variables in (("untouched", {}), ("shared", {"RADIXTRAIN": "1"})):
        record = ["--record", f"{name}.jsonl", "-c", os.devnull, "--rootdir", ".", "test_it.py"]
        subprocess.run([*python, *record], cwd=tmp_path, env=env | variables)
    ends = [sys.executable, OTHER_SUITES / "compare.py", tmp_path / "untouched.jsonl", tmp_path / "shared.jsonl"]
    said = subprocess.run(ends, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "shared: 2 tests, {'passed': 1, 'failed': 1}" in said.stdout
    assert "calls shared: 2, r = 3.00" in said.stdout, said.stdout  # 36 tokens, 12 of them unique

    lines = [json.loads(line) for line in (tmp_path / "shared.jsonl").read_text().splitlines()]
    assert "grad_norm" in lines[0]["logged"][0][1] and lines[1]["why"].startswith("AssertionError")
    lines[0]["outcome"], lines[1]["logged"] = "failed", [["Trainer", {"loss": 1.0}]]
    (tmp_path / "shared.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = subprocess.run(ends, capture_output=True, text=True)
    assert said.returncode == 1
    assert "only shared: test_it.py::test_trains" in said.stdout
    assert "other entries: test_it.py::test_fails" in said.stdout
