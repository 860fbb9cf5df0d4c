"""Files of a split: several sources with weights, validation rows, resumed runs, several ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.data import step_data
from radixtrain.data.datamodule import SFTData
from radixtrain.data.sample import EncodeReport
from radixtrain.data.step_data import read_together
from radixtrain.data.tokens.store import Corpus, Part
from radixtrain.errors import EndedElsewhere, UserError
from tests.support.batches import MARKED, byte_tokenizer
from tests.support.processes import on_ranks
from tests.support.runs import write_rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer(MARKED).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 300}), encoding="utf-8")
    return folder


@pytest.fixture
def data(model_folder: Path, tmp_path: Path) -> Callable[..., SFTData]:
    def build(train_file: Any, **settings: Any) -> SFTData:
        sizes = {"batch_size": 4, "dataloader_num_workers": 0, "cache_dir": str(tmp_path / "cache")}
        module = SFTData(train_file, model_name_or_path=str(model_folder), **{**sizes, **settings})
        module.setup("fit")
        return module

    return build


def write(path: Path, letters: str, answer: str = "yes") -> str:
    return str(write_rows(path, [{"prompt": letter * 3, "completion": answer} for letter in letters]))


def letters_of(data: SFTData, split: str = "train") -> str:
    return "".join(chr(samples[0].input_ids[0]) for samples in data.conversations[split])


LOG = ("one", "one two", "one two three", "one retry", "alone", "alone")
"""Questions of the rows of an agent's log: a row for each request holds all earlier ones; one was tried twice."""
TRAINED = [
    # train_on, split_turns; line of the file, and samples that it gives. Equal rows stay, as often as they occur
    ("every_turn", True, [(1, 1), (2, 2), (3, 3), (4, 2), (5, 1), (6, 1)]),
    ("distinct_turns", True, [(3, 3), (4, 1), (5, 1), (6, 1)]),
    ("last_turn", True, [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]),
    ("distinct_turns", False, [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]),
]


@pytest.mark.parametrize(("train_on", "split_turns", "trained"), TRAINED)
def test_turns_of_nested_rows(
    data: Callable[..., SFTData],
    train_on: str,
    split_turns: bool,
    trained: list[tuple[int, int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    roles = ("user", "assistant")
    chats = [[{"role": role, "content": q} for q in questions.split() for role in roles] for questions in LOG]
    log = write_rows(tmp_path / "log.jsonl", [{"messages": chat} for chat in chats])
    corpus = data(str(log), train_on=train_on, split_turns=split_turns).conversations["train"]
    assert [(int(row[0].where.split(":")[1]), len(row)) for row in corpus] == trained
    assert corpus.lengths.tolist() == [len(sample.input_ids) for row in corpus for sample in row]
    everything = data(str(log), train_on="every_turn", split_turns=split_turns).conversations["train"]
    if train_on == "distinct_turns" and split_turns:
        assert corpus.digest != everything.digest and turns_of(corpus) == turns_of(everything)
    assert (f"(data.train_on: {train_on})" in caplog.text) == (split_turns and train_on != "every_turn")
    with pytest.raises(UserError, match="train_on: last_turn needs split_turns: true"):
        data(str(log), train_on="last_turn", split_turns=False)


def turns_of(corpus: Corpus) -> set[bytes]:
    return {sample.input_ids.tobytes() + sample.labels.tobytes() for row in corpus for sample in row}


def test_system_prompt(data: Callable[..., SFTData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    own = [{"role": "system", "content": "Own."}, *turns]
    rows = [{"messages": turns}, {"messages": own}, {"prompt": turns[:1], "completion": turns[1:]}]
    write_rows(Path("a.jsonl"), rows)
    module = data("a.jsonl", system_prompt="Be brief.")
    texts = [module.tokenizer().decode(sample.input_ids) for [sample] in module.conversations["train"]]
    found = [text.partition("system\n")[2].partition("<")[0] for text in texts]
    assert found == ["Be brief.", "Own.", "Be brief."]
    with pytest.raises(UserError, match=r"b\.jsonl:1: system_prompt: only chats have a system turn, and this"):
        data(write(Path("b.jsonl"), "x"), system_prompt="x")


def test_sources_in_a_list_with_weights(data: Callable[..., SFTData], tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "abcdef"), write(tmp_path / "b.jsonl", "xy")
    heavy = {"path": b, "weight": 2, "name": "extra"}
    module = data([a, heavy], validation_file=[heavy])
    assert sum(len(step.where) for step in module.val_dataloader()) == 2, "weights are of training only"
    assert letters_of(module) == "abcdefxy"
    assert [part.name for part in module.conversations["train"].parts] == [a, "extra"]
    assert module.reports["train"].num_rows == 8
    assert module.steps_per_epoch == 3  # 6 + 2 x 2 conversations in steps of 4
    counts = dict.fromkeys([f"{a}:{n}" for n in range(1, 7)], 1) | dict.fromkeys([f"{b}:{n}" for n in (1, 2)], 2)
    seen = [where for step in module.train_dataloader() for where in step.where]
    assert {where: seen.count(where) for where in seen} == counts
    with pytest.raises(UserError, match=r"data\.train_file: with these weights no conversation is left"):
        data([{"path": b, "weight": 0.125}])


def test_validation_rows_are_taken_out_by_the_seed(data: Callable[..., SFTData], tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "abcdefghij")
    module = data(path, val_size=0.3)
    train, validation = letters_of(module), letters_of(module, "validation")
    assert sorted(train + validation) == list("abcdefghij") and len(validation) == 3
    assert train == "".join(sorted(train)) and validation == "".join(sorted(validation))
    again, other = data(path, val_size=3), data(path, val_size=3, seed=5)
    assert letters_of(again, "validation") == validation != letters_of(other, "validation")
    with pytest.raises(UserError, match=r"data\.val_size 10 takes 10 of 10 conversations, which leaves one side empty"):
        data(path, val_size=10)


def test_a_resumed_run_needs_the_same_samples(data: Callable[..., SFTData], tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "abcdef")
    state = data(path).state_dict()
    data(path).load_state_dict(state)
    for answer, settings, said in (
        ("yes", {"batch_size": 3}, "belongs to other steps or rows: batch_size was 4 and is 3; give the files and"),
        ("yes", {"group_by_prefix": 2}, "group_by_prefix was false and is 2"),
        ("yes", {"completion_only_loss": False}, r"other steps or rows: digest was \w+ and is \w+"),
        ("no!", {}, "digest was"),  # as many tokens
    ):
        write(tmp_path / "a.jsonl", "abcdef", answer)
        with pytest.raises(UserError, match=said):
            data(path, **settings).load_state_dict(state)


def test_the_ranks_share_the_steps_of_one(data: Callable[..., SFTData], tmp_path: Path) -> None:
    """Of training, of validation and of `predict`: every rank draws the same, and collates a part."""
    path = write(tmp_path / "a.jsonl", "abcdefghijk")
    settings = {"val_size": 3, "predict_file": path, "group_by_prefix": 2}

    def steps(_: int = 0) -> list[tuple[Any, ...]]:
        module = data(path, **settings)
        module.setup("predict")
        loaders = (module.train_dataloader(), module.val_dataloader(), module.predict_dataloader())
        return [
            (step.where, step.num_labels, step.num_unique_tokens, len(step.micro_batches), step.members)
            for loader in loaders
            for step in loader
        ]

    alone = steps()
    shares = on_ranks(2, steps)
    for one, first, second in zip(alone, *shares, strict=True):
        assert first[:3] == second[:3] == one[:3]
        assert first[3] == second[3]
        seen = [index for members in (*first[4], *second[4]) for index in members]
        assert sorted(seen) == list(range(len(one[0])))
    assert [step[4] for step in shares[0]] != [step[4] for step in alone]
    assert on_ranks(2, lambda _: data(path).step_collator().num_ranks) == [1, 1], "verify collates whole steps"


def corpus_of(digest: str) -> tuple[Corpus, EncodeReport]:
    return Corpus([Part(name="rows", conversations=[], digest=digest)]), EncodeReport()


def on_machines(names: str, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns on ranks, each on the machine that its letter names."""

    def run(rank: int) -> Any:
        step_data.socket.gethostname = lambda: names[rank]
        return work(rank)

    return on_ranks(len(names), run)


def test_the_first_rank_of_each_machine_reads_before_the_others(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        def read() -> tuple[Corpus, EncodeReport]:
            with (tmp_path / "order").open("a") as file:
                file.write(f"{rank} ")
            return corpus_of("a")

        read_together(read, "data.train_file")

    on_machines("aabb", work)
    readers = [int(rank) for rank in (tmp_path / "order").read_text().split()]
    assert readers[:2] == [0, 2] and sorted(readers) == [0, 1, 2, 3]


def test_an_error_is_told_once_and_other_rows_on_a_rank_end_the_run() -> None:
    def read(rank: int, digest: str) -> tuple[Corpus, EncodeReport]:
        if not digest:
            raise UserError("rows.jsonl:1: no answer")
        return corpus_of(digest)

    def raised_by(digests: str) -> list[tuple[type, str]]:
        def work(rank: int) -> tuple[type, str]:
            with pytest.raises((UserError, EndedElsewhere)) as raised:
                read_together(lambda: read(rank, digests[rank : rank + 1]), "data.train_file")
            return raised.type, str(raised.value)

        return on_machines("xy", work)

    differ = "the files differ; give every rank the same ones"
    said = f"data.train_file: rank 1 on y reads other rows than rank 0 on x: {differ}"
    for digests, error in (("ab", said), ("", "rows.jsonl:1: no answer")):
        first, second = raised_by(digests)
        assert first == (UserError, error) and second[0] is EndedElsewhere
