"""A tokenizer with an id for every byte, whose chat template is ChatML."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Source
from radixtrain.data.tokenized.cache import Tokenized, TokenizingOptions, tokenized

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def encoder() -> Callable[..., ChatEncoder]:
    def build(template: str = CHATML, **options: Any) -> ChatEncoder:
        backend = Tokenizer(models.BPE({name: byte for byte, name in bytes_to_unicode().items()}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
        return ChatEncoder(tokenizer, **options)

    return build


@pytest.fixture
def tokenize(tmp_path: Path, encoder: Callable[..., ChatEncoder]) -> Callable[..., Tokenized]:
    """Tokenises a file into a cache of this test. Options of the encoder and of tokenising go by their names."""

    def run(path: Path, columns: dict[str, str] | None = None, **options: Any) -> Tokenized:
        names = TokenizingOptions.__dataclass_fields__
        ours = {name: options.pop(name) for name in list(options) if name in names}
        settings = TokenizingOptions(**{"cache_dir": str(tmp_path / "cache"), **ours})
        return tokenized(Source(str(path), columns=columns), encoder(**options), settings)

    return run
