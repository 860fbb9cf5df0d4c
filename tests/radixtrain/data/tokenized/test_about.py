"""`about.json` knows whether it is as it was written."""

from contextlib import suppress

import pytest
from tiers import TRIES

from radixtrain.data.tokenized.about import ABOUT, read_about, write_about

CONTENT = {"digest": "ab12", "report": {"num_rows": 10, "long": [1, 2]}, "seconds": 0.1 + 0.2, "files": {"a": "x"}}


def test_it_is_read_back_and_every_flipped_bit_is_found(tmp_path):
    write_about(tmp_path, CONTENT)
    assert read_about(tmp_path) == CONTENT
    good = (tmp_path / ABOUT).read_bytes()
    for place in range(len(good)):
        for bit in (0, 5) if TRIES > 10 else (place % 8,):
            (tmp_path / ABOUT).write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            with suppress(ValueError):
                assert read_about(tmp_path) == CONTENT, f"byte {place}: another content passed"


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", '"x"', "[" * 100_000, "\xff", "{}", '{"checksum": 1}'])
def test_other_content(tmp_path, text):
    (tmp_path / ABOUT).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"about\.json is not as it was written"):
        read_about(tmp_path)
