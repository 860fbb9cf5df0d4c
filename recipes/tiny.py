"""Create a tokenizer and a Qwen3 checkpoint small enough for a laptop, so that recipes need no download.

    texts --train_tokenizer--> tokenizer --tiny_qwen3--> model        both load with Auto*.from_pretrained once saved

Except for the size, everything is as in Qwen3: the pre-tokenizer, the special tokens, the chat template's behaviour,
the architecture. Recipes run as scripts, so their folder is on the path and `import tiny` finds this file.
"""

from collections.abc import Iterable, Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "tiny_qwen3", "train_tokenizer"]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, START, END, "<think>", "</think>"]

# Qwen's split: contractions, words with the blank before them, single digits, punctuation, line ends, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The stock Qwen3 template without tools: thinking is dropped from earlier turns, and the last assistant turn always
# carries a thinking block, empty if there is none.
CHAT_TEMPLATE = """\
{%- if tools %}{{- raise_exception('this small template knows no tools') }}{%- endif %}
{%- set ns = namespace(last_user=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('this small template knows no role ' + message.role) }}
    {%- endif %}
    {%- set thinking, content = '', message.content %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last_user and (loop.last or thinking) %}
        {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Qwen3's split, and by default its special tokens and chat template.

    Pass every distinct text once: a prompt that is repeated in every row would dominate the merges.

    texts: what to learn the merges from.
    vocab_size: upper bound on the entries, including special tokens and the 256 bytes; short texts have fewer merges.
    special_tokens: those of Qwen3, optionally followed by others.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def tiny_qwen3(
    tokenizer: PreTrainedTokenizerBase, layers: int = 2, hidden: int = 128, seed: int = 0
) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights in float32, the same ones for the same seed; the global generator does not change.

    tokenizer: gives the vocabulary, padded to a multiple of 64 rows, and the ids of the special tokens.
    layers: decoder layers.
    hidden: width, a multiple of 64: heads are 32 wide, two query heads share one key/value head.
    """
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=hidden**-0.5,  # the usual 0.02 is too small at this width: recipes/LOG.md
        tie_word_embeddings=True,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
