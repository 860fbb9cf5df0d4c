"""Compute one batch on all ranks together (sequence parallelism). Two lines differ from a script with DDP.

make fit && torchrun --nproc_per_node 2 recipes/sequence_parallel.py      # on the demo's chats and starting model
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from radixtrain import RadixCollator, share_prefixes
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="runs/demo/model")
parser.add_argument("--train_file", default="runs/demo/train.jsonl")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
options = parser.parse_args()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
dist.init_process_group(device_id=device if device.type == "cuda" else None)
encoded = ChatEncoder(load_tokenizer(options.model)).encode_all(read_rows(options.train_file))
rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for samples in encoded for sample in samples]
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")  # bfloat16 rounds small updates away
model = share_prefixes(model.to(device).train(), sp_group=dist.group.WORLD)  # <- before DDP wraps it
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
order = torch.Generator().manual_seed(0)  # <- of all ranks, in place of a DistributedSampler
loader = DataLoader(rows, batch_size=16, shuffle=True, generator=order, collate_fn=RadixCollator())
for batch in (batch for _ in range(options.epochs) for batch in loader):
    loss = model(**{name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
