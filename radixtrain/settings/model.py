"""The section `model`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from radixtrain.errors import UserError
from radixtrain.settings.fields import BELOW_1, LARGEST, FilledBy, Limits, Section

LARGEST_FLOAT = 1e38  # below the largest float32, since torch converts these numbers
Number = Annotated[float, Limits(0, LARGEST_FLOAT, "from 0 to 1e+38")]
Share = Annotated[float, Limits(0, BELOW_1, "at least 0 and below 1")]


@dataclass
class ModelSettings(Section):
    """Which model is trained or evaluated, and how: the settings of a `RadixModule`.

    model_name_or_path: a Hugging Face folder or hub name.
    dtype: of weights and computation; `auto` takes the checkpoint's. For mixed precision set `trainer.precision`.
    attention: how attention uses the tree.
    kernel: which attention kernel.
    attn_implementation: Hugging Face's attention, with `dedup: false`.
    allow_dropout: dropout modules to accept by name, although a shared token then draws one mask for all its copies.
    optimizer: muon is torch's, for the matrices of hidden layers, with AdamW for the rest; adamw_8bit is that of
        bitsandbytes, with moments in 8 bits but for embeddings.
    learning_rate: the peak.
    lr_scheduler_type: the learning rate after the warm-up, by transformers' `get_scheduler`.
    warmup_steps: optimizer steps of linear warm-up; below 1, a share of all steps.
    weight_decay: on matrices; norms and biases have none.
    adam_beta1: decay of the first moment.
    adam_beta2: decay of the second moment.
    adam_epsilon: added to the root of the second moment.
    max_grad_norm: gradients are scaled down to this norm; 0 turns it off.
    on_nonfinite: a loss or gradient that is not finite: raise stops before the weights change, skip leaves the step out
        and names its rows.
    max_skipped_steps: most steps that `on_nonfinite: skip` leaves out.
    activation_checkpointing: recompute activations in the backward pass: less memory, a third more time. A number from
        0 to 1 is the share of the decoder layers that do, evenly spread.
    use_peft: train LoRA adapters instead of the weights.
    lora_r: rank of the adapters.
    lora_alpha: their scale, times `1 / lora_r`, or `1 / sqrt(lora_r)` with use_rslora.
    lora_dropout: must be 0 with dedup unless `allow_dropout` names it.
    lora_target_modules: names of layers; `all-linear` for every one but the head, which can be named if it is not tied.
    use_dora: DoRA: adapters for the direction of a weight, one number for each output's length.
    use_rslora: rank-stabilised LoRA.
    load_in_4bit: QLoRA: the weights under the adapters in 4 bits. Needs bitsandbytes.
    bnb_4bit_quant_type: how 4 bits encode a number.
    bnb_4bit_compute_dtype: of products with 4-bit weights; null takes `dtype`.
    bnb_4bit_use_double_quant: quantise their scales too: 0.4 bits less for each weight.
    dedup: False for the ordinary baseline: stock attention on padded batches.
    verify_first_batch: before training, `verify` the first optimizer step, and stop if the gradients differ.
    generate: `predict` writes answers, as `evaluate_generation` says, and not log-probabilities.
    """

    SECTION: ClassVar[str] = "model"

    model_name_or_path: str
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "float32"
    attention: Literal["auto", "cascade", "path", "expand", "reference", "tree"] = "auto"
    kernel: Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4", "cudnn", "efficient", "eager"] = (
        "auto"
    )
    attn_implementation: str = "sdpa"
    allow_dropout: list[str] | None = None
    optimizer: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    learning_rate: Number = 2e-05
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt"] = "cosine"
    warmup_steps: Number = 0.0
    weight_decay: Number = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: Number = 1e-08
    max_grad_norm: Number = 1.0
    on_nonfinite: Literal["raise", "skip"] = "raise"
    max_skipped_steps: Annotated[int, Limits(0, LARGEST, "from 0 to 2,147,483,647")] = 10
    activation_checkpointing: Annotated[
        bool | float, Limits(0, 1, "true, false or a share of the layers from 0 to 1")
    ] = False
    use_peft: bool = False
    # No layer has more than 65,536 inputs, and an adapter of a higher rank is larger than the layer.
    lora_r: Annotated[int, Limits(1, 2**16, "from 1 to 65,536")] = 16
    lora_alpha: Annotated[int, Limits(1, LARGEST, "from 1 to 2,147,483,647")] = 32
    lora_dropout: Share = 0.0
    lora_target_modules: list[str] | str = "all-linear"
    use_dora: bool = False
    use_rslora: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16"] | None = None
    bnb_4bit_use_double_quant: bool = False
    dedup: Annotated[bool, FilledBy("dedup")] = True
    verify_first_batch: bool = False
    generate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        step_size = self.learning_rate / (1 - self.adam_beta1)  # of AdamW's first step
        if step_size > LARGEST_FLOAT:
            raise UserError(f"model.learning_rate {self.learning_rate} is too large: AdamW computes with float32")
