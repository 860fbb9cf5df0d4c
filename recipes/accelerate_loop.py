"""Use `RadixCollator` in a loop with Accelerate. Two lines differ from an ordinary script, marked below.

pip install accelerate
make fit && python recipes/accelerate_loop.py             # on the demo's chats and starting model
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from radixtrain import RadixCollator, share_prefixes
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/accelerate_loop")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = parser.parse_args()

    set_seed(0)
    tokenizer = load_tokenizer(options.model)
    encoded = ChatEncoder(tokenizer).encode_all(read_rows(options.train_file))
    rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for samples in encoded for sample in samples]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")  # bfloat16 rounds small updates away
    model = share_prefixes(model.train())  # <- before Accelerate wraps it
    collator = RadixCollator()  # <- was DataCollatorForSeq2Seq(tokenizer)
    loader = DataLoader(rows, batch_size=16, shuffle=True, collate_fn=collator)
    precision = "bf16" if torch.cuda.is_available() else "no"
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(options.epochs):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if number % 10 == 0:
                accelerator.print(f"epoch {epoch}, batch {number}: loss {loss.item():.4f}")
    accelerator.unwrap_model(model).save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
