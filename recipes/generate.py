"""Generate answers to many prompts with one system prompt, computed and stored once. Four uses, a few lines each.

make fit && python recipes/generate.py                    # the demo's trained model on its validation rows
python recipes/generate.py --model Qwen/Qwen3-0.6B --file chats.jsonl --max_new_tokens 256

1. answers, equal to those of `model.generate`; 2. several samples per prompt, from one prefill; 3. multiple choice, by
the log-probabilities of given answers; 4. a conversation whose turns continue from the cache.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain import RadixCache, generate, score_completions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/sft/model")
    parser.add_argument("--file", default="runs/demo/validation.jsonl", help="chats that end with an answer")
    parser.add_argument("--max_new_tokens", type=int, default=24)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model).to("cuda" if torch.cuda.is_available() else "cpu")
    chats = load_dataset("json", data_files=options.file, split="train")["messages"][:]
    prompts, answers = [chat[:-1] for chat in chats], [chat[-1]["content"] for chat in chats]
    length = {"max_new_tokens": options.max_new_tokens, "pad_token_id": tokenizer.pad_token_id or 0}

    def encoded(chats, **how):  # leave `enable_thinking` out for a chat template that does not read it
        own = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": True}
        return tokenizer.apply_chat_template(chats, **own, **how)

    def texts(chats, **how):
        batch = encoded(chats, padding=True, return_tensors="pt").to(model.device)
        found = generate(model, **batch, **length, **how)
        return tokenizer.batch_decode(found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    cache = RadixCache(max_tokens=100_000)
    found = texts(prompts, cache=cache)
    for text in found:
        print(f"answer: {text!r}")
    print(f"exact match: {share_of_equal(found, answers):.1%}; {cache.counters}\n")

    for text in texts(prompts[:2], do_sample=True, num_return_sequences=4):
        print(f"sample: {text!r}")

    choices = sorted(set(answers))
    choice_ids = tokenizer(choices, add_special_tokens=False)["input_ids"]
    scores = score_completions(model, encoded(prompts)["input_ids"], [choice_ids] * len(prompts))
    chosen = [choices[max(range(len(choices)), key=lambda place: sum(each[place]))] for each in scores]
    print(f"{len(choices)} choices for each prompt: {share_of_equal(chosen, answers):.1%} are right\n")

    cache, chat = RadixCache(max_tokens=100_000), prompts[0][:-1]
    for question in (prompts[0][-1]["content"], "Are you sure?"):
        chat = [*chat, {"role": "user", "content": question}]
        known = cache.counters.num_hits
        (reply,) = texts([chat], cache=cache)
        number = len(encoded([chat])["input_ids"][0])
        print(f"turn of {number} tokens, {cache.counters.num_hits - known} of them cached")
        chat = [*chat, {"role": "assistant", "content": reply}]


def share_of_equal(texts: list[str], answers: list[str]) -> float:
    return sum(text.strip() == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


if __name__ == "__main__":
    main()
