"""Use `RadixCollator` with TRL's SFTTrainer, which tokenises and masks the chats. Two lines differ, marked below.

pip install 'trl>=1.10'
make fit && python recipes/trl_sft.py                     # on the demo's chats and starting model
python recipes/trl_sft.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --output_dir out --learning_rate 2e-5
"""

import argparse
from typing import Any

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from radixtrain import RadixCollator, share_prefixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/trl_sft")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = parser.parse_args()

    chats = load_dataset("json", data_files=options.train_file, split="train")
    arguments = SFTConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        learning_rate=options.learning_rate,
        max_length=4096,
        bf16=torch.cuda.is_available(),
        logging_steps=10,
        save_strategy="no",
        seed=0,
    )
    trainer = SFTTrainer(
        model=options.model,
        data_collator=RadixCollator(),  # <- was TRL's own; leave packing and padding_free off
        args=arguments,
        train_dataset=chats.map(loss_on_the_last_message, remove_columns="messages"),
    )
    share_prefixes(trainer.model)  # <- added
    trainer.train()
    trainer.save_model()


def loss_on_the_last_message(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


if __name__ == "__main__":
    main()
