"""The order of the sampler, by itself and in Hugging Face's Trainer, and what it refuses."""

import re
from itertools import groupby
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Trainer, TrainingArguments

from radixtrain import PrefixGroupedSampler, RadixCollator, share_prefixes
from radixtrain.collators.prefix_sampler import GroupedOrder, ratio_of_batches
from radixtrain.tree.groups import find_prefix_groups
from tests.support.models import tiny_qwen3

SMALL = 8


def rng(seed=0):
    return np.random.default_rng(seed)


def grouped(group_of, common=96, own=24):
    """Sequences of these groups, with tokens in common and of their own; those of group 0 share nothing."""
    generator = rng()
    starts = generator.integers(0, 30_000, (max([*group_of, 0]) + 1, common))
    tails = [30_000 + generator.integers(0, 30_000, own if group else common + own) for group in group_of]
    return [np.concatenate([starts[g], tail]) if g else tail for g, tail in zip(group_of, tails, strict=True)]


WHICH = rng().permutation(np.repeat(np.arange(1, 6), 40))  # 40 rows of each of 5 prompts, shuffled
ROWS = [row.tolist() for row in grouped(WHICH, 64, 6)]


def in_batches(order, batch_size):
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def prompts_of(order, batch_size, which=WHICH):
    """How many prompts each batch has."""
    return [len(set(which[batch])) for batch in in_batches(list(order), batch_size)]


FORMS = {
    "lists": lambda rows: rows,
    "tensors": lambda rows: [torch.tensor(row) for row in rows],
    "dictionaries": lambda rows: [{"input_ids": row, "labels": row} for row in rows],
    "datasets": lambda rows: datasets.Dataset.from_dict({"input_ids": rows}),
    "torch": lambda rows: datasets.Dataset.from_dict({"input_ids": rows}).with_format("torch"),
    "map": lambda rows: torch.utils.data.Subset([{"input_ids": row} for row in rows], range(200)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_data_has_the_same_order(form):
    sampler = PrefixGroupedSampler(FORMS[form](ROWS), SMALL, seed=3)
    assert (len(sampler), sampler.together) == (200, 4)
    order = list(sampler)
    assert sorted(order) == list(range(200))
    assert order == list(PrefixGroupedSampler(ROWS, SMALL, together=4, seed=3))
    assert max(prompts_of(order, SMALL)) == 2


def test_a_column_of_prompts():
    """Pairs of one prompt have the same tokens there; whole rows that are copies do not meet on purpose."""
    prompts = [row[:64] for row in ROWS]
    data = datasets.Dataset.from_dict({"prompt_ids": prompts, "chosen_ids": ROWS})
    sampler = PrefixGroupedSampler(data, SMALL, seed=3, column="prompt_ids")
    assert sampler.together == 4 and max(prompts_of(sampler, SMALL)) == 2
    assert PrefixGroupedSampler(prompts, SMALL, seed=3).together == 1


def test_each_pass_is_an_epoch():
    sampler, again = (PrefixGroupedSampler(ROWS, SMALL, seed=3) for _ in range(2))
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again.set_epoch(2)
    assert list(again) == epochs[2]
    assert list(PrefixGroupedSampler(ROWS, SMALL, seed=4)) != epochs[0]


def r_of(batches, rows):
    return ratio_of_batches(lambda index: [np.array(rows[index])], batches, None)


def test_the_table_of_the_page():
    """docs/any-trainer.md: r and the prompts in a batch, for each number of rows that stay together."""
    page = (Path(__file__).parents[2] / "docs" / "any-trainer.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \**(\d+)\**[^|]* \| (\d+\.\d) \| (\d+\.\d\d) \|$", page, re.M)
    assert [int(together) for together, _, _ in table] == [1, 8, 16]
    which = np.repeat(np.arange(1, 21), 128)
    rows = grouped(which, 600, 64)
    for together, prompts, r in table:
        order = list(PrefixGroupedSampler(rows, 32, int(together)))
        half = 0.5 + 1e-9  # of the last digit
        assert abs(np.mean(prompts_of(order, 32, which)) - float(prompts)) <= 0.1 * half
        assert abs(r_of(in_batches(order, 32), rows) - float(r)) <= 0.01 * half
    assert PrefixGroupedSampler(rows, 32).together == 16


@pytest.mark.parametrize(
    ("batch_size", "together"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3), (11, 5), (13, 6), (15, 7)]
)
def test_the_choice_for_any_size(batch_size, together):
    """A prime has no divisor that would do; r is then as much above that of a plain shuffle as of other sizes."""
    sampler = PrefixGroupedSampler(ROWS, batch_size)
    assert sampler.together == together
    r, plain = (
        r_of(in_batches(list(each), batch_size), ROWS) for each in (sampler, PrefixGroupedSampler(ROWS, batch_size, 1))
    )
    assert r > 1.2 * plain or batch_size == 1


@pytest.mark.parametrize(("together", "part"), [(1, 0.7), (3, 0.9)])
def test_batches_of_a_step(together, part):
    """A step has the rows of a batch as large as it, in sorted order; its batches have fewer tokens than as drawn."""
    rows = [row[: len(row) - index % 5] for index, row in enumerate(ROWS[:-1])]  # the last step is not whole
    dealt, drawn = PrefixGroupedSampler(rows, 4, together, num_batches=6), PrefixGroupedSampler(rows, 24, together)
    assert dealt.together == drawn.together
    for _ in range(2):
        steps, as_drawn = (in_batches(list(sampler), 24) for sampler in (dealt, drawn))
        assert list(map(sorted, steps)) == list(map(sorted, as_drawn)) and steps[-1] == as_drawn[-1]
        prompts, before = (sum(sum(prompts_of(step, 4)) for step in found[:-1]) for found in (steps, as_drawn))
        assert prompts < part * before
        for step in steps[:-1]:
            assert len(list(groupby(WHICH[step]))) == len(set(WHICH[step]))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([[1]], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ([[1]], {"num_batches": 0}, "num_batches must be at least 1, got 0"),
        ([[1]], {"together": 9, "num_batches": 2}, r"from 1 to batch_size x num_batches \(8\), got 9"),
        ([[1]], {"together": 5}, r"together must be from 1 to batch_size \(4\), got 5"),
        (iter([[1]]), {}, "a data set with a length and indices, got list_iterator"),
        ([{"ids": [1]}], {}, "row 0 of the data set has no 'input_ids'; .*one of: ids"),
        ([{"text": "a"}], {"column": "text"}, "row 0 of the data set: expected token ids in 'text', got 'a'"),
    ],
)
def test_what_it_refuses(data, options, message):
    with pytest.raises(ValueError, match=message):
        PrefixGroupedSampler(data, **{"batch_size": 4, **options})


class Recorder(RadixCollator):
    """Keeps the rows of every batch."""

    def __call__(self, features):
        self.__dict__.setdefault("seen", []).append([list(each["input_ids"]) for each in features])
        return super().__call__(features)


class GroupedTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return PrefixGroupedSampler(self.train_dataset, self.args.train_batch_size, seed=self.args.seed)


def test_hugging_face_trainer(tmp_path):
    """Two epochs in the sampler's orders; a run that resumes inside the second goes on with its next batch."""
    rows = [[token % 50 for token in row] for row in ROWS[:40]]
    data = [{"input_ids": row, "labels": row} for row in rows]
    saves = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 7, "report_to": "none"}
    settings = TrainingArguments(per_device_train_batch_size=SMALL, num_train_epochs=2, use_cpu=True, seed=7, **saves)

    def batches(checkpoint=None):
        collator = Recorder()
        model = share_prefixes(tiny_qwen3())
        trainer = GroupedTrainer(model=model, args=settings, train_dataset=data, data_collator=collator)
        trainer.train(resume_from_checkpoint=checkpoint)
        return collator.seen

    sampler = PrefixGroupedSampler(rows, SMALL, seed=7)
    expected = [[rows[index] for index in batch] for _ in range(2) for batch in in_batches(list(sampler), SMALL)]
    assert batches() == expected and len(expected) == 10
    assert batches(str(tmp_path / "checkpoint-7"))[-3:] == expected[7:]


@pytest.mark.parametrize(("batch_size", "together"), [(5, 2), (8, 8), (30, 3), (31, 16), (32, 16), (100, 7)])
def test_a_batch_has_no_more_prompts_than_it_must(batch_size, together):
    """As many runs as it has places for, and the parts of at most two in the places between."""
    which = rng(together).permutation(np.repeat(np.arange(1, 5), 7 * together))
    groups = find_prefix_groups(grouped(which))
    order = GroupedOrder(groups, batch_size, together).draw(np.arange(len(which)), rng(1))
    assert max(prompts_of(order, batch_size, which)) <= batch_size // together + min(2, batch_size % together)


def test_every_row_is_as_likely_in_every_batch():
    """Rows of a large group, of a small one, and of none; chi-square with 14 degrees of freedom: 1 in 10,000 is 42."""
    order = GroupedOrder(find_prefix_groups(grouped([1] * 40 + [2] * 5 + [0] * 15)), 4, 2)
    places = np.stack([np.argsort(order.draw(np.arange(60), rng(seed))) // 4 for seed in range(3000)])
    for row in (0, 39, 40, 44, 45, 59):
        counts = np.bincount(places[:, row], minlength=15)
        assert ((counts - 200) ** 2 / 200).sum() < 42


def test_an_agents_turns_meet_by_depth():
    """Of 9 turns, 4 together: the deepest four, the four above, and the first by itself."""
    history = rng().integers(0, 30_000, 9 * 96)
    turns = [np.append(history[: 96 * turn], rng(turn).integers(0, 30_000, 16)) for turn in range(1, 10)]
    rows = [*turns, *grouped([0] * 23)]
    runs = in_batches(GroupedOrder(find_prefix_groups(rows), 8, 4).draw(np.arange(32), rng(1)).tolist(), 4)
    assert {*range(5, 9)} in map(set, runs) and {*range(1, 5)} in map(set, runs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_index_comes_as_often_as_it_was_given(group_of, batch_size, together, data):
    count = len(group_of)
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=60)) if count else []
    order = GroupedOrder(find_prefix_groups(grouped(group_of)), batch_size, min(together, batch_size))
    found = order.draw(np.array(indices, dtype=np.int64), rng())
    assert sorted(found.tolist()) == sorted(indices)
