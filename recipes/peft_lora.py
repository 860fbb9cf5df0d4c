"""Use `RadixCollator` with PEFT's LoRA and Hugging Face's Trainer. Two lines differ from a usual script, marked below.

pip install peft                                          # installs accelerate, which Trainer needs
make fit && python recipes/peft_lora.py                   # on the demo's chats and starting model
python recipes/peft_lora.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --output_dir out --learning_rate 2e-4
"""

import argparse

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from radixtrain import RadixCollator, share_prefixes
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl")
    parser.add_argument("--output_dir", default="runs/demo/peft_lora")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=1e-2, help="high: the demo's weights are random")
    options = parser.parse_args()

    encoded = ChatEncoder(load_tokenizer(options.model), max_length=4096).encode_all(read_rows(options.train_file))
    rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for samples in encoded for sample in samples]
    # No lora_dropout: it would draw once for a shared token, and share_prefixes refuses it.
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(options.model), lora)
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        learning_rate=options.learning_rate,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    trainer = Trainer(
        model=share_prefixes(model),  # <- was model; after get_peft_model, so that it sees the adapters
        data_collator=RadixCollator(),  # <- was DataCollatorForSeq2Seq(tokenizer)
        args=arguments,
        train_dataset=rows,
    )
    trainer.train()
    trainer.save_model()  # only the adapter


if __name__ == "__main__":
    main()
