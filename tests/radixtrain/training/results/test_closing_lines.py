"""How the lines look that commands end with; what they say is tested with the summary."""

from typing import Any

from radixtrain.training.results.closing_lines import say, say_all


def test_a_name_that_is_too_long_widens_the_column(capsys: Any) -> None:
    say_all({"loss": "2.0", "eval_exact_match": "0.5", "advice": "", "r": "1"})
    assert capsys.readouterr().out.splitlines() == [
        "loss             2.0",
        "eval_exact_match 0.5",
        "r                1",
    ]


def test_short_names_have_the_column_of_single_lines(capsys: Any) -> None:
    say_all({"loss": "2.0"})
    say("loss", "2.0")
    assert capsys.readouterr().out == "loss         2.0\n" * 2


def test_nothing_to_say(capsys: Any) -> None:
    say_all({"advice": ""})
    assert capsys.readouterr().out == ""
