"""`validate`, `test`, `predict` and `verify`: a model evaluated, without training, on Lightning Fabric."""

from __future__ import annotations

import torch

from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.screen import printable
from radixtrain.training.module import RadixModule
from radixtrain.training.results.run_progress import print_lines
from radixtrain.training.runner import Runner, Stage, closed, evaluating
from radixtrain.verification.report import EquivalenceReport


class Evaluation(Runner):
    """Evaluates a `RadixModule` on the steps of an `SFTData`. Arguments are those of `Runner`.

    ckpt_path of its methods: a checkpoint whose weights are used; None for those of the model.
    """

    def validate(self, module: RadixModule, datamodule: SFTData, ckpt_path: str | None = None) -> None:
        """Log and print the metrics of the validation rows."""
        self._mean_loss(Stage.VALIDATE, "validation", "eval_loss", module, datamodule, ckpt_path)

    def test(self, module: RadixModule, datamodule: SFTData, ckpt_path: str | None = None) -> None:
        """Log and print the metrics of the test rows."""
        self._mean_loss(Stage.TEST, "test", "test_loss", module, datamodule, ckpt_path)

    @torch.no_grad()
    def predict(self, module: RadixModule, datamodule: SFTData, ckpt_path: str | None = None) -> None:
        """Compute scores or answers of the rows to predict, which a part of the run writes."""
        self.module, self.datamodule = module, datamodule
        with self.ending():
            self._begin_placed(Stage.PREDICT, module, datamodule, ckpt_path)
            loader = datamodule.predict_dataloader()
            self.num_predict_batches = [len(loader)]
            with evaluating(module), closed(loader):
                self.tell("on_predict_start")
                for index, step in enumerate(loader):
                    with self.precision_plugin.forward_context():
                        records = module.predict_step(self.moved(step), index)
                    self.tell("on_predict_batch_end", records, step, index, 0)
                self.tell("on_predict_end")

    def verify(
        self,
        model: RadixModule,
        datamodule: SFTData,
        num_steps: int = 1,
        num_sequences: int | None = None,
        ckpt_path: str | None = None,
    ) -> None:
        """Compare the gradient of the first optimizer steps with that of ordinary Hugging Face, tensor by tensor.

        The arguments are those of the settings `Verify`.

        Raises:
            UserError: a gradient or the loss is further from the truth than rounding explains.
        """
        self._begin_placed(Stage.VERIFY, model, datamodule, ckpt_path)
        collator = datamodule.step_collator()
        available = datamodule.steps_per_epoch
        failed: list[tuple[int, EquivalenceReport]] = []
        for index in range(min(num_steps, available)):
            features = datamodule.features_of_step(index)[:num_sequences]
            report = model.verify(features, collator)
            num_tokens = sum(len(feature["input_ids"]) for feature in features)
            size = f"{len(features)} sequences, {num_tokens:,} tokens"
            print(printable(f"step {index}: {size}\n{report}\n"), flush=True)  # noqa: T201
            failed += [] if report.passed else [(index, report)]
        if failed:
            index, report = failed[0]
            raise UserError(f"verify: step {index}: {report.reason}")
        print(f"verified: {min(num_steps, available)} of {available} steps of an epoch")  # noqa: T201

    def _begin_placed(self, stage: Stage, module: RadixModule, data: SFTData, ckpt_path: str | None) -> None:
        self.begin(stage, module, data, ckpt_path)
        if ckpt_path is not None:
            self.load_checkpoint()
        self.place()

    def _mean_loss(
        self,
        stage: Stage,
        split: str,
        name: str,
        module: RadixModule,
        data: SFTData,
        ckpt_path: str | None,
    ) -> None:
        self.module, self.datamodule = module, data
        with self.ending():
            self._begin_placed(stage, module, data, ckpt_path)
            self.log_hyperparameters()
            limit = self.settings.limit_val_batches if stage == Stage.VALIDATE else None
            metrics = self.evaluate(split, name, limit)
        if ranks().is_first:
            print_lines({key: repr(value) for key, value in metrics.items()})
