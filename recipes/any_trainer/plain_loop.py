"""Train in your own loop on padded batches whose rows share a prompt. One line differs from an ordinary script.

make fit && python recipes/any_trainer/plain_loop.py    # on the demo's chats and starting model
python recipes/any_trainer/plain_loop.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 2e-5
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain import share_prefixes, sharing_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="runs/demo/model")
parser.add_argument("--train_file", default="runs/demo/train.jsonl")
parser.add_argument("--output_dir", default="runs/demo/plain_loop")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
options = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="right")
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")  # bfloat16 rounds small updates away
model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()
model = share_prefixes(model)  # <- added
optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
chats = load_dataset("json", data_files=options.train_file, split="train").shuffle(seed=0)
for step, some in zip(range(options.max_steps), chats.iter(batch_size=8), strict=False):
    batch = tokenizer.apply_chat_template(some["messages"], padding=True, return_dict=True, return_tensors="pt")
    batch = batch.to(model.device)
    labels = batch["input_ids"].where(batch["attention_mask"] == 1, -100)  # padding bears no loss
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
model.save_pretrained(options.output_dir)
print(sharing_report(model))
