"""Use `RadixCollator` in your own LightningModule. Two lines differ from an ordinary script, marked below.

make fit && python recipes/lightning_module.py            # on the demo's chats and starting model
"""

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from radixtrain import RadixCollator, share_prefixes
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows


class FineTuning(L.LightningModule):
    def __init__(self, checkpoint: str, learning_rate: float):
        super().__init__()
        self.learning_rate = learning_rate
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")  # bfloat16 rounds small updates away
        self.model = share_prefixes(model.train())  # <- was model.train()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        if batch_idx % 10 == 0:
            self.print(f"batch {batch_idx}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/lightning_module")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = parser.parse_args()

    L.seed_everything(0)
    tokenizer = load_tokenizer(options.model)
    encoded = ChatEncoder(tokenizer).encode_all(read_rows(options.train_file))
    rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for samples in encoded for sample in samples]
    collator = RadixCollator()  # <- was DataCollatorForSeq2Seq(tokenizer)
    loader = DataLoader(rows, batch_size=16, shuffle=True, collate_fn=collator)
    module = FineTuning(options.model, options.learning_rate)
    settings: dict[str, Any] = {"gradient_clip_val": 1.0, "logger": False, "enable_checkpointing": False}
    precision: Any = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    trainer = L.Trainer(max_steps=options.max_steps, precision=precision, **settings)
    trainer.fit(module, loader)
    module.model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
