"""A model of `share_prefixes` generates as before: the hooks do not engage.

While it generates, its calls are the ordinary ones bit for bit, so tokens and scores are compared with `torch.equal`.
Between training steps: tests/claims/trainers/test_rollouts.py.
"""

from typing import Any

import pytest

from tests.support import cases
from tests.support.models import tiny_qwen3
from tests.support.steps import assert_generates_the_same

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "without a cache": {"use_cache": False},
    "beams without a cache": {"num_beams": 2, "use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "chunks of the prompt": {"prefill_chunk_size": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", cases(WAYS, ["greedy", "sampled", "beams without a cache"]))
def test_ways_to_generate(way: str) -> None:
    """In training mode too, in which some trainers sample."""
    for training in (True, False):
        assert_generates_the_same(tiny_qwen3().train(training), **WAYS[way])
