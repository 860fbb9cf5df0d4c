"""Train radixtrain's own LightningModule with Lightning's trainer: the five lines of `main` after the options.

make fit && python recipes/lightning_trainer.py           # on the demo's chats and starting model

`radixtrain fit` drives the same module by its own loop, which also saves, stops and resumes at any step, and runs on
several devices. Use this if you need Lightning's callbacks.
"""

import argparse
from typing import Any

import lightning as L

from radixtrain.data.datamodule import SFTData
from radixtrain.training.module import RadixModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/lightning_trainer")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = parser.parse_args()
    settings: dict[str, Any] = {"max_steps": options.max_steps, "log_every_n_steps": 10, "accelerator": "auto"}

    L.seed_everything(0)
    data = SFTData(options.train_file, model_name_or_path=options.model, batch_size=16)
    module: Any = RadixModule(options.model, learning_rate=options.learning_rate)
    trainer = L.Trainer(devices=1, default_root_dir=options.output_dir, **settings)
    trainer.fit(module, datamodule=data)

    print(f"loss {float(trainer.callback_metrics['loss']):.4f}")
    module.model.save_pretrained(options.output_dir)
    data.tokenizer().save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
