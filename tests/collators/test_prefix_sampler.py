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

SMALL = 8


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    """40 rows of each of 5 prompts, shuffled. The first token names the prompt."""
    generator = np.random.default_rng(0)
    prompts = [[number, *generator.integers(5, 50, 63)] for number in range(5)]
    rows = [[*map(int, prompts[index % 5]), *generator.integers(5, 50, 6).tolist()] for index in range(200)]
    return [rows[index] for index in generator.permutation(200)]


def in_batches(order, batch_size):
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def prompts_of(batches, rows):
    return [len({rows[index][0] for index in batch}) for batch in batches]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda rows: rows, id="lists"),
        pytest.param(lambda rows: [torch.tensor(row) for row in rows], id="tensors"),
        pytest.param(lambda rows: [{"input_ids": row, "labels": row} for row in rows], id="dictionaries"),
        pytest.param(lambda rows: datasets.Dataset.from_dict({"input_ids": rows}), id="datasets"),
        pytest.param(lambda rows: datasets.Dataset.from_dict({"input_ids": rows}).with_format("torch"), id="torch"),
        pytest.param(lambda rows: torch.utils.data.Subset([{"input_ids": row} for row in rows], range(200)), id="map"),
    ],
)
def test_every_kind_of_data_has_the_same_order(rows, form):
    sampler = PrefixGroupedSampler(form(rows), SMALL, seed=3)
    assert (len(sampler), sampler.together) == (200, 4)
    order = list(sampler)
    assert sorted(order) == list(range(200))
    assert order == list(PrefixGroupedSampler(rows, SMALL, together=4, seed=3))
    assert max(prompts_of(in_batches(order, SMALL), rows)) == 2


def test_a_column_of_prompts(rows):
    """Pairs of one prompt have the same tokens there; whole rows that are copies do not meet on purpose."""
    prompts = [row[:64] for row in rows]
    data = datasets.Dataset.from_dict({"prompt_ids": prompts, "chosen_ids": rows})
    sampler = PrefixGroupedSampler(data, SMALL, seed=3, column="prompt_ids")
    assert sampler.together == 4 and max(prompts_of(in_batches(list(sampler), SMALL), rows)) == 2
    assert PrefixGroupedSampler(prompts, SMALL, seed=3).together == 1


def test_each_pass_is_an_epoch(rows):
    sampler, again = (PrefixGroupedSampler(rows, SMALL, seed=3) for _ in range(2))
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again.set_epoch(2)
    assert list(again) == epochs[2]
    assert all(sorted(epoch) == list(range(200)) for epoch in epochs)
    assert list(PrefixGroupedSampler(rows, SMALL, seed=4)) != epochs[0]


def test_the_table_of_the_page():
    """docs/any-trainer.md: r and the prompts in a batch, for each number of rows that stay together."""
    page = (Path(__file__).parents[2] / "docs" / "any-trainer.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \**(\d+)\**[^|]* \| (\d+\.\d) \| (\d+\.\d\d) \|$", page, re.M)
    assert [int(together) for together, _, _ in table] == [1, 8, 16]
    generator = np.random.default_rng(0)
    starts, which = generator.integers(0, 50_000, (20, 600)), np.repeat(np.arange(20), 128)
    rows = [np.concatenate([starts[prompt], generator.integers(0, 50_000, 64)]) for prompt in which]
    for together, prompts, r in table:
        batches = np.array(list(PrefixGroupedSampler(rows, 32, int(together)))).reshape(-1, 32)
        half = 0.5 + 1e-9  # of the last digit
        assert abs(np.mean([len(set(which[batch])) for batch in batches]) - float(prompts)) <= 0.1 * half
        assert abs(ratio_of_batches(lambda index: [rows[index]], batches.tolist(), None) - float(r)) <= 0.01 * half
    assert PrefixGroupedSampler(rows, 32).together == 16


@pytest.mark.parametrize(
    ("batch_size", "together"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3), (11, 5), (13, 6), (15, 7)]
)
def test_the_choice_for_any_size(rows, batch_size, together):
    """A prime has no divisor that would do; r is then as much above that of a plain shuffle as of other sizes."""
    sampler, shuffled = PrefixGroupedSampler(rows, batch_size), PrefixGroupedSampler(rows, batch_size, 1)
    assert sampler.together == together
    r, plain = (
        ratio_of_batches(lambda index: [np.array(rows[index])], in_batches(list(each), batch_size), None)
        for each in (sampler, shuffled)
    )
    assert r > 1.2 * plain or batch_size == 1


@pytest.mark.parametrize(("together", "part"), [(1, 0.7), (3, 0.9)])
def test_batches_of_a_step(rows, together, part):
    """A step has the rows of a batch as large as it, in sorted order; its batches have fewer tokens than as drawn."""
    rows = [row[: len(row) - index % 5] for index, row in enumerate(rows[:-1])]  # the last step is not whole
    dealt, drawn = PrefixGroupedSampler(rows, 4, together, num_batches=6), PrefixGroupedSampler(rows, 24, together)
    assert dealt.together == drawn.together
    for _ in range(2):
        steps, as_drawn = (in_batches(list(sampler), 24) for sampler in (dealt, drawn))
        assert list(map(sorted, steps)) == list(map(sorted, as_drawn)) and steps[-1] == as_drawn[-1]
        prompts, before = (
            sum(sum(prompts_of(in_batches(step, 4), rows)) for step in found[:-1]) for found in (steps, as_drawn)
        )
        assert prompts < part * before
        for step in steps[:-1]:
            first_tokens = [rows[index][0] for index in step]
            assert len(list(groupby(first_tokens))) == len(set(first_tokens))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefixGroupedSampler([[1]], 0), "batch_size must be at least 1, got 0"),
        (lambda: PrefixGroupedSampler([[1]], 4, num_batches=0), "num_batches must be at least 1, got 0"),
        (lambda: PrefixGroupedSampler([[1]], 4, 9, num_batches=2), r"from 1 to batch_size x num_batches \(8\), got 9"),
        (lambda: PrefixGroupedSampler([[1]], 4, together=5), r"together must be from 1 to batch_size \(4\), got 5"),
        (lambda: PrefixGroupedSampler(iter([[1]]), 4), "a data set with a length and indices, got list_iterator"),
        (lambda: PrefixGroupedSampler([{"ids": [1]}], 4), "row 0 of the data set has no 'input_ids'; .*one of: ids"),
        (
            lambda: PrefixGroupedSampler(datasets.Dataset.from_dict({"text": ["a"]}), 4, column="text"),
            "row 0 of the data set: expected token ids in 'text', got 'a'",
        ),
    ],
)
def test_what_it_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Recorder(RadixCollator):
    """Keeps the rows of every batch."""

    def __call__(self, features):
        self.__dict__.setdefault("seen", []).append([tuple(map(int, each["input_ids"])) for each in features])
        return super().__call__(features)


def arguments(folder, **changes):
    given = {"per_device_train_batch_size": SMALL, "num_train_epochs": 2, "logging_steps": 1, "report_to": "none"}
    return {**given, "output_dir": str(folder), "save_strategy": "no", "use_cpu": True, "seed": 7, **changes}


class GroupedTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return PrefixGroupedSampler(self.train_dataset, self.args.train_batch_size, seed=self.args.seed)


def test_hugging_face_trainer(rows, tiny_qwen3, tmp_path):
    """Two epochs in the sampler's orders; a run that resumes inside the second goes on with its next batch."""
    rows = rows[:40]
    settings = TrainingArguments(**arguments(tmp_path, save_strategy="steps", save_steps=7))

    def batches(checkpoint=None):
        collator = Recorder()
        data = [{"input_ids": row, "labels": row} for row in rows]
        model = share_prefixes(tiny_qwen3())
        trainer = GroupedTrainer(model=model, args=settings, train_dataset=data, data_collator=collator)
        trainer.train(resume_from_checkpoint=checkpoint)
        return collator.seen

    sampler = PrefixGroupedSampler(rows, SMALL, seed=7)
    expected = [[tuple(rows[index]) for index in batch] for _ in range(2) for batch in in_batches(list(sampler), SMALL)]
    assert batches() == expected and len(expected) == 10
    assert batches(str(tmp_path / "checkpoint-7"))[-3:] == expected[7:]


PROMPT, OWN = 280, 30


def rng(seed=0):
    return np.random.default_rng(seed)


def chats(prompts, per_prompt, seed=0):
    """Sequences of equally frequent prompts, shuffled, and the prompt of each. Nothing else is shared."""
    generator = rng(seed)
    starts = generator.integers(0, 30_000, (prompts, PROMPT))
    which = generator.permutation(np.repeat(np.arange(prompts), per_prompt))
    own = generator.integers(0, 30_000, (len(which), OWN))
    own[:, 0] = 30_000 + np.arange(len(which))
    return [np.concatenate([starts[prompt], tail]) for prompt, tail in zip(which, own, strict=True)], which


@pytest.mark.parametrize(("batch_size", "together"), [(5, 2), (8, 8), (30, 3), (31, 16), (32, 16), (100, 7)])
def test_a_batch_has_no_more_prompts_than_it_must(batch_size, together):
    """As many runs as it has places for, and the parts of at most two in the places between."""
    sequences, which = chats(4, 7 * together, seed=together)
    groups = find_prefix_groups(sequences)
    order = GroupedOrder(groups, batch_size, together).draw(np.arange(len(sequences)), rng(1))
    counts = [len(set(which[batch].tolist())) for batch in in_batches(order, batch_size)]
    assert max(counts) <= batch_size // together + min(2, batch_size % together)


def grouped(group_of, seed=0):
    """Sequences of these groups: 96 tokens in common, 24 of their own; 0 for none."""
    generator = rng(seed)
    starts = generator.integers(0, 30_000, (max([*group_of, 0]) + 1, 96))
    tails = [30_000 + generator.integers(0, 30_000, 24 if group else 120) for group in group_of]
    return [np.concatenate([starts[g], tail]) if g else tail for g, tail in zip(group_of, tails, strict=True)]


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
    order = GroupedOrder(find_prefix_groups(rows), 8, 4).draw(np.arange(32), rng(1)).tolist()
    runs = [order[start : start + 4] for start in range(0, 32, 4)]
    assert {*range(5, 9)} in map(set, runs) and {*range(1, 5)} in map(set, runs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_index_comes_as_often_as_it_was_given(group_of, batch_size, together, data):
    count = len(group_of)
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=60)) if count else []
    order = GroupedOrder(find_prefix_groups(grouped(group_of)), batch_size, min(together, batch_size))
    found = order.draw(np.array(indices, dtype=np.int64), rng())
    assert sorted(found.tolist()) == sorted(indices)
