"""What `fit` leaves when its steps are done: the model as a Hugging Face folder, and the last lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.training.results.model_card import documents
from radixtrain.training.results.model_folder import save_hf_folder
from radixtrain.training.results.saved_config import SaveMaskedConfig
from radixtrain.training.results.summary import RunSummary

__all__ = ["export_run"]


def export_run(trainer: Any, module: Any, data: Any, summary: RunSummary, output_dir: Path) -> None:
    """Write `model/` and the end of the summary, and say it. With several ranks each of them calls it.

    module, data: a `RadixModule` and an `SFTData` after a `fit` of the trainer.
    """
    results = summary.choose_weights(trainer, module)
    tokenizer = load_tokenizer(data.hparams.model_name_or_path, data.hparams.chat_template_path)
    texts = documents(
        _written_config(trainer),
        results,
        {"rows": str(data.reports["train"])},
        has_chat_template=tokenizer.chat_template is not None,
    )
    folder = save_hf_folder(module.model, tokenizer, output_dir / "model", texts)
    summary.close(trainer, module, folder)


def _written_config(trainer: Any) -> dict[str, Any]:
    """What `config.yaml` of the run holds."""
    saved = next(callback for callback in trainer.callbacks if isinstance(callback, SaveMaskedConfig))
    return yaml.safe_load(saved.text())
