"""Share prefixes with Hugging Face's Trainer on generated pictures. One line differs from an ordinary script.

pip install accelerate torchvision    # needed by Trainer and most processors
python recipes/hf_trainer_images.py --model Qwen/Qwen2.5-VL-3B-Instruct
"""

import argparse

import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

from radixtrain import share_prefixes

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model for images, listed in docs/families.md")
parser.add_argument("--output_dir", default="runs/hf_trainer_images")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--learning_rate", type=float, default=1e-5)
options = vars(parser.parse_args())
name = options.pop("model")
processor = AutoProcessor.from_pretrained(name)
model = AutoModelForImageTextToText.from_pretrained(name, dtype="float32")  # bfloat16 rounds small updates away


def picture(color: str) -> Image.Image:
    ImageDraw.Draw(drawn := Image.new("RGB", (448, 448), "white")).ellipse((112, 112, 336, 336), fill=color)
    return drawn


def row(color: str, question: str, answer: str) -> dict:
    """Return the processor's output: lists of one row for tokens, and its image tensors unchanged."""
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    prompt = processor.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    texts = (prompt, prompt + answer + processor.tokenizer.eos_token)
    before, whole = (processor(images=[[picture(color)]], text=[text], return_tensors="pt") for text in texts)
    ids, start = whole["input_ids"][0], before["input_ids"].shape[1]
    of_tokens = {name: x[0] for name, x in whole.items() if x.shape == whole["input_ids"].shape}
    of_tokens["labels"] = ids.clone()
    of_tokens["labels"][:start] = -100
    return {**whole, **of_tokens}


def padded(rows: list[dict]) -> dict:
    """Pad what has a number for each token, and join the images."""
    fills = {"labels": -100}
    of_tokens = {name: [row[name] for row in rows] for name in rows[0] if rows[0][name].ndim == 1}
    joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0].keys() - of_tokens.keys()}
    pad = torch.nn.utils.rnn.pad_sequence
    return joined | {name: pad(x, batch_first=True, padding_value=fills.get(name, 0)) for name, x in of_tokens.items()}


asked = [("What color is the circle?", "It is {}."), ("What is drawn here?", "A circle."), ("Is it blue?", "It is {}.")]
rows = [row(color, ask, say.format(color)) for color in ("red", "green", "blue", "yellow") for ask, say in asked]
sizes = {"per_device_train_batch_size": 12, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
trainer = Trainer(
    model=share_prefixes(model),  # <- was model
    data_collator=padded,
    args=TrainingArguments(remove_unused_columns=False, bf16=torch.cuda.is_available(), **sizes, **options),
    train_dataset=rows,
    processing_class=processor,
)
trainer.train()
trainer.save_model()
