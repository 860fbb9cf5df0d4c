"""Table 7 with RoPE alive: the patterns, the differences, and that the flaw of the published proof would be seen."""

from collections.abc import Iterator
from typing import Any

import pytest
import table7
from tiers import FULL

from radixtrain.verification.oracle import float64_throughout

BAR = 1e-12  # relative L2 of each gradient tensor; the page itself computes in float32, as the paper does


@pytest.fixture
def model() -> Iterator[Any]:
    """In float64."""
    model = table7.build_model()
    with float64_throughout(model):
        yield model


def test_the_patterns_are_the_papers_by_name_and_size():
    sizes = {name: sum(map(len, sequences)) for name, sequences in table7.PATTERNS.items()}
    assert sizes == {
        "single_sequence": 5,
        "identical_sequences": 10,
        "shared_prefix": 10,
        "no_sharing": 6,
        "mixed_lengths": 10,
        "complex_sharing": 20,
    }
    assert table7.PUBLISHED.keys() == sizes.keys()


@FULL
@pytest.mark.parametrize("attention", table7.STRATEGIES)
@pytest.mark.parametrize("loss", table7.LOSSES)
def test_every_gradient_is_the_ordinary_ones(model, loss, attention):
    for sequences in table7.PATTERNS.values():
        ordinary = table7.ordinary_pass(model, sequences, loss)
        found = table7.compare(table7.radix_pass(model, sequences, loss, attention), ordinary)
        assert found.relative <= BAR, found
        assert found.largest_gradient > 0.1
        assert found.logits[0] <= BAR * ordinary.logits.abs().max()


@FULL
def test_the_flaw_of_the_published_proof_is_seen(model):
    """Cosines and sines as integers: the queries vanish, and with them the gradients of q and k."""
    sequences = table7.PATTERNS["complex_sharing"]
    with table7.integer_rope():
        for _, after in table7.rotated_queries(model, sequences):
            assert after.abs().max() == 0
        shares = table7.projection_shares(table7.ordinary_pass(model, sequences, "logits.sum()"))
        with pytest.raises(RuntimeError, match="RoPE is dead in layer 0"):
            table7.check_alive(model, sequences)
    assert max(shares.values()) < 1e-6
    table7.check_alive(model, sequences)  # and it is gone again


@FULL
def test_what_it_prints(capsys):
    """In float32, as a user runs it."""
    model = table7.build_model()
    table7.print_header()
    table7.print_alive(model)
    table7.print_table(model, "logits.sum()")
    table7.print_flaw(model)
    printed = capsys.readouterr().out
    assert printed.count("| complex_sharing, 20 |") == 1 + len(table7.STRATEGIES)
    assert "| published | 4.8e-7, 9.0e-8 | 1.9e-5, 3.9e-7 |" in printed
    assert max(map(len, printed.splitlines()[1:])) <= 120
