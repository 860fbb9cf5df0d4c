"""Train a reranker with sentence-transformers. Candidates share their query; one line differs from an ordinary script.

pip install sentence-transformers
make fit && python recipes/any_trainer/cross_encoder.py    # on the demo's chats and starting model
"""

import argparse

from datasets import Dataset, load_dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import ListNetLoss
from sentence_transformers.cross_encoder.modules import Transformer
from transformers import set_seed

from radixtrain import share_prefixes, sharing_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="runs/demo/model")
parser.add_argument("--train_file", default="runs/demo/train.jsonl")
parser.add_argument("--output_dir", default="runs/demo/cross_encoder")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--learning_rate", type=float, default=1e-3, help="high: the demo's weights are random")
options = vars(parser.parse_args())
path, file = options.pop("model"), options.pop("train_file")
set_seed(0)  # the score head is new
row = {"chat_template": "{{ messages | map(attribute='content') | join('\n') }}"}  # the query, then a candidate
given = {"model_kwargs": {"dtype": "float32"}, "processor_kwargs": row}  # bfloat16 rounds small updates away
model = CrossEncoder(modules=[Transformer(path, transformer_task="sequence-classification", **given)])
chats = load_dataset("json", data_files=file, split="train")["messages"][:]
queries = ["\n".join(message["content"] for message in chat[:-1]) for chat in chats]
answers = [chat[-1]["content"] for chat in chats]
docs = [[answer, answers[n - 1], answers[n - 2], answers[n - 3]] for n, answer in enumerate(answers)]  # one is right
rows = Dataset.from_dict({"query": queries, "docs": docs, "labels": [[1.0, 0.0, 0.0, 0.0]] * len(queries)})
arguments = CrossEncoderTrainingArguments(**options, logging_steps=1, save_strategy="no")
loss = ListNetLoss(model, mini_batch_size=-1)  # all candidates of a batch in one call, so that they can share
trainer = CrossEncoderTrainer(model, arguments, train_dataset=rows, loss=loss)
share_prefixes(trainer.model)  # <- added
trainer.train()
print(sharing_report(trainer))
