"""A tokenizer with an id for every byte, so that a test writes ids as bytes: `[*b"hi", END]`. No file is needed."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

TWO_NEWLINES, START, END, BOS = 256, 257, 258, 259  # two newlines are the only merge
VOCAB_SIZE = 260
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|bos|>")
CHATML = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# The same text, with generation markers.
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def byte_tokenizer(
    template: object = CHATML, *, bos: str | None = None, eos: str = "<|im_end|>", special: tuple[str, ...] = SPECIAL
) -> PreTrainedTokenizerFast:
    """bos: also put before every text, as Llama's tokenizer does. special: their ids begin at START."""
    names = bytes_to_unicode()
    newline = names[ord("\n")]
    vocabulary = {names[byte]: byte for byte in range(256)} | {newline * 2: TWO_NEWLINES}
    backend = Tokenizer(models.BPE(vocabulary, [(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text) for text in special])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=template)
