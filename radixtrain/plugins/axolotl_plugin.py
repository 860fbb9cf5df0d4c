"""Axolotl: a section `radixtrain:` in the YAML shares the model.

    radixtrain:
      min_ratio: 1.2                  # options of share_prefixes; {} for none

Axolotl 0.20 and newer find the plug-in by its entry point. Older ones need
`plugins: [radixtrain.plugins.axolotl_plugin.RadixtrainPlugin]`. Without the section nothing is shared.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict

from radixtrain.hf.share import share_prefixes
from radixtrain.plugins.trainer_callback import SharePrefixesCallback


class Options(BaseModel):
    """Options of `share_prefixes`."""

    model_config = ConfigDict(extra="forbid")
    attention: str = "auto"
    kernel: str = "auto"
    min_shared_tokens: int = 1
    min_ratio: float = 1.1
    allow_dropout: list[str] = []


class RadixtrainArgs(BaseModel):
    """Keys that the plug-in adds to Axolotl's configuration."""

    radixtrain: Options | None = None


class RadixtrainPlugin(BasePlugin):
    """Shares the model, adapters included, and prints after training what was shared."""

    def get_input_args(self) -> str:
        return f"{RadixtrainArgs.__module__}.{RadixtrainArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Share the model. Raises UserError as `share_prefixes` does."""
        if cfg.radixtrain is not None:
            share_prefixes(model, **Options(**cfg.radixtrain).model_dump())

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[SharePrefixesCallback]:
        if cfg.radixtrain is None:
            return []
        callback = SharePrefixesCallback()
        callback.models["model"] = trainer.model
        return [callback]
