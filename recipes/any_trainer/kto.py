"""Train KTO with TRL. Rows share their system prompt; one line differs from an ordinary script.

make fit && python recipes/any_trainer/kto.py           # on the demo's chats and starting model
python recipes/any_trainer/kto.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 1e-6
"""

import argparse

import torch
from datasets import Dataset, load_dataset
from trl import KTOConfig, KTOTrainer

from radixtrain import share_prefixes, sharing_report


def loud(answer: dict[str, str]) -> list[dict[str, str]]:
    return [{**answer, "content": answer["content"].upper()}]  # for the demo: what is not wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/kto")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="high: the demo's weights are random")
    options = vars(parser.parse_args())
    path, file = options.pop("model"), options.pop("train_file")
    chats = load_dataset("json", data_files=file, split="train")["messages"][:]
    good = [{"prompt": chat[:-1], "completion": chat[-1:], "label": True} for chat in chats]
    bad = [{"prompt": chat[:-1], "completion": loud(chat[-1]), "label": False} for chat in chats]
    arguments = KTOConfig(**options, bf16=torch.cuda.is_available(), logging_steps=1, save_strategy="no")
    trainer = KTOTrainer(path, args=arguments, train_dataset=Dataset.from_list(good + bad).shuffle(seed=0))
    share_prefixes(trainer.model), share_prefixes(trainer.ref_model)  # <- added
    trainer.train()
    print(sharing_report(trainer))


if __name__ == "__main__":
    main()
