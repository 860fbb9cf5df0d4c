"""Any trainer by its name, on rows of one prompt: Hugging Face's, or one of TRL."""

from collections.abc import Callable
from typing import Any

from rollouts import Reward, arguments, policy_of, tokenizer
from rollouts import prompts as drawn_from
from tiny_models import tiny_qwen3

__all__ = ["DRAWN", "LONG", "NUM_ROWS", "PROMPT", "Row", "rollout_trainer", "row_of"]

NUM_ROWS = 22  # of two ranks three micro-batches of 4 each: the second accumulation over two is not full
PROMPT = list(range(30, 42))
LONG = 10  # optimizer steps
DRAWN = ("GRPO", "RLOO")

Row = dict[str, list[int]]
Share = Callable[[Any], Any]


def row_of(answer: list[int]) -> Row:
    return {"input_ids": PROMPT + answer, "labels": [-100] * len(PROMPT) + answer}


def rollout_trainer(
    name: str, share: Share, reference: Any, folder: Any, seed: int, given: Any = None, **how: Any
) -> Any:
    """GRPO or RLOO with a reference, both shared; `LONG` steps are one epoch, since TRL 1.16.0 continues a later one in
    the order of the first. given: arguments of the trainer itself.
    """
    import trl
    from datasets import concatenate_datasets

    rows = concatenate_datasets([drawn_from()] * (LONG // 2))
    args = arguments(getattr(trl, f"{name}Config"), folder, beta=0.1, **how)
    policy = share(policy_of(reference, lambda _: tiny_qwen3(seed)))
    data = rows, rows.select(range(4))
    trainer = getattr(trl, f"{name}Trainer")(policy, Reward(), args, *data, tokenizer(), **(given or {}))
    share(trainer.ref_model)
    return trainer
