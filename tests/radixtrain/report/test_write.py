"""Which setting is named as the best, and what is only hinted at."""

from dataclasses import replace

import pytest

from radixtrain.report.contents import Setting
from radixtrain.report.write import best_setting, command_to_paste, hints

OWN = Setting(
    batch_size=32,
    max_tokens=1000,
    group_by_prefix=False,
    r=2.0,
    best_r=3.0,
    speedup=2.0,
    seconds_per_epoch=100.0,
    memory_bytes=50,
)
MORE = replace(OWN, max_tokens=4000, r=2.5, seconds_per_epoch=80.0, memory_bytes=90)
LESS = replace(OWN, max_tokens=500, r=1.5, seconds_per_epoch=110.0, memory_bytes=20)
LARGER = replace(OWN, batch_size=256, r=6.0, seconds_per_epoch=40.0)
GROUPED = replace(OWN, group_by_prefix=True, r=8.0, seconds_per_epoch=30.0)


def test_what_shares_most_and_leaves_the_steps_as_they_are() -> None:
    """Whatever the seconds are, which other load changes; and no more memory than that takes."""
    most = replace(MORE, max_tokens=8000, r=2.55)
    for seconds in (1.0, 100.0, 9e9):
        grid = [replace(each, seconds_per_epoch=seconds * each.r) for each in (LESS, LARGER, GROUPED, MORE, most)]
        assert best_setting(OWN, [OWN, *grid], 1000) is grid[3]


def test_memory_decides_first_and_it_is_the_users_own_if_nothing_is_clearly_better() -> None:
    for free, chosen in ((60, OWN), (30, LESS), (10, OWN)):
        assert best_setting(OWN, [LESS, OWN, MORE], free) is chosen
    assert best_setting(OWN, [LESS, OWN, replace(MORE, r=2.05)], 1000) is OWN


def test_the_command_repeats_what_was_typed() -> None:
    typed = ["--config", "my sft.yaml", "--data.max_tokens=1000"]
    command = command_to_paste(typed, OWN, MORE)
    assert command == ("python -m radixtrain fit --config 'my sft.yaml' --data.max_tokens=1000 --data.max_tokens=4000")
    assert command_to_paste(typed, OWN, OWN).endswith("'my sft.yaml' --data.max_tokens=1000")


@pytest.mark.parametrize("own_key", [["--max_seconds", "20"], ["--max_seconds=20"]])
def test_the_keys_of_report_are_left_out(own_key: list[str]) -> None:
    assert (
        command_to_paste([*own_key, "--seed_everything=1"], OWN, OWN) == "python -m radixtrain fit --seed_everything=1"
    )


def test_what_would_change_the_steps_is_a_hint_with_its_price() -> None:
    grouped, larger = hints(OWN, [OWN, LARGER, GROUPED, MORE])
    assert grouped.startswith(
        "--data.group_by_prefix=true: r = 8 in place of 2, an epoch in about 30 s in place of 1 min"
    )
    assert "less mixed" in grouped
    assert larger.startswith("--data.batch_size=256: r = 6 in place of 2") and "learning rate" in larger


@pytest.mark.parametrize("others", [[], [replace(LARGER, r=2.1), replace(GROUPED, r=2.1)], [MORE, LESS]])
def test_no_hint_where_there_is_little_to_gain(others: list[Setting]) -> None:
    assert not list(hints(OWN, [OWN, *others]))


def test_the_smallest_batch_that_brings_most_of_it() -> None:
    sizes = [replace(LARGER, batch_size=size, r=r) for size, r in ((64, 3.0), (128, 5.6), (256, 6.0))]
    (hint,) = hints(OWN, [OWN, *sizes])
    assert hint.startswith("--data.batch_size=128")


def test_hints_without_predictions() -> None:
    unknown = [replace(each, seconds_per_epoch=None) for each in (OWN, GROUPED)]
    (hint,) = hints(unknown[0], unknown)
    assert "r = 8 in place of 2." in hint


def test_that_nothing_is_gained_is_said() -> None:
    assert next(hints(replace(OWN, speedup=0.8), [])).startswith(
        "as they are, these rows gain nothing: a step takes 1.25 of the ordinary time. --dedup=false"
    )
    assert not list(hints(OWN, []))
    assert not list(hints(replace(OWN, speedup=None), []))
