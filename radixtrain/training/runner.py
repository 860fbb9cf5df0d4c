"""What `fit` and the commands that evaluate have in common, and `validate`, `test`, `predict` and `verify`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from lightning.fabric import Fabric
from lightning.fabric.loggers import Logger
from lightning.pytorch.loggers import CSVLogger

from radixtrain.checkpoints.atomic import check_replaceable, writing_file
from radixtrain.checkpoints.folder import Checkpoint, read_checkpoint
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, only_warns
from radixtrain.hf.guards.draws import evaluating
from radixtrain.screen import print_lines, printable
from radixtrain.settings.sections import TrainerSettings
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration
from radixtrain.training.devices.fabric import is_sharded
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_folder import RECORD
from radixtrain.training.fault_tolerance.run_state import check_same_model, load_weights
from radixtrain.training.module import RadixModule
from radixtrain.training.progress import ProgressLines


class Runner:
    """A model and its data on the devices of `fabric`.

    settings: of `trainer`. output_dir: of the run. loggers: receive the metrics, on rank 0; the first one writes CSV.
    evaluation: of answers to validation rows. config: the keys of the command, for the file of its settings.

    state.fn: the command, under the name that Lightning's trainer has for it.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: TrainerSettings,
        output_dir: Path,
        loggers: Sequence[Logger],
        evaluation: EvaluateGeneration,
        config: Mapping[str, Any],
    ):
        self.fabric, self.settings, self.output_dir = fabric, settings, output_dir
        self.loggers: list[Any] = list(loggers)
        self.evaluation, self.config = evaluation, config
        self.bar = ProgressLines(sys.stderr.isatty(), settings.enable_progress_bar)
        self.state = SimpleNamespace(fn="fit")
        self.strategy, self.precision_plugin = fabric.strategy, fabric.strategy.precision
        self.ckpt_path: str | None = None
        self.log_every_n_steps = settings.log_every_n_steps
        self.loaders: list[Any] = []
        torch.use_deterministic_algorithms(bool(settings.deterministic), warn_only=settings.deterministic == "warn")
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
            torch.backends.cudnn.benchmark = False

    @property
    def precision(self) -> str:
        """Return the precision of products and weights, such as `bf16-mixed`."""
        return str(self.precision_plugin.precision)

    @property
    def global_step(self) -> int:
        """Return the optimizer steps of the run so far."""
        return self.module.position.num_steps

    def begin(self, command: str, module: RadixModule, data: SFTData, ckpt_path: str | None) -> None:
        self.state.fn, self.module, self.datamodule, self.ckpt_path = command, module, data, ckpt_path
        module.trainer = data.trainer = self  # type: ignore[assignment]
        if ranks().size == 1:
            self.strategy.setup_environment()
        check_replaceable(self.settings_file)
        if command != "fit":
            self.write_settings()
        data.setup(command)
        module.configure_model()
        module.setup(command)

    @property
    def settings_file(self) -> Path:
        """Return the path of `fit.yaml`, `validate.yaml` and so on: beside the metrics, or in `output_dir`."""
        return Path(self.loggers[0].log_dir if self.loggers else self.output_dir) / RECORD.format(self.state.fn)

    def write_settings(self) -> None:
        """Write the settings, from which the command can be run again. `fit` does when training starts."""
        if ranks().is_first:
            self.settings_file.parent.mkdir(parents=True, exist_ok=True)
            with writing_file(self.settings_file) as partial:
                partial.write_text(yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True), encoding="utf-8")

    def load_checkpoint(self) -> Checkpoint:
        """Read the checkpoint and load its weights; each rank has them whole until they are placed on its device."""
        assert self.ckpt_path is not None
        with restoring(self.ckpt_path):
            is_fit, in_memory = self.state.fn == "fit", not is_sharded(self.strategy)
            checkpoint = read_checkpoint(Path(self.ckpt_path), is_fit, in_memory)
            check_same_model(checkpoint, self.module)
            load_weights(self.module, checkpoint)
        return checkpoint

    def place(self) -> None:
        """Convert the module and move it, or this rank's part of it, to the device."""
        self.precision_plugin.convert_module(self.module)
        self.strategy.module_to_device(self.module)
        if is_sharded(self.strategy):
            self.strategy.setup_module(self.module)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Close the progress bar, the workers and the loggers at the end."""
        status = "failed"
        try:
            yield
            status = "success"
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.bar.close()
            for loader in self.loaders:
                loader.close()
            if ranks().is_first:
                for log in self.loggers:
                    with only_warns(f"{type(log).__name__} does not get all metrics", Exception):
                        log.finalize(status)

    def failed(self, error: BaseException) -> None:
        """Do what an error leaves to do."""

    @torch.no_grad()
    def evaluate(self, split: str, limit: float | int | None = None, is_try: bool = False) -> dict[str, float]:
        """Return the mean loss of the first steps of a split, and the metric of answers, and log both unless tried.

        split: `validation` or `test`.
        """
        module, is_validation = self.module, split == "validation"
        name = "eval_loss" if is_validation else "test_loss"
        loader: Any = self.datamodule.val_dataloader() if is_validation else self.datamodule.test_dataloader()
        count = limited(len(loader), limit)
        total, labels, metrics = 0.0, 0, dict[str, float]()
        module.on_validation_start()
        with evaluating(module), closing(loader):
            for index, step in zip(range(count), loader, strict=False):
                with self.precision_plugin.forward_context():
                    found = module.evaluated(name, self.moved(step))
                if found is not None:
                    total, labels = total + float(found), labels + step.num_labels
                self.evaluated_step()
                if self.bar.is_bar or self.state.fn != "fit":
                    self.bar.count("validate" if is_validation else "test", index + 1, count)
            if labels:
                metrics[name] = total / labels
            if is_validation and not is_try:
                metrics |= self.evaluation.measured(self)
        if not is_try:
            self.log(metrics, *self.place_of_logs)
        module.on_validation_end()
        return metrics

    def evaluated_step(self) -> None:
        """Do what may be requested between two steps of an evaluation."""

    def moved(self, step: Any) -> Any:
        """Move what a loader gives to the device. Prompts are numbers of the host."""
        return step.to(self.strategy.root_device, non_blocking=True) if hasattr(step, "to") else step

    @property
    def place_of_logs(self) -> tuple[int, int]:
        """Return the number of the step and of the epoch that loggers note now."""
        return 0, 0

    def log_hyperparameters(self) -> None:
        if ranks().is_first:
            for log in self.loggers:
                log.log_hyperparams({**self.datamodule.hparams, **self.module.hparams})
                log.save()

    def log(self, metrics: Mapping[str, Any], step: int = 0, epoch: int = 0) -> None:
        """Give the metrics to the loggers. A failure is a warning; a deleted folder of metrics is made again."""
        if not metrics or not ranks().is_first:
            return
        values = {**{name: float(value) for name, value in metrics.items()}, "epoch": epoch}
        for log in self.loggers:
            with only_warns(f"{type(log).__name__} does not get all metrics", Exception):
                if isinstance(log, CSVLogger) and Path(log.save_dir).is_dir():
                    Path(log.log_dir).mkdir(parents=True, exist_ok=True)
                log.log_metrics(values, step=step)
                log.save()


class Evaluation(Runner):
    """Evaluates a `RadixModule` on the steps of an `SFTData`. Arguments are those of `Runner`.

    ckpt_path of its methods: a checkpoint whose weights are used; None for those of the model.
    """

    def validate(self, module: RadixModule, data: SFTData, ckpt_path: str | None = None) -> None:
        """Log and print the metrics of the validation rows."""
        self._mean_loss("validate", "validation", module, data, ckpt_path)

    def test(self, module: RadixModule, data: SFTData, ckpt_path: str | None = None) -> None:
        """Log and print the loss on the test rows."""
        self._mean_loss("test", "test", module, data, ckpt_path)

    @torch.no_grad()
    def predict(self, module: RadixModule, data: SFTData, ckpt_path: str | None = None) -> None:
        """Write scores of the rows to predict, or answers to them."""
        from radixtrain.training.answers.predictions import PredictionWriter

        with self.ending():
            self._begin_placed("predict", module, data, ckpt_path)
            loader, writer = data.predict_dataloader(), PredictionWriter(self.output_dir)
            module.on_predict_start()
            with evaluating(module), closing(loader), writer.writing():
                for index, step in enumerate(loader):
                    with self.precision_plugin.forward_context():
                        records = module.predict_step(self.moved(step), index)
                    writer.add(records, step)
                    self.bar.count("predict", index + 1, len(loader))
            if ranks().is_first:
                writer.print_results(module.answers.speed if module.hparams.generate else "")

    def verify(
        self,
        module: RadixModule,
        data: SFTData,
        ckpt_path: str | None = None,
        num_steps: int = 1,
        num_sequences: int | None = None,
    ) -> None:
        """Compare the gradient of the first optimizer steps with that of ordinary Hugging Face, tensor by tensor.

        The arguments are those of the settings `Verify`.

        Raises:
            UserError: a gradient or the loss is further from the truth than rounding explains.
        """
        self._begin_placed("verify", module, data, ckpt_path)
        collator, available = data.step_collator(), data.steps_per_epoch
        failed: list[str] = []
        for index in range(min(num_steps, available)):
            features = data.features_of_step(index)[:num_sequences]
            report = module.verify(features, collator)
            num_tokens = sum(len(feature["input_ids"]) for feature in features)
            size = f"{len(features)} sequences, {num_tokens:,} tokens"
            print(printable(f"step {index}: {size}\n{report}\n"), flush=True)  # noqa: T201
            failed += [] if report.passed else [f"verify: step {index}: {report.reason}"]
        if failed:
            raise UserError(failed[0])
        print(f"verified: {min(num_steps, available)} of {available} steps of an epoch")  # noqa: T201

    def _begin_placed(self, command: str, module: RadixModule, data: SFTData, ckpt_path: str | None) -> None:
        self.begin(command, module, data, ckpt_path)
        if ckpt_path is not None:
            self.load_checkpoint()
        self.place()

    def _mean_loss(self, command: str, split: str, module: RadixModule, data: SFTData, ckpt_path: str | None) -> None:
        with self.ending():
            self._begin_placed(command, module, data, ckpt_path)
            self.log_hyperparameters()
            metrics = self.evaluate(split, self.settings.limit_val_batches if command == "validate" else None)
        if ranks().is_first:
            print_lines({key: repr(value) for key, value in metrics.items()})


def limited(count: int, limit: float | int | None) -> int:
    """Return how many of `count` steps are taken. limit: a number, a share if it is a float; None for all."""
    if limit is None:
        return count
    if isinstance(limit, int):
        return min(count, limit)
    found = int(count * limit)
    if limit and count and not found:
        raise UserError(f"trainer: {limit} of {count} steps is none; set a larger share, or a number of steps")
    return found
