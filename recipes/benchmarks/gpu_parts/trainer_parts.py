"""The parts of `gpu_trainers.py`, with the shapes of a GPU or tiny ones."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from gpu_parts.arms import sdpa_backend
from gpu_parts.batches import MODELS, TINY_MODEL
from gpu_parts.real import real
from gpu_parts.run import Run
from gpu_parts.trainer_arms import Arms, Setting, dpo_arms, grpo_arms, hf_arms, sft_arms
from gpu_parts.trainers import compare, profile_last_step

__all__ = ["calls"]


def calls(run: Run, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Every part: SFT on 8 rows of 2,048 shared and 256 own tokens, preferences on 8 of 1,024 and 1,024."""
    shape, prompt, own = (TINY_MODEL, 32, 8) if options.tiny else (MODELS["0.6B"], 2048, 256)
    steps, half = (4 if options.tiny else options.steps), (16 if options.tiny else 1024)

    run.header["sdpa without a mask"] = sdpa_backend(shape, run.device)

    def part(
        name: str, arms: Callable[[Setting], Arms], prompt: int, own: int, profiles: bool = False
    ) -> Callable[[], None]:
        def run_part() -> None:
            who = f"{name}, {shape}, 8 x ({prompt} + {own})"
            with tempfile.TemporaryDirectory() as folder:
                setting = Setting(shape, prompt, own, 8, steps, run.device, Path(folder), options.kernel)
                if profiles:
                    profile_last_step(run, who, arms(setting))
                else:
                    compare(run, who, setting.tokens, arms(setting))

        return run_part

    return {
        "profile": part("GRPOTrainer", grpo_arms, half, half, profiles=True),
        "hf": part("Trainer", hf_arms, prompt, own),
        "sft": part("SFTTrainer", sft_arms, prompt, own),
        "real": lambda: real(run, options.real, steps, options.tiny, options.kernel),
        "dpo": part("DPOTrainer", dpo_arms, half, half),
        "grpo": part("GRPOTrainer", grpo_arms, half, half),
    }
