"""ms-swift: `swift sft --external_plugins PATH/radixtrain/plugins/swift_plugin.py --callbacks radixtrain`.

The file's path: `python -c "import radixtrain.plugins.swift_plugin as plugin; print(plugin.__file__)"`. Options of
`share_prefixes` are read from RADIXTRAIN_OPTIONS, as JSON. A reference model shares too.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from radixtrain.hf.share import share_prefixes
from radixtrain.plugins.from_pretrained import read_options
from radixtrain.plugins.trainer_callback import SharePrefixesCallback


class SwiftCallback(SharePrefixesCallback):
    """Takes the arguments that swift passes to every callback."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(**read_options())
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, model)  # swift makes its references after the trainer
        reference = getattr(self.trainer, "ref_model", None)
        if reference is not None:
            self.models["ref_model"] = share_prefixes(self.trainer.accelerator.unwrap_model(reference), **self.options)


callbacks_map["radixtrain"] = SwiftCallback
