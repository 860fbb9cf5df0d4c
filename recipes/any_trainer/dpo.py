"""Train DPO with TRL. Pairs share their prompt, and all rows the system prompt; one line differs from a usual script.

make fit && python recipes/any_trainer/dpo.py           # on the demo's chats and starting model
python recipes/any_trainer/dpo.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 1e-6
"""

import argparse

import torch
from datasets import Dataset, load_dataset
from trl import DPOConfig, DPOTrainer

from radixtrain import share_prefixes, sharing_report


def loud(answer: dict[str, str]) -> list[dict[str, str]]:
    return [{**answer, "content": answer["content"].upper()}]  # for the demo: what is not wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/dpo")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="high: the demo's weights are random")
    options = vars(parser.parse_args())
    path, file = options.pop("model"), options.pop("train_file")
    chats = load_dataset("json", data_files=file, split="train")["messages"][:]
    pairs = [{"prompt": chat[:-1], "chosen": chat[-1:], "rejected": loud(chat[-1])} for chat in chats]
    arguments = DPOConfig(**options, bf16=torch.cuda.is_available(), logging_steps=1, save_strategy="no")
    trainer = DPOTrainer(path, args=arguments, train_dataset=Dataset.from_list(pairs))  # loads a reference too
    share_prefixes(trainer.model), share_prefixes(trainer.ref_model)  # <- added
    trainer.train()
    print(sharing_report(trainer))


if __name__ == "__main__":
    main()
