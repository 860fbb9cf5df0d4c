"""A tokenizer of bytes, micro-batches and sequences without a data set, and what a console of some width prints."""

from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import RenderableType
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.steps import features_of
from radixtrain.explain.micro_batch import MicroBatch
from radixtrain.screen import screen
from tests.support.batches import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def sample_of() -> Callable[..., TokenRow]:
    """`sample_of("prompt", "answer")`, with loss on the answer."""

    def build(
        prompt: str, answer: str, where: str = "chats.jsonl:1", weights: Sequence[float] | None = None
    ) -> TokenRow:
        ids = np.array([*prompt.encode(), *answer.encode()], dtype=np.int64)
        labels = np.where(np.arange(len(ids)) < len(prompt.encode()), -100, ids)
        return TokenRow(ids, labels, where, None if weights is None else np.array(weights, dtype=np.float32))

    return build


@pytest.fixture(scope="session")
def part_of() -> Callable[..., MicroBatch]:
    """`part_of(samples, **options)`: one step of one micro-batch; the options are those of the collator."""

    def build(samples: Sequence[TokenRow], **options: Any) -> MicroBatch:
        step = StepCollator(**options)(features_of(samples))
        (members,), (batch,) = step.members, step.micro_batches
        return MicroBatch("step 0", [samples[member] for member in members], batch, step.num_labels)

    return build


@pytest.fixture(scope="session")
def printed() -> Callable[..., str]:
    """`printed(renderable, width=80)`: plain text, without blanks at the ends of lines."""

    def print_it(content: RenderableType, width: int = 80, **options: Any) -> str:
        file = StringIO()
        screen(width=width, file=file, **options).print(content, highlight=False)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    return print_it
