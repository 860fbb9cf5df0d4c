"""Train a classifier with Hugging Face's Trainer. Rows share their instruction; one line differs from a usual script.

make fit && python recipes/any_trainer/classification.py    # on the demo's chats and starting model
python recipes/any_trainer/classification.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 2e-5
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

from radixtrain import share_prefixes, sharing_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="runs/demo/model")
parser.add_argument("--train_file", default="runs/demo/train.jsonl")
parser.add_argument("--output_dir", default="runs/demo/classification")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--learning_rate", type=float, default=1e-3, help="high: the demo's weights are random")
options = vars(parser.parse_args())
path, file = options.pop("model"), options.pop("train_file")
tokenizer = AutoTokenizer.from_pretrained(path)
chats = load_dataset("json", data_files=file, split="train")["messages"][:]
answers = [chat[-1]["content"].splitlines()[0] for chat in chats]  # in the demo: the queue of a question
classes = {answer: index for index, answer in enumerate(sorted(set(answers)))}
prompts = [tokenizer.apply_chat_template(chat[:-1], return_dict=True) for chat in chats]
rows = [{**prompt, "labels": classes[answer]} for prompt, answer in zip(prompts, answers, strict=True)]
set_seed(0)  # the score head is new
model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(classes), dtype="float32")
arguments = TrainingArguments(**options, bf16=torch.cuda.is_available(), logging_steps=1, save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
share_prefixes(trainer.model)  # <- added
trainer.train()
print(sharing_report(trainer))
