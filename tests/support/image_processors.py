"""Processors of tiny models that see images, made here: a word is a token, and nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import numpy as np
from image_batches import IMAGE

__all__ = ["PROCESSORS", "llava_processor", "picture"]

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<image>", "<start>", "<end>", "<video>"]
OF_IDEFICS = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %} {{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% if m.role == 'assistant' %} <eos>{% endif %} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
SIZE = 56  # of pictures, in pixels


def picture(seed: int, height: int = SIZE) -> Any:
    """Random colors in squares of 7 pixels."""
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (height // 7, SIZE // 7, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(7, 0).repeat(7, 1))


def _tokenizer(**options: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*WORDS, *OF_IDEFICS, *(f"w{n}" for n in range(52))]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert vocabulary[IMAGE] == "<image>"
    own = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    own["padding_side"] = "left"  # as TRL loads it
    special = [*WORDS[5:], *OF_IDEFICS]
    return PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=special, **own, **options)


def _template(image: str = "<image>") -> str:
    return TEMPLATE.replace("IMAGE", image)


def llava_processor(tokenizer: Any) -> Any:
    """Of images of 28 x 28 pixels, four placeholders each. tokenizer: has one for `<image>`."""
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    images = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    own = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaProcessor(images, tokenizer, **own, chat_template=_template())


def idefics3() -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    edges = {"size": {"longest_edge": SIZE}, "max_image_size": {"longest_edge": SIZE}}
    images = Idefics3ImageProcessorPil(**edges, do_image_splitting=False)
    return Idefics3Processor(images, _tokenizer(), image_seq_len=4, chat_template=_template())


def gemma3() -> Any:
    """A start of an image in the text stands for it, with its placeholders and its end."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<end>"}
    images = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    return Gemma3Processor(
        images, _tokenizer(extra_special_tokens=names), image_seq_length=16, chat_template=_template("<start>")
    )


def qwen(class_name: str) -> Any:
    """Without videos, whose processor needs torchvision."""
    import transformers
    from transformers import ProcessorMixin
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideos(getattr(transformers, class_name)):  # type: ignore[misc]
        image_token, image_token_id, video_token, video_token_id = "<image>", IMAGE, "<video>", 8

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    images = Qwen2VLImageProcessorPil(patch_size=14, min_pixels=28 * 28, max_pixels=112 * 112)
    return WithoutVideos(images, _tokenizer(), _template("<start><image><end>"))


PROCESSORS: dict[str, Callable[[], Any]] = {
    "LLaVA": lambda: llava_processor(_tokenizer()),
    "Idefics3": idefics3,
    "Qwen2.5-VL": lambda: qwen("Qwen2_5_VLProcessor"),
    "Qwen3-VL": lambda: qwen("Qwen3VLProcessor"),
    "Gemma 3": gemma3,
}
