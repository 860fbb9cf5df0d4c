"""The keys that radixtrain adds to Lightning's command line, beside the sections `trainer`, `model` and `data`.

`keys.py` reads this file, so names, defaults and texts are literals here.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from radixtrain.commands.trainer_settings import data_seed
from radixtrain.hf.scores import named_scores, needs_labels
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration

__all__ = ["add_own_keys"]


def add_own_keys(parser: LightningArgumentParser) -> None:
    """Add them, and link those keys of the sections that follow from another one."""
    parser.add_argument("--output_dir", type=str, default="runs/sft", help="Where checkpoints, logs and the model go.")
    parser.add_argument(
        "--dedup",
        type=bool,
        default=True,
        help="False runs the ordinary baseline: stock attention, padded batches.",
    )
    parser.add_argument("--overwrite", type=bool, default=False, help="Replace the run that is in output_dir.")
    parser.add_argument(
        "--save_every_steps", type=int | None, default=None, help="Optimizer steps between two checkpoints."
    )
    parser.add_argument(
        "--save_every_minutes",
        type=float | None,
        default=10.0,
        help="Minutes between two checkpoints. One is written at each end of an epoch, and of the run, too.",
    )
    parser.add_argument(
        "--save_total_limit", type=int, default=2, help="Checkpoints that are kept, besides the best one."
    )
    parser.add_argument(
        "--save_best",
        type=str | None,
        default=None,
        help="A metric of the validations, such as eval_loss: model/ gets the weights that were best by it.",
    )
    parser.add_argument(
        "--early_stopping",
        type=int | None,
        default=None,
        help="End after so many validations without a better value of save_best, or of eval_loss.",
    )
    parser.add_argument(
        "--ddp_timeout",
        type=int,
        default=1800,
        help="Seconds that a rank waits for the others in a step: then the run ends with an error.",
    )
    parser.add_class_arguments(EvaluateGeneration, "evaluate_generation")
    parser.link_arguments("output_dir", "trainer.default_root_dir")
    parser.link_arguments("dedup", "model.dedup")
    parser.link_arguments("dedup", "data.dedup")
    parser.link_arguments("seed_everything", "data.seed", compute_fn=data_seed)
    parser.link_arguments("model.model_name_or_path", "data.model_name_or_path")
    parser.link_arguments("model.scores", "data.predict_unlabelled", compute_fn=_is_unlabelled)
    parser.link_arguments("model.generate", "data.predict_prompts")


def _is_unlabelled(scores: Any) -> bool:
    return not needs_labels(named_scores(scores))
