"""The table of answers: a CSV file that is whole, and what wandb receives."""

import csv

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from radixtrain.training.answers.answer_table import MOST_ROWS_LOGGED, Judged, log_table, write_table

ROWS = [
    Judged("a:1", 'Where\nis "it"?', "Shelf, one;\r\n", "Shelf one.", 0.5, "stop"),
    Judged("a:2", "", "ö", "", 1, "length"),
]


def test_it_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "answers" / "step=5.csv"
    write_table(path, [])
    write_table(path, ROWS)
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["row", "prompt", "answer", "target", "score", "finish_reason"]
    assert rows == [[str(value) for value in row] for row in ROWS]
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_finished_is_not_replaced(tmp_path):
    path = tmp_path / "step=5.csv"
    write_table(path, ROWS)
    before = path.read_bytes()
    with pytest.raises(UnicodeEncodeError):
        write_table(path, [Judged("a:1", "\ud800", "", "", 0, "stop")])
    assert path.read_bytes() == before


def test_only_wandb_receives_it(tmp_path, monkeypatch):
    received = []
    monkeypatch.setattr(
        WandbLogger, "log_table", lambda self, key, columns, data: received.append((key, columns, data))
    )
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    log_table([CSVLogger(tmp_path), logger], "answers", ROWS * MOST_ROWS_LOGGED)
    [(key, columns, data)] = received
    assert key == "answers" and columns == list(Judged._fields) and len(data) == MOST_ROWS_LOGGED
    assert data[1] == list(ROWS[1])
