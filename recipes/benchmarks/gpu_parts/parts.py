"""The parts of `gpu.py`, with the shapes of a GPU or tiny ones."""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpu_parts.arms import sdpa_backend
from gpu_parts.batches import MODELS, STEPS, TINY_MODEL, cases
from gpu_parts.equivalence import equivalence
from gpu_parts.real import real
from gpu_parts.run import Run
from gpu_parts.steps import profile_steps, steps
from gpu_parts.table import HEADS, TINY_HEADS, table
from gpu_parts.trainer_arms import Arms, Setting, dpo_arms, hf_arms, sft_arms
from gpu_parts.trainers import compare
from step import ModelShape

__all__ = ["calls"]

VERIFIED = ModelShape(4, 256, head_dim=64, vocab_size=512, name="small")  # wide enough for every kernel


def calls(run: Run, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Every part. Trainers: SFT on 8 rows of 2,048 shared and 256 own tokens, preferences on 8 of 1,024 and 1,024."""
    tiny, arms = options.tiny, options.arms
    verified, prompt, own, half = (TINY_MODEL, 32, 8, 16) if tiny else (VERIFIED, 2048, 256, 1024)
    of_part = {part: cases(part, options.models, tiny) for part in STEPS}
    run.header["sdpa without a mask"] = sdpa_backend(TINY_MODEL if tiny else MODELS["0.6B"], run.device)
    trained = partial(_train, run, options)
    return {
        **{part: partial(steps, run, part, each, arms) for part, each in of_part.items()},
        "equivalence": lambda: equivalence(run, verified, 32 if tiny else 256),
        "profile": lambda: [profile_steps(run, case, arms) for case in of_part["step"][:2]],
        "table": lambda: table(run, TINY_HEADS if tiny else HEADS, shrink=512 if tiny else 1),
        "hf": lambda: trained("Trainer", hf_arms, prompt, own),
        "sft": lambda: trained("SFTTrainer", sft_arms, prompt, own),
        "dpo": lambda: trained("DPOTrainer", dpo_arms, half, half),
        "real": lambda: real(run, options.real, _steps(options), tiny, options.kernel),
    }


def _train(
    run: Run, options: argparse.Namespace, name: str, arms: Callable[[Setting], Arms], prompt: int, own: int
) -> None:
    shape = TINY_MODEL if options.tiny else MODELS["0.6B"]
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(shape, prompt, own, 8, _steps(options), run.device, Path(folder), options.kernel)
        compare(run, f"{name}, {shape}, 8 x ({prompt} + {own})", setting.tokens, arms(setting))


def _steps(options: argparse.Namespace) -> int:
    return 4 if options.tiny else options.steps
