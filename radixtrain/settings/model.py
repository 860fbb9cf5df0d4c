"""The section `model`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from radixtrain.errors import UserError
from radixtrain.settings.section import BELOW_1, LARGEST, Limits, Section

LARGEST_FLOAT = 1e38  # below the largest float32, which torch converts these numbers to
Number = Annotated[float, Limits(0, LARGEST_FLOAT, "from 0 to 1e+38")]
Share = Annotated[float, Limits(0, BELOW_1, "at least 0 and below 1")]


@dataclass
class ModelSettings(Section):
    """Which model is trained or evaluated, and how: the settings of a `RadixModule`."""

    SECTION: ClassVar[str] = "model"

    model_name_or_path: Annotated[str, "a Hugging Face folder or hub name."]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float64"],
        "of weights and computation; `auto` takes the checkpoint's. For mixed precision set `trainer.precision`.",
    ] = "float32"
    attention: Annotated[
        Literal["auto", "cascade", "path", "expand", "reference", "tree"], "how attention uses the tree."
    ] = "auto"
    kernel: Annotated[
        Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4", "cudnn", "efficient", "eager"],
        "which attention kernel.",
    ] = "auto"
    attn_implementation: Annotated[str, "Hugging Face's attention, with `dedup: false`."] = "sdpa"
    allow_dropout: Annotated[
        list[str] | None,
        "dropout modules to accept by name, although a shared token then draws one mask for all its copies.",
    ] = None
    optimizer: Annotated[
        Literal["adamw", "muon", "adamw_8bit"],
        "muon is torch's, for the matrices of hidden layers, with AdamW for the rest; adamw_8bit is that of "
        "bitsandbytes, with moments in 8 bits but for embeddings.",
    ] = "adamw"
    learning_rate: Annotated[Number, "peak."] = 2e-5
    lr_scheduler_type: Annotated[
        Literal["cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt"],
        "the learning rate after the warm-up, by transformers' `get_scheduler`.",
    ] = "cosine"
    warmup_steps: Annotated[Number, "optimizer steps of linear warm-up; below 1, a share of all steps."] = 0.0
    weight_decay: Annotated[Number, "on matrices; norms and biases have none."] = 0.0
    adam_beta1: Annotated[Share, "decay of the first moment."] = 0.9
    adam_beta2: Annotated[Share, "decay of the second moment."] = 0.999
    adam_epsilon: Annotated[Number, "added to the root of the second moment."] = 1e-8
    max_grad_norm: Annotated[Number, "gradients are scaled down to this norm; 0 turns it off."] = 1.0
    on_nonfinite: Annotated[
        Literal["raise", "skip"],
        "a loss or gradient that is not finite: raise stops before the weights change, skip leaves the step out and "
        "names its rows.",
    ] = "raise"
    max_skipped_steps: Annotated[
        int, Limits(0, LARGEST, "from 0 to 2,147,483,647"), "most steps that `on_nonfinite: skip` leaves out."
    ] = 10
    activation_checkpointing: Annotated[
        bool | float,
        Limits(0, 1, "true, false or a share of the layers from 0 to 1"),
        "recompute activations in the backward pass: less memory, a third more time. A number from 0 to 1 is the share "
        "of the decoder layers that do, evenly spread.",
    ] = False
    use_peft: Annotated[bool, "train LoRA adapters and not the weights."] = False
    # No layer has more than 65,536 inputs, and an adapter of a higher rank is larger than the layer.
    lora_r: Annotated[int, Limits(1, 2**16, "from 1 to 65,536"), "rank of the adapters."] = 16
    lora_alpha: Annotated[
        int,
        Limits(1, LARGEST, "from 1 to 2,147,483,647"),
        "their scale, times `1 / lora_r`, or `1 / sqrt(lora_r)` with use_rslora.",
    ] = 32
    lora_dropout: Annotated[Share, "must be 0 with dedup unless `allow_dropout` names it."] = 0.0
    lora_target_modules: Annotated[
        list[str] | str,
        "names of layers; `all-linear` for every one but the head, which can be named if it is not tied.",
    ] = "all-linear"
    use_dora: Annotated[bool, "DoRA: adapters for the direction of a weight, one number for each output's length."] = (
        False
    )
    use_rslora: Annotated[bool, "rank-stabilised LoRA."] = False
    load_in_4bit: Annotated[bool, "QLoRA: the weights under the adapters in 4 bits. Needs bitsandbytes."] = False
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], "how 4 bits stand for a number."] = "nf4"
    bnb_4bit_compute_dtype: Annotated[
        Literal["float32", "bfloat16"] | None, "of products with 4-bit weights; null takes `dtype`."
    ] = None
    bnb_4bit_use_double_quant: Annotated[bool, "quantise their scales too: 0.4 bits less for each weight."] = False
    dedup: Annotated[bool, "False for the ordinary baseline: stock attention on padded batches."] = True
    verify_first_batch: Annotated[
        bool, "before training, `verify` the first optimizer step, and stop if the gradients differ."
    ] = False
    scores: Annotated[
        list[str] | str | None,
        "what `predict` writes of each row: logprobs (null), completion_logprob, perplexity, next_token_logits, "
        "next_token_logprobs, next_token_probs, embedding.",
    ] = None
    next_tokens: Annotated[
        list[str] | None,
        "words of one token each, in quotes, for the `next_token_...` scores; a blank at the start counts.",
    ] = None
    normalize_embeddings: Annotated[bool, "scale embeddings to an L2 norm of 1."] = True
    generate: Annotated[bool, "`predict` writes answers, as `evaluate_generation` says, and no scores."] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        step_size = self.learning_rate / (1 - self.adam_beta1)  # of AdamW's first step
        if step_size > LARGEST_FLOAT:
            raise UserError(f"model.learning_rate {self.learning_rate} is too large: AdamW computes with float32")
        if self.generate and self.scores is not None:
            raise UserError("model.generate: true writes answers, model.scores writes scores; leave one of them out")
