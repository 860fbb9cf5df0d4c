"""The keys that radixtrain adds to Lightning's command line, beside the sections `trainer`, `model` and `data`."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.cli import LightningArgumentParser

from radixtrain.commands.keys import LINKS
from radixtrain.commands.trainer_settings import data_seed
from radixtrain.hf.scores import named_scores, needs_labels
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration


def add_cli_args(parser: LightningArgumentParser) -> None:
    """Add them, and link those keys of the sections that follow from another one."""
    parser.add_function_arguments(run_settings)
    parser.add_class_arguments(EvaluateGeneration, "evaluate_generation")
    computed = {"data.seed": data_seed, "data.predict_unlabelled": _is_unlabelled}
    for target, source in LINKS.items():
        parser.link_arguments(source, target, compute_fn=computed.get(target))


def run_settings(
    output_dir: str = "runs/sft",
    dedup: bool = True,
    overwrite: bool = False,
    save_every_steps: int | None = None,
    save_every_minutes: float | None = 10.0,
    save_total_limit: int = 2,
    save_best: str | None = None,
    early_stopping: int | None = None,
    sp_size: int | Literal["auto"] = 1,
    ddp_timeout: int = 1800,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
    hub_private_repo: bool = True,
) -> None:
    """The keys without a section: only the signature is read, here and by `keys.py`.

    Args:
        output_dir: where checkpoints, logs and the model go.
        dedup: false runs the ordinary baseline: stock attention, padded batches.
        overwrite: replace the run that is in output_dir.
        save_every_steps: optimizer steps between two checkpoints.
        save_every_minutes: minutes between two; the end of an epoch and of the run write one, too.
        save_total_limit: checkpoints that are kept, besides the best one.
        save_best: a metric of the validations, such as eval_loss: model/ gets the weights that were best by it.
        early_stopping: end after so many validations without a better save_best, or eval_loss.
        sp_size: ranks that compute each micro-batch together, each a part of its unique rows; auto for what fit
            predicts to be fastest.
        ddp_timeout: seconds that a rank waits for the others in a step.
        push_to_hub: upload model/ to the Hugging Face hub after training.
        hub_model_id: NAME or OWNER/NAME there; null takes the name of output_dir.
        hub_private_repo: of a repository that is new.
    """


def _is_unlabelled(scores: Any) -> bool:
    return not needs_labels(named_scores(scores))
