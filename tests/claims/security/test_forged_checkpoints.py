"""A checkpoint whose state was changed, and whose checksums are right again, ends in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from tests.support.runs import errors_in, forge

FORGED: list[tuple[tuple[Any, ...], Any]] = [
    (("record",), True),
    (("record", "logs"), [10**30]),
    (("model", "model_name_or_path"), []),
    (("model", "optimizer"), None),
    (("model",), "x"),
    (("data",), [1]),
    (("base",), "x"),
    (("position", "num_batches"), [1, "x"]),
    (("position", "num_batches"), -1),
    (("position", "num_steps"), -1),
    (("generators",), [1]),
    (("generators", 0, "torch"), "00"),
    (("generators", 0, "python"), [3, [1], None]),
    (("numbers",), {"model.x.step": 1}),
    (("numbers",), {"model.model.norm.weight.exp_avg": 1}),
]


def test_the_state_of_another_program(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To go on from, and to export; some changes mean nothing to one of the two."""
    assert main(arguments(trainer__max_epochs=1)) == 0
    for place, value in FORGED:
        checkpoint = tmp_path / "forged"
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(tmp_path / "out" / "checkpoints" / "step=5", checkpoint)
        forge(checkpoint, place, value)
        export = ["export", f"--ckpt_path={checkpoint}", f"--output_dir={tmp_path / 'model'}"]
        codes = []
        for line in (arguments(output_dir=tmp_path / "other", ckpt_path=checkpoint), export):
            capsys.readouterr()
            codes.append(main(line))
            said = capsys.readouterr().err
            assert "Traceback" not in said and len(errors_in(said)) == (codes[-1] != 0), (place, line, said)
        assert 1 in codes, place
