"""Samples as text."""

from collections.abc import Callable, Sequence

import pytest

from radixtrain.collators.token_row import TokenRow


@pytest.fixture(scope="session")
def shown() -> Callable[[TokenRow, Callable[[Sequence[int]], str]], str]:
    """`shown(sample, decode)`: [ ] enclose what bears loss, and ¶ is the one merge of two line feeds."""

    def show(sample: TokenRow, decode: Callable[[Sequence[int]], str]) -> str:
        texts = (decode([token]).replace("\n\n", "¶") for token in sample.input_ids)
        marked = (f"[{text}]" if label != -100 else text for text, label in zip(texts, sample.labels, strict=True))
        return "".join(marked).replace("][", "")

    return show
