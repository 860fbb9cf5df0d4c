"""The keys of `radixtrain bench`."""

from dataclasses import dataclass, field
from typing import Literal

from radixtrain.settings.section import Section

Family = Literal["qwen3", "qwen3_5"]
Tree = Literal["flat", "nested"]
Mode = Literal["step", "forward"]
Attention = Literal["auto", "cascade", "path", "expand", "tree"]


@dataclass(frozen=True)
class ShapeSettings:
    """The sizes of a Qwen3, or a Qwen3.5, with random weights.

    num_hidden_layers: layers.
    hidden_size: width.
    intermediate_size: width of the MLP; null is 3 x hidden_size, as in the small Qwen3.
    num_attention_heads: query heads; null is hidden_size / head_dim.
    num_key_value_heads: key and value heads; null is half of the query heads.
    head_dim: width of a head.
    vocab_size: tokens of the vocabulary.
    tie_word_embeddings: whether the head is the embedding.
    name: in the table; null is layers x width.
    family: qwen3; or qwen3_5, a hybrid: three of every four layers have a recurrent state, with keys and values twice
        as wide as the model, in heads of head_dim.
    """

    num_hidden_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int = 64
    vocab_size: int = 4096
    tie_word_embeddings: bool = True
    name: str | None = None
    family: Family = "qwen3"


@dataclass
class Bench(Section):
    """Which steps are timed. A list as a value makes the grid larger.

    models: Qwen3 shapes with random weights: num_hidden_layers, hidden_size, intermediate_size (null: 3 x hidden_size),
        num_attention_heads (null: hidden_size / head_dim), num_key_value_heads (null: half of those), head_dim,
        vocab_size, tie_word_embeddings, name, family (qwen3 or qwen3_5).
    prompt_length: tokens that sequences share; 0 for none.
    suffix_length: tokens of each after them, which bear the loss.
    num_sequences: sequences of the batch.
    tree: flat, one prompt for all; nested, half of it for every four sequences.
    mode: forward is without gradients.
    attention: strategies on unique tokens; auto is what `fit` would choose.
    kernel: of the attention on unique tokens.
    attn_implementation: of the ordinary arm: Hugging Face's sdpa, flash_attention_2, eager.
    device: where it runs.
    dtype: of weights and computation.
    repeats: turns of each arm; medians are reported.
    float64_truth: compare gradients with the ordinary model in float64, by the bars of `verify`; always so with
        recurrent layers. Otherwise float32 is compared with the ordinary arm (1e-4, relative L2 of each tensor),
        bfloat16 with float32.
    max_teraflops: leave out cells whose ordinary step takes more 1e12 floating-point operations.
    num_threads: of torch on CPU.
    csv: a file to write, a line for each cell and strategy.
    plot: a .png or .svg file: measured against ideal speed-up. Needs matplotlib.
    """

    models: ShapeSettings | list[ShapeSettings] = field(default_factory=ShapeSettings)
    prompt_length: int | list[int] = 512
    suffix_length: int | list[int] = 64
    num_sequences: int | list[int] = 16
    tree: Tree | list[Tree] = "flat"
    mode: Mode | list[Mode] = "step"
    attention: Attention | list[Attention] = "auto"
    kernel: Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4", "cudnn", "efficient"] = "auto"
    attn_implementation: str = "sdpa"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    repeats: int = 5
    float64_truth: bool = False
    max_teraflops: float | None = None
    num_threads: int | None = None
    csv: str | None = None
    plot: str | None = None
