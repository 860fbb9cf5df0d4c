"""Train SFT with TRL's own collator. Rows share a system prompt; one line differs from an ordinary script.

make fit && python recipes/any_trainer/sft.py             # on the demo's chats and starting model
python recipes/any_trainer/sft.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 2e-5
"""

import argparse

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from radixtrain import share_prefixes, sharing_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/sft")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = vars(parser.parse_args())
    path, file = options.pop("model"), options.pop("train_file")
    chats = load_dataset("json", data_files=file, split="train")
    rows = chats.map(
        lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}, remove_columns="messages"
    )
    arguments = SFTConfig(**options, bf16=torch.cuda.is_available(), logging_steps=1, save_strategy="no")
    trainer = SFTTrainer(path, args=arguments, train_dataset=rows)
    share_prefixes(trainer.model)  # <- added
    trainer.train()
    print(sharing_report(trainer))


if __name__ == "__main__":
    main()
