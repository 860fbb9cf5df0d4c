"""The screen before the first step, on rows whose numbers are known."""

import json
from dataclasses import replace

import numpy as np
import pytest

from radixtrain.__main__ import main
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.datamodule import SFTData
from radixtrain.data.sample import EncodeReport
from radixtrain.data.tokens.store import Corpus, Part
from radixtrain.distributed import Ranks
from radixtrain.training.module import RadixModule
from radixtrain.training.start import run_overview
from radixtrain.training.start.run_overview import (
    data_entries,
    sharing_entries,
    unused_keys,
)


class Rows:
    """Conversations of one sample each, made when they are read."""

    def __init__(self, count, prompts, length=450):
        self.count, self.length = count, length
        self.prompts = [np.random.default_rng(n).integers(0, 1000, length - 10) for n in range(prompts)]
        self.lengths = np.full(count, length)
        self.num_read = 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.num_read += 1
        ids = np.concatenate(
            [self.prompts[index % len(self.prompts)], np.random.default_rng(index).integers(0, 1000, 10)]
        )
        return [TokenRow(ids, ids, f"rows.jsonl:{index + 1}")]


def data_of(rows, **settings):
    data = SFTData("rows.jsonl", **settings)
    data.conversations["train"] = Corpus([Part(name="rows", conversations=rows)])
    return data


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


def test_rows_and_lengths():
    report = EncodeReport(num_rows=3, num_samples=3, num_tokens=60, num_labels=15)
    entries = dict(data_entries(Corpus([Part(name="x", conversations=Rows(3, 1, 20))]), report, 4096, []))
    assert entries == {
        "data": "3 rows, 3 samples, 3 conversations to train on, 60 tokens, 25% with loss",
        "lengths": "min 20, 10 % 20, 50 % 20, 90 % 20, 99 % 20, max 20 tokens",
    }


def test_what_is_left_out_is_named():
    report = EncodeReport(num_rows=3, num_long_samples=1200, longest=9001, longest_where="rows.jsonl:77")
    report.unused_columns.update({"id": 3, "source": 2})
    corpus = Corpus([Part(name="x", conversations=Rows(3, 1, 20))])
    entries = dict(data_entries(corpus, report, 4096, ["model.lora_r (why)", "data.val_size (why)"]))
    assert entries["too long"] == "1,200 samples over max_length 4,096, the longest 9,001 (rows.jsonl:77)"
    assert entries["columns"] == "not used: id (3 rows), source (2 rows)"
    assert entries["keys"] == "not used: model.lora_r (why); data.val_size (why)"


class TestSharing:
    def test_twenty_shuffled_prompts(self):
        """The order of the run, and what another one would bring."""
        entries = dict(sharing_entries(data_of(Rows(2000, 20), max_tokens=16384)))
        assert entries["prompts"] == "20 shared by several conversations"
        assert 1.5 < float(entries["r"].split()[1]) < 2.5
        assert "data.group_by_prefix: true would give about" in entries["advice"]

    def test_one_prompt(self):
        entries = dict(sharing_entries(data_of(Rows(100, 1))))
        assert entries["prompts"].endswith("432 tokens or more are common to all") and "advice" not in entries
        assert 15 < float(entries["r"].split()[1]) < 32

    @pytest.mark.parametrize("grouped", [False, 4])
    def test_several_ranks(self, monkeypatch, grouped):
        """The number of all ranks together that the collators of the run reach, and that of one process."""
        data = data_of(Rows(96, 3), batch_size=16, max_length=2048, max_tokens=2048, group_by_prefix=grouped)
        alone = dict(sharing_entries(data))
        monkeypatch.setattr(run_overview, "ranks", lambda: Ranks(0, 4))
        shown, found = dict(sharing_entries(data))["r"], r_of_run(data, 4)
        assert (
            shown
            == f"about {found:.1f} tokens per computed token in this order on 4 devices, {r_of_run(data, 1):.1f} on one"
        )
        assert alone["r"].split()[1] == f"{r_of_run(data, 1):.1f}" != f"{found:.1f}"

    def test_the_advice_is_for_these_ranks(self, monkeypatch):
        """A step of 4 conversations holds a prompt twice at best, and each rank has one of them."""
        data = data_of(Rows(400, 200), batch_size=4)
        assert "advice" in dict(sharing_entries(data))
        monkeypatch.setattr(run_overview, "ranks", lambda: Ranks(0, 4))
        assert "advice" not in dict(sharing_entries(data))

    def test_the_order_of_the_file_and_the_ordinary_arm_get_no_advice(self):
        assert "advice" not in dict(sharing_entries(data_of(Rows(400, 20), shuffle_dataset=False)))
        assert dict(sharing_entries(data_of(Rows(40, 2), dedup=False)))["r"].startswith("1 or less")

    def test_many_rows_are_sampled(self, monkeypatch):
        """Each a few times, for the order of the run and for those that would share more."""
        monkeypatch.setattr(run_overview, "MOST_CONVERSATIONS", 500)
        rows = Rows(200_000, 20)
        entries = dict(sharing_entries(data_of(rows)))
        assert entries["prompts"].endswith("(in 500 of 200,000 conversations)")
        assert "advice" in entries and rows.num_read <= 10 * 500


def test_fit_prints_it_before_the_first_step(arguments, shop, tmp_path, capsys):
    rows = [{**json.loads(line), "id": 1} for line in (shop / "train.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"data__train_file": tmp_path / "rows.jsonl", "model__lora_r": 8, "trainer__max_steps": 1}
    flags["model__use_peft"] = False  # or it would be an error
    assert main(arguments(**flags)) == 0
    printed = capsys.readouterr().out
    names = ["data", "lengths", "columns", "keys", "prompts", "r", "steps", "memory", "disk", "sample", "loss", "r"]
    lines = [line.split(" ")[0] for line in printed.splitlines()]
    assert [name for name in lines if name in names][: len(names)] == names
    assert "not used: id (20 rows)" in printed and "not used: model.lora_r (only with use_peft: true)" in printed
    text = printed[printed.index("⟦ ⟧:") + 4 :]
    marked = text[text.index("⟦") : text.index("⟧")]
    assert "Shelf" in marked and "You name the shelf" not in marked
    assert f"{tmp_path / 'rows.jsonl'}:1" in printed


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TEXT = {"text": "a"}


@pytest.fixture
def unused(tmp_path):
    def run(row=CHAT, model=None, trainer=None, **data):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        rows = SFTData(str(tmp_path / "rows.jsonl"), **data)
        return unused_keys(RadixModule("m", **(model or {})), rows, trainer or {})

    return run


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"lora_r": 8}, ["model.lora_r (only with use_peft: true)"]),
        ({"lora_r": 8, "use_peft": True}, []),
        ({"use_dora": True}, ["model.use_dora (only with use_peft: true)"]),
        ({"bnb_4bit_quant_type": "fp4"}, ["model.bnb_4bit_quant_type (only with load_in_4bit: true)"]),
        ({"bnb_4bit_quant_type": "fp4", "use_peft": True, "load_in_4bit": True}, []),
        ({"attn_implementation": "flash_attention_2"}, ["model.attn_implementation (only with dedup: false)"]),
        ({"attn_implementation": "eager"}, []),  # decides how soft-caps and sinks are computed
        ({"attention": "path", "dedup": False}, ["model.attention (not with dedup: false)"]),
        ({"next_tokens": ["yes"], "scores": "next_token_probs"}, ["model.scores (only for predict)"]),
        ({"warmup_steps": 10, "lr_scheduler_type": "constant"}, ["model.warmup_steps (the schedule constant has"]),
        ({"warmup_steps": 10}, []),
    ],
)
def test_keys_of_the_model(unused, model, named):
    found = unused(model=model)
    assert len(found) >= len(named) and all(a.startswith(b) for a, b in zip(found, named, strict=False))
    assert bool(found) == bool(named)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"val_size": 0.1, "validation_file": "v.jsonl"}, "data.val_size (beside validation_file)"),
        ({"max_length": None, "excess_length_strategy": "drop"}, "data.excess_length_strategy (only with max_length)"),
        ({"dedup": False, "pad_to_multiple_of": 8}, "data.pad_to_multiple_of (not with dedup: false)"),
        ({"test_file": "t.jsonl"}, "data.test_file (only for test and predict)"),
        (
            {"trainer": {"val_check_interval": 10, "limit_val_batches": None}},
            "trainer.val_check_interval (there are no",
        ),
        ({"trainer": {"val_check_interval": 10}, "val_size": 1}, ""),
    ],
)
def test_keys_of_data_and_trainer(unused, data, named):
    assert [text.startswith(named) for text in unused(**data)] == [True] * bool(named)


def test_the_chat_template_of_rows_that_are_no_chats(unused):
    for row, is_chat in (
        (CHAT, True),
        (TEXT, False),
        ({"prompt": "a", "completion": "b"}, False),
        ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, True),
        ({"input_ids": [1, 2]}, False),
        ({"nothing": 1}, True),  # an error elsewhere
    ):
        expected = [] if is_chat else ["data.chat_template_kwargs (the rows are not chats)"]
        assert unused(row, chat_template_kwargs={"enable_thinking": False}) == expected
