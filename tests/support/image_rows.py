"""Padded calls with images, and whether their gradient is the ordinary one, of the tower too.

Processors of tiny models that see images, made here: a word is a token, and nothing is downloaded.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from image_batches import IMAGE, ROWS, Kind, Row, batch_of, letters_of
from same_step import same_gradient
from torch import Tensor
from trainer_harness import image_keys

from radixtrain import share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.hf.sharing_report import SharingReport


def count_images(model: Any, has_gradients: bool = True) -> list[tuple[int, int]]:
    """How many images the tower gets in each call from now on, with gradients or without, and how many are distinct."""
    backbone, seen = backbone_of(model_inside(model)), list[tuple[int, int]]()
    real = backbone.get_image_features

    @functools.wraps(real)
    def counted(*args: Any, **given: Any) -> Any:
        given = {**inspect.signature(real).bind(*args, **given).arguments}
        given |= given.pop("kwargs", {})
        if torch.is_grad_enabled() == has_gradients:
            keys = image_keys(given)
            seen.append((len(keys), len(set(keys))))
        return real(**given)

    backbone.get_image_features = counted
    return seen


def same_call(model: Any, inputs: dict[str, Tensor], kept: Tensor, **options: Any) -> SharingReport:
    """Assert equal gradients of a padded call that is shared, the tower's too. options: of `share_prefixes`."""

    def loss_of(model: Any) -> Tensor:
        logits = model(**inputs, use_cache=False).logits[kept]
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
        return (logits.log_softmax(-1) * weights).mean()

    rung = same_gradient(model, loss_of, partial(share_prefixes, min_ratio=0.0, **options))
    reaches_tower = any("vis" in tensor.name or "tower" in tensor.name for tensor in rung.alive)
    assert reaches_tower or "pixel_values" not in inputs, "no gradient in the tower"
    report = sharing_report(model)
    assert report.num_shared == 1, str(report)
    return report


def same_model(model: Any) -> Any:
    return model


def check_padded(
    kind: Kind,
    rows: Sequence[Row] = ROWS,
    change: Callable[[Any], Any] = same_model,
    left: bool = False,
    **options: Any,
) -> int:
    """Assert equal gradients, and that the tower had each distinct image once. Returns the unique tokens.

    change: what is done to the model. options: of `share_prefixes`.
    """
    model, letters = change(kind.build()), letters_of(rows)
    images = count_images(model)
    report = same_call(model, *batch_of(kind, rows, left), **options)
    assert images[-1] == (len(set(letters)), len(set(letters))), "each image once"
    assert (report.num_images, report.num_distinct_images) == (len(letters), len(set(letters)))
    return report.num_unique_tokens


PADDED: dict[str, Callable[..., int]] = {
    "padded on the right": check_padded,
    "padded on the left": partial(check_padded, left=True),
}


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
