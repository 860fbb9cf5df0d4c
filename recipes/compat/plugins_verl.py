"""Train verl's FSDP2 actor for three steps on a CPU; `recipes/compat/plugins.py` runs it with and without the plug-in.

verl has no platform without an accelerator, so this file registers one for PyTorch's CPU device. Engine, packing, loss
and optimizer are verl's.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

os.environ |= {"VERL_PLATFORM": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: torch.cpu)
    is_available = is_platform_available = lambda self, **_: True
    current_device = lambda self: "cpu"  # noqa: E731
    device_count = lambda self: 1  # noqa: E731
    set_device = synchronize = empty_cache = lambda self, *_: None
    communication_backend_name = lambda self: "gloo"  # noqa: E731


from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.dataset.dataset_utils import DatasetPadMode  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
SETTINGS = {"use_remove_padding": True, "pad_mode": DatasetPadMode.NO_PADDING, "use_fused_kernels": False}
SETTINGS |= {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4, "global_batch_size": 4}
SETTINGS |= {"max_token_len_per_gpu": 4096, "calculate_entropy": False}


def main() -> None:
    dist.init_process_group("gloo")
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path="model", override_config={"attn_implementation": "sdpa"}, enable_gradient_checkpointing=False
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=PRECISION),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        CheckpointConfig(),
    )
    engine.initialize()
    with engine.train_mode():
        steps = [one_step(engine, seed) for seed in range(3)]
    Path(sys.argv[1], "trainer_state.json").write_text(json.dumps({"log_history": steps}))
    dist.destroy_process_group()


def one_step(engine: Any, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    ids = lambda count: torch.randint(5, 250, (count,), generator=generator)  # noqa: E731
    prompt = ids(200)
    rows = [torch.cat([prompt, ids(count)]) for count in (10, 14, 12, 20)]
    nested = lambda parts: torch.nested.as_nested_tensor(parts, layout=torch.jagged)  # noqa: E731
    places = [torch.arange(len(row)) for row in rows]
    entries = {
        "input_ids": nested(rows),
        "position_ids": nested(places),
        "loss_mask": nested([(place >= len(prompt)).float() for place in places]),
    }
    data = TensorDict(entries, batch_size=[len(rows)])
    tensordict_utils.assign_non_tensor(data, **SETTINGS)
    engine.optimizer_zero_grad()

    def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        return sft_loss(None, model_output, data, dp_group)

    (output,) = [engine.forward_backward_batch(data, loss)]
    value = output["loss"] if "loss" in output else output[0]["loss"]
    return {"loss": float(torch.as_tensor(value).sum()), "grad_norm": float(engine.optimizer_step())}


if __name__ == "__main__":
    main()
