"""A model's config.json."""

from pathlib import Path

import pytest

from radixtrain.errors import UserError
from radixtrain.hf.config import read_config


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none: cannot read the model's config\.json: "):
        read_config(str(tmp_path / "none"))


def test_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: expected a JSON object, line 1 column 2"):
        read_config(str(tmp_path))
