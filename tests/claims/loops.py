"""Training loops of users' own: plain, with Accelerate, with Lightning. `trainers.run` takes them for trainers."""

from collections.abc import Iterable
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Loop:
    """Optimizer steps of `accumulation` batches each, with AdamW and clipping. The model computes its own loss.

    A step's loss is the mean over its labelled tokens, whatever batch they are in. With one batch in a step the call
    says nothing but that.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], steps: int, accumulation: int = 1):
        self.model, self.batches, self.steps, self.accumulation = model.train(), batches, steps, accumulation
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.state = SimpleNamespace(log_history=[])
        self.callbacks: list[Any] = []
        self.loss = 0.0

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def train(self) -> None:
        batches = cycle(list(self.batches))
        for _ in range(self.steps):
            step = list(islice(batches, self.accumulation))
            given = {"num_items_in_batch": sum(map(num_labels, step))} if self.accumulation > 1 else {}
            for batch in step:
                loss = self.model(**batch, **given).loss
                loss.backward()
                self.loss += loss.item()
            self.log(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def log(self, grad_norm: Tensor) -> None:
        """Before an optimizer step: the loss, summed over its batches, and what callbacks look at."""
        for callback in self.callbacks:
            callback.on_pre_optimizer_step(None, None, None, model=self.model)
        self.state.log_history.append({"loss": self.loss, "grad_norm": grad_norm.item()})
        self.loss = 0.0

    @property
    def is_done(self) -> bool:
        return len(self.state.log_history) == self.steps


def num_labels(batch: Batch) -> int:
    return int((batch.get("shift_labels", batch["labels"][:, 1:]) != -100).sum())


class AccelerateLoop(Loop):
    """configuration: of `DataLoaderConfiguration`."""

    def __init__(self, *given: Any, accumulation: int = 1, **configuration: Any):
        super().__init__(*given, accumulation=accumulation)
        self.configuration = configuration

    def train(self) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        spread = DataLoaderConfiguration(**self.configuration)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.accumulation, dataloader_config=spread)
        model, optimizer, loader = accelerator.prepare(self.model, self.optimizer, self.batches)
        while not self.is_done:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)  # divides by the number of accumulated batches
                    self.loss += loss.item() / self.accumulation
                    if accelerator.sync_gradients:
                        self.log(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                    optimizer.step()
                    optimizer.zero_grad()
                if self.is_done:
                    return


class LightningLoop(Loop):
    """A user's module under automatic optimization; it reads what goes backward, and the gradient."""

    def train(self) -> None:
        import lightning as L

        loop = self

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = loop.model

            def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
                return self.model(**batch).loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return loop.optimizer

            def backward(self, loss: Tensor) -> None:
                loop.loss += loss.item()  # already divided by accumulate_grad_batches
                super().backward(loss)

            def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
                loop.log(nn.utils.get_total_norm([parameter.grad for parameter in self.parameters()]))

        options: dict[str, Any] = {"accelerator": "cpu", "gradient_clip_val": 1.0, **dict.fromkeys(QUIET, False)}
        trainer = L.Trainer(max_steps=self.steps, accumulate_grad_batches=self.accumulation, **options)
        trainer.fit(Module(), self.batches)
