"""The keys of `radixtrain bench`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from radixtrain.settings.section import Section

Family = Literal["qwen3", "qwen3_5"]
Tree = Literal["flat", "nested"]
Mode = Literal["step", "forward"]
Attention = Literal["auto", "cascade", "path", "expand", "tree"]


@dataclass(frozen=True)
class ShapeSettings:
    """The sizes of a Qwen3, or a Qwen3.5, with random weights."""

    num_hidden_layers: Annotated[int, "layers."] = 4
    hidden_size: Annotated[int, "width."] = 256
    intermediate_size: Annotated[int | None, "width of the MLP; null is 3 x hidden_size, as in the small Qwen3."] = None
    num_attention_heads: Annotated[int | None, "query heads; null is hidden_size / head_dim."] = None
    num_key_value_heads: Annotated[int | None, "key and value heads; null is half of the query heads."] = None
    head_dim: Annotated[int, "width of a head."] = 64
    vocab_size: Annotated[int, "tokens of the vocabulary."] = 4096
    tie_word_embeddings: Annotated[bool, "whether the head is the embedding."] = True
    name: Annotated[str | None, "in the table; null is layers x width."] = None
    family: Annotated[
        Family,
        "qwen3; or qwen3_5, a hybrid: three of every four layers have a recurrent state, with keys and values twice as "
        "wide as the model, in heads of head_dim.",
    ] = "qwen3"


@dataclass
class Bench(Section):
    """Which steps are timed. A list as a value makes the grid larger."""

    models: Annotated[
        ShapeSettings | list[ShapeSettings],
        "Qwen3 shapes with random weights: num_hidden_layers, hidden_size, intermediate_size (null: 3 x hidden_size), "
        "num_attention_heads (null: hidden_size / head_dim), num_key_value_heads (null: half of those), head_dim, "
        "vocab_size, tie_word_embeddings, name, family (qwen3 or qwen3_5).",
    ] = field(default_factory=ShapeSettings)
    prompt_length: Annotated[int | list[int], "tokens that sequences share; 0 for none."] = 512
    suffix_length: Annotated[int | list[int], "tokens of each after them, which bear the loss."] = 64
    num_sequences: Annotated[int | list[int], "sequences of the batch."] = 16
    tree: Annotated[Tree | list[Tree], "flat, one prompt for all; nested, half of it for every four sequences."] = (
        "flat"
    )
    mode: Annotated[Mode | list[Mode], "forward is without gradients."] = "step"
    attention: Annotated[
        Attention | list[Attention], "strategies on unique tokens; auto is what `fit` would choose."
    ] = "auto"
    kernel: Annotated[
        Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4", "cudnn", "efficient"],
        "of the attention on unique tokens.",
    ] = "auto"
    attn_implementation: Annotated[str, "of the ordinary arm: Hugging Face's sdpa, flash_attention_2, eager."] = "sdpa"
    device: Annotated[Literal["cpu", "cuda"], "where it runs."] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16"], "of weights and computation."] = "float32"
    repeats: Annotated[int, "turns of each arm; medians are reported."] = 5
    float64_truth: Annotated[
        bool,
        "compare gradients with the ordinary model in float64, by the bars of `verify`; always so with recurrent "
        "layers. Otherwise float32 is compared with the ordinary arm (1e-4, relative L2 of each tensor), bfloat16 with "
        "float32.",
    ] = False
    max_teraflops: Annotated[
        float | None, "leave out cells whose ordinary step takes more 1e12 floating-point operations."
    ] = None
    num_threads: Annotated[int | None, "of torch on CPU."] = None
    csv: Annotated[str | None, "a file to write, a line for each cell and strategy."] = None
    plot: Annotated[str | None, "a .png or .svg file: measured against ideal speed-up. Needs matplotlib."] = None
