"""Write the demo with a tiny Qwen3.5 instead of Qwen3: three layers with a recurrent state per attention layer.

    python recipes/qwen3_5.py                                # writes runs/qwen3_5
    python -m radixtrain fit --config configs/qwen3_5.yaml

The chats are those of `recipes/demo.py`. Except for its size and random weights, the model is a Qwen3.5: its
configuration, its gated delta rule, its special tokens, the behaviour of its chat template. `--multimodal` writes a
checkpoint with the vision tower, as Qwen publishes them; it is trained on text in the same way. Other recipes work with
the folder too:

    python recipes/trl_sft.py --model runs/qwen3_5/model --train_file runs/qwen3_5/train.jsonl
    python recipes/any_trainer/dpo.py --model runs/qwen3_5/model --train_file runs/qwen3_5/train.jsonl
"""

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from demo import write_demo
from tiny import SPECIAL_TOKENS, train_tokenizer
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.utils.logging import disable_progress_bar

__all__ = ["CHAT_TEMPLATE", "tiny_qwen3_5", "tiny_tokenizer"]

VISION = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}

# The stock Qwen3.5 template without tools and images: the answers after the last question carry a thinking block, empty
# if there is none, and so does the generation prompt; from earlier answers thinking is dropped.
CHAT_TEMPLATE = """\
{%- if tools %}{{- raise_exception('this small template knows no tools') }}{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if ns.last_user < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('this small template knows no role ' + message.role) }}
    {%- elif message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {%- set thinking, content = '', message.content | trim %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last_user %}
        {{- '<think>\\n' + thinking | trim + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is not defined or enable_thinking is not true %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def main() -> None:
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/qwen3_5"), help="must not hold anything yet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1200, help="training chats")
    parser.add_argument("--validation_rows", type=int, default=120, help="chats whose questions are not in training")
    parser.add_argument("--multimodal", action="store_true", help="a checkpoint that takes images too")
    options = vars(parser.parse_args())
    make_model = partial(tiny_qwen3_5, multimodal=options.pop("multimodal"))
    write_demo(**options, make_tokenizer=tiny_tokenizer, make_model=make_model)


def tiny_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer with the special tokens and the chat template of Qwen3.5."""
    return train_tokenizer(texts, vocab_size, [*SPECIAL_TOKENS, *VISION.values()], CHAT_TEMPLATE)


def tiny_qwen3_5(
    tokenizer: PreTrainedTokenizerBase, layers: int = 4, hidden: int = 128, seed: int = 0, multimodal: bool = False
) -> Qwen3_5ForCausalLM | Qwen3_5ForConditionalGeneration:
    """A Qwen3.5 with random weights in float32, the same ones for the same seed; the global generator does not change.

    tokenizer: from `tiny_tokenizer`; gives the vocabulary, padded to a multiple of 64 rows, and the ids.
    layers: decoder layers, of which every fourth attends.
    hidden: width, a multiple of 64: heads are 32 wide, in attention two query heads share one key/value head.
    multimodal: with a vision tower, one layer of width 64.
    """
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in VISION.items()}
    text = Qwen3_5TextConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        max_position_embeddings=4096,
        initializer_range=hidden**-0.5,  # the usual 0.02 is too small at this width: recipes/LOG.md
        tie_word_embeddings=True,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 64,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if not multimodal:
            return Qwen3_5ForCausalLM(text)
        return Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(
                text_config=text.to_dict(),
                vision_config=vision,
                **ids,
                tie_word_embeddings=True,
                bos_token_id=text.bos_token_id,
                eos_token_id=text.eos_token_id,
                pad_token_id=text.pad_token_id,
            )
        )


if __name__ == "__main__":
    main()
