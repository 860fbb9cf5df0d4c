"""Distill a teacher. Both models share the prompts of a batch; one line differs from an ordinary script.

make fit && python recipes/any_trainer/distillation.py    # on the demo's chats and starting model
python recipes/any_trainer/distillation.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B --train_file chats.jsonl
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain import share_prefixes, sharing_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="runs/demo/model", help="the student")
parser.add_argument("--teacher", help="default, for the demo: the student's architecture with other weights")
parser.add_argument("--train_file", default="runs/demo/train.jsonl")
parser.add_argument("--output_dir", default="runs/demo/distillation")
parser.add_argument("--max_steps", type=int, default=20)
options = parser.parse_args()
torch.manual_seed(1)  # the teacher of the demo is drawn
tokenizer = AutoTokenizer.from_pretrained(options.model)
student = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")  # bfloat16 rounds updates away
teacher = AutoModelForCausalLM.from_pretrained(options.teacher) if options.teacher else type(student)(student.config)
student, teacher = share_prefixes(student.train()), share_prefixes(teacher.requires_grad_(False))  # <- added the calls
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5 if options.teacher else 1e-3)
chats = load_dataset("json", data_files=options.train_file, split="train").shuffle(seed=0)
for step, some in zip(range(options.max_steps), chats.iter(batch_size=8), strict=False):
    batch = tokenizer.apply_chat_template(some["messages"], padding=True, return_dict=True, return_tensors="pt")
    kept = batch["attention_mask"].bool()  # every token of every row, without padding
    with torch.no_grad():
        wanted = teacher(**batch, use_cache=False).logits[kept].log_softmax(-1)
    found = student(**batch, use_cache=False).logits[kept].log_softmax(-1)
    loss = torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
student.save_pretrained(options.output_dir)
print(sharing_report(student))
