"""Train GRPO with TRL on generated pictures. A group shares its picture; one line differs from an ordinary script.

pip install torchvision    # needed by the processors of most of these models
python recipes/any_trainer/grpo_images.py --model Qwen/Qwen2.5-VL-3B-Instruct
"""

import argparse
from difflib import SequenceMatcher

import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from trl import GRPOConfig, GRPOTrainer

from radixtrain import share_prefixes, sharing_report


def likeness(completions: list, answer: list[str], **columns: object) -> list[float]:
    return [SequenceMatcher(None, c[0]["content"].lower(), a).ratio() for c, a in zip(completions, answer, strict=True)]


def picture(color: str) -> Image.Image:
    ImageDraw.Draw(drawn := Image.new("RGB", (448, 448), "white")).ellipse((112, 112, 336, 336), fill=color)
    return drawn


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model for images, listed in docs/families.md")
parser.add_argument("--output_dir", default="runs/grpo_images")
parser.add_argument("--max_steps", type=int, default=10)
parser.add_argument("--learning_rate", type=float, default=1e-6)
options = vars(parser.parse_args())
path = options.pop("model")
question = [{"role": "user", "content": "What color is the circle?"}]
colors = ["red", "green", "blue", "yellow"]
rows = Dataset.from_list([{"prompt": question, "image": picture(color), "answer": color} for color in colors])
sizes = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 16, "logging_steps": 1}
trainer = GRPOTrainer(path, likeness, GRPOConfig(bf16=torch.cuda.is_available(), **sizes, **options), rows)
share_prefixes(trainer.model)  # <- added; with beta > 0 also trainer.ref_model
trainer.train()
print(sharing_report(trainer))
