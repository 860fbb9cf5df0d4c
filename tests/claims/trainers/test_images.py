"""TRL's trainers on rows with images: equal numbers, each image once in the tower.

Models and processors are made here. The picture of a row is in its column `image`; several rows have the same one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import cases
from tests.support.batches import IMAGE, KINDS
from tests.support.trainers import (
    SIZE,
    Comparison,
    Share,
    _template,
    compare,
    count_images,
    llava_processor,
    settings,
    word_tokenizer,
)

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<image>", "<start>", "<end>", "<video>"]


OF_IDEFICS = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]


def picture(seed: int, height: int = SIZE) -> Any:
    """Random colors in squares of 7 pixels."""
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (height // 7, SIZE // 7, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(7, 0).repeat(7, 1))


def _tokenizer(**options: Any) -> Any:
    vocabulary = [*WORDS, *OF_IDEFICS, *(f"w{n}" for n in range(52))]
    assert vocabulary[IMAGE] == "<image>"
    own = {"padding_side": "left", "additional_special_tokens": [*WORDS[5:], *OF_IDEFICS]}  # the side as TRL loads it
    return word_tokenizer(vocabulary, *WORDS[:3], **own, **options)


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


GENERATIONS, MAX_COMPLETION = 8, 6
ENDS = [1, 15, 25, 35, 45]  # tokens that end a completion: many, so that completions differ in length
ADAPTERS = {
    "decoder": r".*language_model.*\.(q_proj|v_proj)",
    "decoder and tower": r".*\.(q_proj|v_proj|qkv|down_proj|linear_fc1)",
}
MIXED = {**dict.fromkeys(PROCESSORS, [SIZE] * 3), "Qwen2.5-VL": [SIZE, 84, SIZE], "Qwen3-VL": [SIZE, 84, SIZE]}


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join(f"w{n}" for n in rng.integers(0, 50, count))


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rows_of(name: str, number: int = 6, counts: tuple[int, ...] = ()) -> Any:
    """`image`, `prompt`, `chosen`, `rejected`: three pictures, two questions of each, and two different answers.

    counts: of the pictures of each row, in `images` in place of `image`; a second one may be the first of another row.
    """
    from datasets import Dataset, Image, List

    rng = np.random.default_rng(0)
    pictures = [picture(seed, height) for seed, height in enumerate(MIXED[name])]
    question = words(rng, 14)  # the same for all pictures, so that only these tell the prompts apart
    rows = [
        {
            "image": pictures[index // 2 % 3],
            "prompt": said("user", f"{question} {words(rng, 2)}"),
            "chosen": said("assistant", words(rng, int(rng.integers(3, 7)))),
            "rejected": said("assistant", words(rng, int(rng.integers(3, 7)))),
        }
        for index in range(number)
    ]
    if not counts:
        return Dataset.from_list(rows).cast_column("image", Image())
    for index, row in enumerate(rows):
        of_row = [row.pop("image"), pictures[(index // 2 + 1) % 3]]
        row["images"] = of_row[: counts[index]]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


class Passes:
    """How many images went through the tower of each run with gradients, and how many of these were distinct."""

    def __init__(self) -> None:
        self.runs: list[list[tuple[int, int]]] = []

    def watch(self, model: Any) -> Any:
        """Count from now on."""
        self.runs.append(count_images(model))
        return model

    def check(self) -> None:
        plain, shared = self.runs
        assert plain and len(plain) == len(shared)
        assert [images for images, _ in shared] == [distinct for _, distinct in plain], "one pass for each"
        assert sum(images for images, _ in plain) > 1.5 * sum(images for images, _ in shared), "nothing to share"


def model_of(name: str, seed: int = 0) -> Any:
    model = KINDS[name].build(seed)
    model.generation_config.eos_token_id = ENDS
    model.config._name_or_path = ""
    return model


def with_adapters(model: Any, part: str | None) -> Any:
    from peft import LoraConfig, get_peft_model

    if part is None:
        return model
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=ADAPTERS[part], init_lora_weights=False))
    towers = [name for name, value in adapted.named_parameters() if value.requires_grad and "vis" in name]
    assert bool(towers) == (part == "decoder and tower")
    return adapted


def checked(build: Callable[[Share, Passes], Any], **options: Any) -> Comparison:
    """Train both, and assert equal numbers, equal counts of tokens, and one tower pass for each distinct image."""
    passes = Passes()
    found = compare(lambda share: build(share, passes), **options)
    passes.check()
    return found


CASES = [*((name, None) for name in PROCESSORS), ("Qwen3-VL", "decoder"), ("Qwen3-VL", "decoder and tower")]


def rollouts(
    name: str, adapters: str | None, trainer_name: str, folder: Any, counts: tuple[int, ...] = (), **others: Any
) -> Comparison:
    """Both runs of GRPO or RLOO, with 8 completions of each prompt, a reference, and the same completions."""
    import trl

    trainer_class, config = getattr(trl, f"{trainer_name}Trainer"), getattr(trl, f"{trainer_name}Config")
    model_of(name, seed=1).save_pretrained(folder / "reference")
    completions: list[list[list[int]]] = []

    def build(share: Share, passes: Passes) -> Any:
        completions.append(drawn := [])

        def small_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            drawn.extend(completion_ids)
            return [sum(token < 32 for token in ids) / MAX_COMPLETION for ids in completion_ids]

        sizes = {"num_generations": GENERATIONS, "per_device_train_batch_size": GENERATIONS, "beta": 0.1}
        args = config(**settings(folder, **{**sizes, "max_completion_length": MAX_COMPLETION, **others}))
        policy = model_of(name)
        policy.config._name_or_path = str(folder / "reference")
        model = share(passes.watch(with_adapters(policy, adapters)))
        rows = rows_of(name, counts=counts).remove_columns(["chosen", "rejected"])
        trainer = trainer_class(model, small_tokens, args, rows, processing_class=PROCESSORS[name]())
        if trainer.ref_model is not None:
            share(trainer.ref_model)
        return trainer

    found = checked(build)
    plain, shared = completions
    assert plain == shared and len(set(map(len, plain))) > 1
    assert max(entry.get("kl", 0.0) for entry in found.shared.entries) > 1e-6, "the reference is another model"
    assert found.shared.entries[0]["reward_std"] > 0
    return found


SEVERAL = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}  # a micro-batch is a generation batch
ROLLOUTS = {
    **{f"GRPO, {name}, adapters: {part}": (name, "GRPO", part, (), {}) for name, part in CASES},
    # One or two images in a row, in two groups. TRL 1.16 cannot mix rows without an image in.
    **{
        f"GRPO, several images, {name}": (name, "GRPO", None, (2, 1, 2, 2, 1, 1), SEVERAL)
        for name in ("LLaVA", "Qwen2.5-VL", "Qwen3-VL", "Gemma 3")
    },
    **{
        f"GRPO, {others}": ("Qwen3-VL", "GRPO", None, (), others)
        for others in ({"num_iterations": 2}, {"steps_per_generation": 4}, {"gradient_checkpointing": True})
    },
    "RLOO": ("Qwen3-VL", "RLOO", None, (), {}),
}


@pytest.mark.parametrize("case", cases(ROLLOUTS, ["GRPO, Qwen3-VL, adapters: None"]))
def test_rollouts(case: str, tmp_path: Any, table: Callable[..., None]) -> None:
    name, trainer, adapters, counts, others = ROLLOUTS[case]
    found = rollouts(name, adapters, trainer, tmp_path, counts, **others)
    assert found.r > (3 if counts else 2)
    table(f"with images: {case}", found)


SEVERAL_PAIRS = [(name, None, (2, 1, 2, 2, 0, 1)) for name in ("LLaVA", "Qwen3-VL", "Gemma 3")]


@pytest.mark.parametrize(
    ("name", "adapters", "counts"), cases([*((*case, ()) for case in CASES), *SEVERAL_PAIRS], [("LLaVA", None, ())])
)
def test_dpo(
    name: str, adapters: str | None, counts: tuple[int, ...], tmp_path: Any, table: Callable[..., None]
) -> None:
    """The reference is another model, or the same one without its adapters. counts: images of each row, if not one."""
    from trl import DPOConfig, DPOTrainer

    def build(share: Share, passes: Passes) -> Any:
        model = share(passes.watch(with_adapters(model_of(name), adapters)))
        reference = share(model_of(name, seed=1)) if adapters is None else None
        args, rows = DPOConfig(**settings(tmp_path, max_length=None)), rows_of(name, counts=counts)
        return DPOTrainer(model, reference, args, train_dataset=rows, processing_class=PROCESSORS[name]())

    found = checked(build)
    assert counts or found.r > 1.9
    table(f"DPO with images, {name}, adapters: {adapters}, images: {counts or 1}", found)


@pytest.mark.parametrize(("name", "adapters"), cases(CASES, [("Qwen3-VL", "decoder and tower")]))
def test_sft(name: str, adapters: str | None, tmp_path: Any, table: Callable[..., None]) -> None:
    from trl import SFTConfig, SFTTrainer

    def build(share: Share, passes: Passes) -> Any:
        model = share(passes.watch(with_adapters(model_of(name), adapters)))
        rows = rows_of(name).remove_columns("rejected").rename_column("chosen", "completion")
        args = SFTConfig(**settings(tmp_path, max_length=None, per_device_train_batch_size=6))
        return SFTTrainer(model, args, train_dataset=rows, processing_class=PROCESSORS[name]())

    found = checked(build)
    assert found.r > 1.5
    table(f"SFT with images, {name}, adapters: {adapters}", found)
