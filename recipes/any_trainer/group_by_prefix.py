"""Train SFT with TRL on rows with several prompts, grouped by prompt. One line differs from an ordinary subclass, which
would return a RandomSampler. It works for any trainer that is based on Hugging Face's.

make fit && python recipes/any_trainer/group_by_prefix.py             # on the demo's chats and starting model
python recipes/any_trainer/group_by_prefix.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 2e-5
"""

import argparse

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from radixtrain import PrefixGroupedSampler, share_prefixes, sharing_report


class GroupedSFTTrainer(SFTTrainer):
    def _get_train_sampler(self, train_dataset=None):
        data, batch_size = self.train_dataset, self.args.train_batch_size
        return PrefixGroupedSampler(data, batch_size, seed=self.args.seed)  # <- was RandomSampler(data)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="runs/demo/model")
parser.add_argument("--train_file", default="runs/demo/train.jsonl")
parser.add_argument("--output_dir", default="runs/demo/group_by_prefix")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
options = vars(parser.parse_args())
path, file = options.pop("model"), options.pop("train_file")
chats = load_dataset("json", data_files=file, split="train")
rows = chats.map(
    lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}, remove_columns="messages"
)
arguments = SFTConfig(**options, bf16=torch.cuda.is_available(), logging_steps=1, save_strategy="no")
trainer = GroupedSFTTrainer(path, args=arguments, train_dataset=rows)
share_prefixes(trainer.model)
trainer.train()
print(sharing_report(trainer))
