"""The screen before the first step, on rows whose numbers are known."""

from dataclasses import replace

import numpy as np
import pytest

from radixtrain.__main__ import main
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.datamodule import SFTData
from radixtrain.data.sample import EncodeReport
from radixtrain.data.tokens.store import Corpus, Part
from radixtrain.distributed import Ranks
from radixtrain.training.start import run_overview
from radixtrain.training.start.run_overview import data_entries, sharing_entry
from tests.support.runs import rows_in, write_rows


def corpus_of(count, prompts, length=450):
    """Conversations of one sample each."""
    starts = [np.random.default_rng(n).integers(0, 1000, length - 10) for n in range(prompts)]
    ids = [
        np.concatenate([starts[index % prompts], np.random.default_rng(index).integers(0, 1000, 10)])
        for index in range(count)
    ]
    return Corpus([Part(name="rows", conversations=Rows([[TokenRow(each, each, "rows.jsonl:1")] for each in ids]))])


class Rows(list):
    @property
    def lengths(self):
        return np.array([len(samples[0].input_ids) for samples in self])


def r_of_run(data, num_ranks):
    """What the collators of all ranks make of the first epoch."""
    whole, tokens, computed = data.step_collator(), 0, 0
    for index in range(data.steps_per_epoch):
        steps = [
            replace(whole, rank=rank, num_ranks=num_ranks)(data.features_of_step(index)) for rank in range(num_ranks)
        ]
        tokens += steps[0].num_tokens
        computed += sum(step.num_computed_tokens for step in steps)
    return tokens / computed


def test_rows_and_what_is_left_out():
    corpus = corpus_of(3, 1, 20)
    report = EncodeReport(num_rows=3, num_samples=3, num_tokens=60, num_labels=15)
    assert data_entries(corpus, report, 4096) == [
        ("data", "3 rows, 3 samples, 3 conversations to train on, 60 tokens, 25% with loss")
    ]
    report = EncodeReport(num_rows=3, num_long_samples=1200, longest=9001, longest_where="rows.jsonl:77")
    report.unused_columns.update({"id": 3, "source": 2})
    entries = dict(data_entries(corpus, report, 4096))
    assert entries["too long"] == "1,200 samples over max_length 4,096, the longest 9,001 (rows.jsonl:77)"
    assert entries["columns"] == "not used: id (3 rows), source (2 rows)"


@pytest.mark.parametrize("grouped", [False, 4])
def test_r_is_that_of_the_steps(monkeypatch, grouped):
    """Of all ranks together, and of one process."""
    data = SFTData("rows.jsonl", batch_size=16, max_length=450, max_tokens=470, group_by_prefix=grouped)
    data.conversations["train"] = corpus_of(96, 3)
    one, four = (f"{r_of_run(data, size):.1f}" for size in (1, 4))
    said = f"about {one} tokens per computed token in this order"
    assert sharing_entry(data) == ("r", said)
    monkeypatch.setattr(run_overview, "ranks", lambda: Ranks(0, 4))
    assert sharing_entry(data) == ("r", f"{said.replace(one, four)} on 4 devices, {one} on one") and one != four


def test_fit_prints_it_before_the_first_step(arguments, shop, tmp_path, capsys):
    file = write_rows(tmp_path / "rows.jsonl", [{**row, "id": 1} for row in rows_in(shop / "train.jsonl")])
    assert main(arguments(data__train_file=file, trainer__max_steps=1)) == 0
    printed = capsys.readouterr().out
    names = ["data", "columns", "r", "steps", "memory", "disk", "sample", "loss", "r"]
    lines = [line.split(" ")[0] for line in printed.splitlines()]
    assert [name for name in lines if name in names][: len(names)] == names
    assert "not used: id (20 rows)" in printed
    text = printed[printed.index("⟦ ⟧:") + 4 :]
    marked = text[text.index("⟦") : text.index("⟧")]
    assert "Shelf" in marked and "You name the shelf" not in marked
    assert f"{file}:1" in printed
