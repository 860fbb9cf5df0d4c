"""A tokenizer of bytes, micro-batches without a data set, and what a console of some width prints."""

from collections.abc import Callable, Sequence
from io import StringIO

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from rich.console import Console, RenderableType
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.steps import features_of
from radixtrain.inspection.micro_batch import MicroBatch


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

    def build(samples: Sequence[TokenRow], **options: object) -> MicroBatch:
        step = StepCollator(**options)(features_of(samples))  # type: ignore[arg-type]
        assert step.members == [list(step.members[0])]
        return MicroBatch(
            place="step 0 of 1, micro-batch 0 of 1",
            samples=[samples[member] for member in step.members[0]],
            batch=step.micro_batches[0],
            num_step_labels=step.num_labels,
            num_whole_tokens=step.num_tokens,
        )

    return build


@pytest.fixture(scope="session")
def printed() -> Callable[..., str]:
    """`printed(renderable, width=80)`: plain text, without blanks at the ends of lines."""

    def print_it(content: RenderableType, width: int = 80, **options: object) -> str:
        console = Console(width=width, file=StringIO(), **options)  # type: ignore[arg-type]
        console.print(content, highlight=False)
        assert isinstance(console.file, StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    return print_it
