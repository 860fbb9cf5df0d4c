"""Time GRPO on prompts with an image with `share_prefixes`, and compare with the ideal.

    python recipes/benchmarks/images.py
    python recipes/benchmarks/images.py --layers 4 --hidden 256 --repeats 5 --threads 1

Nothing is downloaded: a LLaVA with random weights, its vision tower half as wide, and pictures of random colors.
A group is 8 completions of up to 64 tokens to 1,024 tokens of an image and a question of 16. A step is TRL's loss of
such a group and its backward pass, without generation, rewards and the optimizer. The untouched trainer and the shared
one alternate on the same batch and the same weights.

The ideal step takes the untouched one's time outside the tower, divided by padded tokens per unique token, and its time
in the tower, divided by images per distinct image. Then the same for eight rows that share nothing.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from any_trainer import GENERATIONS, VOCAB_SIZE, Step, seconds_and_gradient, step_of, words
from datasets import Dataset
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from trl import GRPOConfig, GRPOTrainer

from radixtrain import position_wise, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of

PATCH, QUESTION, COMPLETION = 14, 16, 64
SPECIAL = ["<pad>", "<eos>", "<unk>", "<image>"]
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %} {{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


def made_processor(size: int) -> LlavaProcessor:
    vocabulary = [*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), VOCAB_SIZE))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<image>")])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    images = LlavaImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    own = {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaProcessor(images, tokenizer, **own, chat_template=TEMPLATE)


def made_model(size: int, layers: int, hidden: int) -> Any:
    """The same weights each time."""
    text = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    vision = CLIPVisionConfig(
        hidden_size=hidden // 2,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        image_size=size,
        patch_size=PATCH,
    )
    torch.manual_seed(0)
    own = {"image_token_id": SPECIAL.index("<image>"), "vision_feature_layer": -1}
    config = LlavaConfig(vision_config=vision, text_config=text, **own)
    return LlavaForConditionalGeneration(config).train()


def picture(seed: int, size: int) -> Image.Image:
    squares = np.random.default_rng(seed).integers(0, 256, (size // PATCH, size // PATCH, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(PATCH, 0).repeat(PATCH, 1))


class Tower:
    """Counts the images that go through the tower of a model, and the tokens of its calls."""

    def __init__(self, model: Any) -> None:
        self.images = 0
        self.inputs: dict[str, Tensor] = {}
        tower = backbone_of(model).vision_tower
        self._forward, tower.forward = tower.forward, self._counted
        backbone_of(model).register_forward_pre_hook(self._keep, with_kwargs=True)

    @position_wise  # it only counts
    def _counted(self, *args: Any, **given: Any) -> Any:
        self.images += len(args[0] if args else given["pixel_values"])
        return self._forward(*args, **given)

    @position_wise
    def _keep(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.inputs = {name: value for name, value in given.items() if isinstance(value, Tensor)}

    def images_of(self, step: Step, model: nn.Module) -> int:
        """Of one step."""
        self.images = 0
        seconds_and_gradient(step, model)
        return self.images


def grpo(model: Any, processor: LlavaProcessor, size: int, folder: str) -> tuple[Step, nn.Module]:
    rng = np.random.default_rng(0)
    questions = [[{"role": "user", "content": words(rng, QUESTION)}] for _ in range(2)]
    rows = [{"prompt": question, "image": picture(seed, size)} for seed, question in enumerate(questions)]
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=GENERATIONS,
        num_generations=GENERATIONS,
        gradient_accumulation_steps=1,
        max_completion_length=COMPLETION,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    torch.manual_seed(0)

    def likes_small(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(np.mean(ids)) for ids in completion_ids]

    return step_of(GRPOTrainer(model, likes_small, args, Dataset.from_list(rows), processing_class=processor))


def different_rows(model: Any, processor: LlavaProcessor, size: int) -> tuple[Step, nn.Module]:
    """Eight rows, each after a picture of its own."""
    rng = np.random.default_rng(1)
    texts = [f"<image> {words(rng, QUESTION + COMPLETION)}" for _ in range(GENERATIONS)]
    pictures = [[picture(10 + seed, size)] for seed in range(GENERATIONS)]
    batch = processor(images=pictures, text=texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[:, :-COMPLETION] = -100
    return lambda: model(**batch, labels=labels, use_cache=False).loss, model


def tower_seconds(model: Any, pixel_values: Tensor) -> float:
    """Of the tower and the projector, forward and backward."""
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    features = backbone_of(model).get_image_features(pixel_values, return_dict=True).pooler_output
    sum(each.square().mean() for each in features).backward()
    return time.perf_counter() - began


def in_turns(arms: list[Callable[[], float]], repeats: int) -> list[float]:
    """The median of each, after one that is not counted."""
    times = [[arm() for arm in arms] for _ in range(repeats + 1)][1:]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def timed(step: Step, model: nn.Module) -> Callable[[], float]:
    return lambda: seconds_and_gradient(step, model)[0]


def measure(size: int, layers: int, hidden: int, repeats: int) -> list[str]:
    processor = made_processor(size)
    pair = [made_model(size, layers, hidden), share_prefixes(made_model(size, layers, hidden))]
    towers = [Tower(model) for model in pair]
    with tempfile.TemporaryDirectory() as folder:
        steps = [grpo(model, processor, size, folder) for model in pair]
    before, after = (tower.images_of(*step) for tower, step in zip(towers, steps, strict=True))
    gradient, shared_gradient = (seconds_and_gradient(*step)[2] for step in steps)
    off = ((gradient - shared_gradient).norm() / gradient.norm()).item()
    report = sharing_report(pair[1])
    padded = towers[0].inputs["input_ids"].numel()
    unique = report.num_unique_tokens / report.num_shared
    pixels = towers[0].inputs["pixel_values"]
    arms = [*(timed(*step) for step in steps), lambda: tower_seconds(pair[0], pixels)]
    untouched, shared, tower = in_turns(arms, repeats)
    ideal = (untouched - tower) * unique / padded + tower * after / before
    rows = [different_rows(model, processor, size) for model in pair]
    plain, with_nothing = in_turns([timed(*step) for step in rows], repeats)
    return [
        "| tokens | unique | images | distinct | ms | of the tower | shared | ideal | ideal / shared | off by |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| {padded:,} | {unique:,.0f} | {before} | {after} | {untouched * 1e3:,.0f} | {tower * 1e3:,.0f} "
        f"| {shared * 1e3:,.0f} | {ideal * 1e3:,.0f} | {ideal / shared:.2f} | {off:.1e} |",
        f"nothing shared: {plain * 1e3:,.0f} ms untouched, {with_nothing * 1e3:,.0f} ms: {with_nothing / plain:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=int, default=32 * PATCH, help="its side in pixels: (side / 14) ** 2 tokens")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = vars(parser.parse_args())
    torch.set_num_threads(options.pop("threads"))
    print("\n".join(measure(options.pop("image"), **options)))


if __name__ == "__main__":
    main()
