"""A report with everything in it, and sequences of one prompt."""

from typing import Any

import numpy as np
import pytest

from radixtrain.report.contents import Break, DataReport, Example, Setting, Splitting, TreeNode

HOSTILE = """</script><img src=x onerror="document.title='run'"><b>%{y} $x$ <a href="https://example.com">a</a> &lt;"""


@pytest.fixture
def features() -> list[dict[str, Any]]:
    """One prompt of 30 tokens, answers of 3 to 8 that differ from their first token on."""
    rng = np.random.default_rng(0)
    prompt, found = rng.integers(0, 50, 30), []
    for first, length in enumerate(rng.integers(3, 9, 16)):
        ids = np.concatenate([prompt, [first], rng.integers(0, 50, length - 1)])
        found.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < 30, -100, ids)})
    return found


def setting(batch_size: int, max_tokens: int, grouped: bool = False) -> Setting:
    r = batch_size / 4 * (2 if grouped else 1)
    numbers = {"r": r, "best_r": r + 1, "speedup": r / 2, "seconds_per_epoch": 6000 / r}
    return Setting(
        batch_size=batch_size,
        max_tokens=max_tokens,
        group_by_prefix=grouped,
        memory_bytes=max_tokens * 2**18,
        **numbers,
    )


def tree() -> TreeNode:
    """Two prompts under an empty root: 6 of 8 sequences on the first, whose two questions have answers of their own."""
    answers = (
        TreeNode(text="lost card", num_tokens=2, num_sequences=1),
        TreeNode(text="fee", num_tokens=1, num_sequences=1),
    )
    hidden = {"num_hidden_children": 2, "num_hidden_sequences": 2, "num_hidden_tokens": 9}
    asked = TreeNode(text="Where is my card?", num_tokens=5, num_sequences=4, children=answers, **hidden)
    first = TreeNode(text="You route messages.", num_tokens=40, num_sequences=6, children=(asked,))
    second = TreeNode(text=f"Translate. {HOSTILE}", num_tokens=30, num_sequences=2)
    return TreeNode(text="", num_tokens=0, num_sequences=8, children=(first, second))


@pytest.fixture(scope="session")
def report() -> DataReport:
    """Its texts are those of an attacker."""
    settings = tuple(setting(b, m, g) for b in (8, 16, 32) for m in (1024, 4096) for g in (False, True))
    example = Example(where="train.jsonl:12", before="Today is ", value="2026-11-21", after=f". {HOSTILE}")
    blank = Example(where="train.jsonl:13", before="end.", value=" \n\t", after="Intents:")
    cause = {"num_sequences": 1, "num_values": 2, "at_token": 3, "tokens_saved": 4_812_345, "advice": "Move it."}
    cause["tokens_with_others"] = 9_000_000
    return DataReport(
        **{"title": HOSTILE, "model": "tiny", "num_rows": 7, "num_samples": 8, "num_tokens": 2_014_000},
        **{"num_unique_tokens": 96_000, "num_labels": 12_345, "num_prompts": 2, "max_length": 1024, "longest": 2310},
        **{"length_quantiles": {"min": 12, "50 %": 60, "max": 2310}, "num_over_length": 37},
        **{"sources": {"a.jsonl": 5, HOSTILE: 2}, "tree": tree(), "settings": settings},
        **{"current": settings[4], "best": settings[6], "command": f"radixtrain fit --a '{HOSTILE}'"},
        breaks=(Break(cause="a date", examples=(example, blank), **cause),),
        environment={"torch": HOSTILE},
        splitting=Splitting(),
        notes=("Estimated from 500 steps.",),
        hints=("A batch_size of 64 would give r = 8.",),
    )
