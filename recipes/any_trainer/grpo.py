"""Train GRPO with TRL. The rows of a group share their prompt; one line differs from an ordinary script.
For RLOO, call `train(RLOOTrainer, RLOOConfig)` of TRL.

make fit && python recipes/any_trainer/grpo.py            # on the demo's chats and starting model
python recipes/any_trainer/grpo.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 1e-6
"""

import argparse
from difflib import SequenceMatcher

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from radixtrain import share_prefixes, sharing_report


def likeness(completions: list, answer: list[str], **columns: object) -> list[float]:
    return [SequenceMatcher(None, c[0]["content"], a).ratio() for c, a in zip(completions, answer, strict=True)]


def train(trainer_class: type = GRPOTrainer, config_class: type = GRPOConfig) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/grpo")
    parser.add_argument("--max_steps", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="high: the demo's weights are random")
    options = vars(parser.parse_args())
    path, file = options.pop("model"), options.pop("train_file")
    chats = load_dataset("json", data_files=file, split="train")
    rows = chats.map(lambda row: {"prompt": row["messages"][:-1], "answer": row["messages"][-1]["content"]})
    sizes = {"num_generations": 4, "max_completion_length": 16, "gradient_accumulation_steps": 2, "logging_steps": 1}
    arguments = config_class(per_device_train_batch_size=4, bf16=torch.cuda.is_available(), **sizes, **options)
    trainer = trainer_class(path, likeness, arguments, rows.remove_columns("messages"))
    share_prefixes(trainer.model)  # <- added; with beta > 0 also trainer.ref_model
    trainer.train()
    print(sharing_report(trainer))


if __name__ == "__main__":
    train()
