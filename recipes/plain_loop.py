"""Train in your own loop, with optimizer steps that are split into micro-batches by unique tokens.

Three lines differ from an ordinary loop, marked below. Memory depends on unique tokens, so the split counts these; the
loss of a step is the mean over its labelled tokens, however the step is split.

make fit && python recipes/plain_loop.py                  # on the demo's chats and starting model
"""

import argparse
import random

import torch
from transformers import AutoModelForCausalLM

from radixtrain import StepCollator, share_prefixes, step_losses
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoded = ChatEncoder(load_tokenizer(options.model)).encode_all(read_rows(options.train_file))
    rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for samples in encoded for sample in samples]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")  # bfloat16 rounds small updates away
    model = share_prefixes(model.to(device).train())  # <-
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    collate = StepCollator(max_tokens=2048, min_shared_tokens=4)  # <-
    draw = random.Random(0)
    for number in range(options.max_steps):
        step = collate(draw.sample(rows, 16)).to(device)
        total = 0.0
        for loss in step_losses(model, step):  # <-
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0 or number == options.max_steps - 1:
            ratio = step.num_tokens / step.num_computed_tokens
            print(f"step {number}: loss {total:.4f}, r {ratio:.1f}, {len(step.micro_batches)} micro-batches")


if __name__ == "__main__":
    main()
