"""What tries other suites: the record of one and the comparison of two."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny import tiny_qwen3, train_tokenizer

from tests.support import FULL

COMPAT = Path(__file__).resolve().parents[2] / "recipes" / "compat"
SUITE = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def test_trains(tmp_path):
    model = AutoModelForCausalLM.from_pretrained("MODEL")
    rows = [{"input_ids": [*range(8), n], "labels": [*range(8), n]} for n in range(4)]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2, save_strategy="no")
    Trainer(model, arguments, train_dataset=rows).train()
"""


@FULL
def test_a_suite_untouched_and_shared(tmp_path):
    tiny_qwen3(train_tokenizer(["a b c"], 300), hidden=64).save_pretrained(tmp_path / "model")
    (tmp_path / "test_it.py").write_text(SUITE.replace("MODEL", str(tmp_path / "model")))
    python = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "recording", "--arithmetic", "float64"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(COMPAT.parents[1]), str(COMPAT)])}
    files = [tmp_path / f"{name}.jsonl" for name in ("untouched", "shared")]
    for file, variables in zip(files, ({}, {"RADIXTRAIN": "1"}), strict=True):
        record = ["--record", file, "-c", os.devnull, "--rootdir", ".", "test_it.py"]
        subprocess.run([*python, *record], cwd=tmp_path, env=env | variables)

    def compared() -> tuple[int, str]:
        done = subprocess.run([sys.executable, COMPAT / "recording.py", *files], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, said = compared()
    assert code == 0 and "shared: 1 tests, {'passed': 1}" in said, said
    assert "calls shared: 2, r = 3.00" in said, "36 tokens, 12 of them unique"
    line = json.loads(files[1].read_text())
    files[1].write_text(json.dumps(line | {"logged": []}))
    code, said = compared()
    assert code == 1 and "other entries: test_it.py::test_trains" in said
