"""Use `compute_metrics`: Hugging Face's Trainer trains on radix batches and evaluates on ordinary ones.

make fit && python recipes/hf_trainer_metrics.py          # on the demo's chats and starting model
"""

import argparse

from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from radixtrain import RadixCollator, share_prefixes
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows


class OrdinaryEvaluation(Trainer):  # <- was Trainer: metrics need a row of logits for each example
    def get_eval_dataloader(self, eval_dataset=None):
        return self.with_ordinary_collator(super().get_eval_dataloader, eval_dataset)

    def get_test_dataloader(self, test_dataset):
        return self.with_ordinary_collator(super().get_test_dataloader, test_dataset)

    def with_ordinary_collator(self, get_dataloader, dataset):
        training, self.data_collator = self.data_collator, DataCollatorForSeq2Seq(self.processing_class)
        dataloader = get_dataloader(dataset)
        self.data_collator = training
        return dataloader


def compute_metrics(evaluated):
    predicted, labels = evaluated.predictions[:, :-1], evaluated.label_ids[:, 1:]
    right, without_loss = predicted == labels, labels == -100
    return {"token_accuracy": right[~without_loss].mean(), "exact_match": (right | without_loss).all(axis=1).mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--train_file", default="runs/demo/train.jsonl", help="its first 20 rows are held out")
    parser.add_argument("--output_dir", default="runs/demo/hf_trainer_metrics")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="high: the demo's weights are random")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    encoded = ChatEncoder(tokenizer, max_length=4096).encode_all(read_rows(options.train_file))
    rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for samples in encoded for sample in samples]
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        learning_rate=options.learning_rate,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    trainer = OrdinaryEvaluation(
        model=share_prefixes(AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")),  # <- prepared
        data_collator=RadixCollator(),  # <- was DataCollatorForSeq2Seq(tokenizer)
        args=arguments,
        processing_class=tokenizer,
        train_dataset=rows[20:],
        eval_dataset=rows[:20],
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
