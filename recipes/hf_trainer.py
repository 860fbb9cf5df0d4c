"""Use `RadixCollator` with Hugging Face's Trainer. Two lines differ from an ordinary script, marked below.

pip install accelerate                                    # needed by Trainer
make fit && python recipes/hf_trainer.py                  # on the demo's chats and starting model
python recipes/hf_trainer.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --output_dir out --learning_rate 2e-5
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from radixtrain import RadixCollator, share_prefixes
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/hf_trainer")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = parser.parse_args()

    tokenizer = load_tokenizer(options.model)
    encoded = ChatEncoder(tokenizer, max_length=4096).encode_all(read_rows(options.train_file))
    rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for samples in encoded for sample in samples]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")  # bfloat16 rounds small updates away
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        learning_rate=options.learning_rate,
        bf16=torch.cuda.is_available(),
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=0,
        accelerator_config={"non_blocking": True},  # batches are pinned; a blocking copy waits for the previous step
    )
    trainer = Trainer(
        model=share_prefixes(model),  # <- was model
        data_collator=RadixCollator(),  # <- was DataCollatorForSeq2Seq(tokenizer)
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
