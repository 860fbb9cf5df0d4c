"""`trainer.strategy: fsdp2`: weights, gradients and moments of the optimizer are divided among the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.fsdp import FSDPModule

from radixtrain.checkpoints.folder import gathering_of, read_checkpoint
from radixtrain.checkpoints.sharded import part_like, parts_like
from radixtrain.training.devices.sharding import shard

__all__ = ["FSDP2Strategy"]

METHODS = ("loss_sum", "predict_step")  # of a `RadixModule`: those that use its weights


class FSDP2Strategy(DDPStrategy):
    """Lightning's DDP, but with a sharded `RadixModule` in place of DDP's wrapper around it.

    Of Lightning's strategies DDP is nearest: processes, barriers and reductions are the same, and a checkpoint is
    loaded before the weights are moved, when each rank has them whole on the host. `ModelParallelStrategy` restores
    later, from checkpoints of its own kind, and `FSDPStrategy` is FSDP1.

    Checkpoints are those of a single process: tensors are gathered one at a time while rank 0 writes.
    """

    def setup(self, trainer: Any) -> None:
        """Convert and shard the module, and make the optimizers of its parts."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # training could not use weights that were gathered in it
        if not isinstance(self.model, FSDPModule):  # by an earlier run
            self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        module: Any = self.lightning_module
        shard(module, module.model, self.root_device, self.world_size, METHODS)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Rank 0 writes, and raises if it cannot; the others return once it has received their parts."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        else:
            gathering_of(checkpoint).finish()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> Any:
        """Weights and moments are mapped: they stay on the disk until each rank takes its parts."""
        return read_checkpoint(Path(checkpoint_path), in_memory=False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        module.load_state_dict(parts_like(checkpoint["state_dict"], module.state_dict()), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank keeps its parts of the moments."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            for number, weight in zip(numbers, weights, strict=True):
                moments = state["state"].get(number, {})
                for name, moment in moments.items():
                    is_count = moment.shape != weight.shape  # of steps, a single number
                    moments[name] = moment.clone() if is_count else part_like(moment, weight)
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """As the base class, but the parts of weights stay on their device: the export gathers them there."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="weights, gradients and moments divided among the ranks")
