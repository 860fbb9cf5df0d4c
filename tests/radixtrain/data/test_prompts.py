"""Rows as prompts: cut before their last answer, token for token what training saw."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.datamodule import SFTData
from radixtrain.data.prompts import Prompt, choose_prompts, end_tokens, prompt_of
from tests.support.batches import MARKED
from tests.support.runs import write_rows

IGNORED = -100


def sample(*labels, where="a:1"):
    labels = np.array(labels)
    return TokenRow(np.where(labels == IGNORED, np.arange(len(labels)) + 50, labels), labels, where)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([IGNORED, IGNORED, 7, IGNORED, 8, 9], ([50, 51, 7, 53], [8, 9])),
        ([IGNORED, 7, IGNORED], ([50], [7])),
        ([5, 6, IGNORED, 7], ([5, 6, 52], [7])),
        ([IGNORED, IGNORED], ([50, 51], [])),
    ],
)
def test_the_last_run_of_labels_is_the_target(labels, expected):
    found = prompt_of(sample(*labels))
    assert found is not None and (found.token_ids.tolist(), found.target_ids.tolist()) == expected
    assert prompt_of(sample(5, 6)) is None


def test_answers_that_are_chosen() -> None:
    """All in the order of the file, or some drawn by the seed: the last sample of each row; others are counted."""
    rows = [[sample(IGNORED, IGNORED, 1), sample(IGNORED, n, where=f"a:{n}")] for n in range(20)]
    places = [f"a:{n}" for n in range(20)]
    for size in (None, 100):
        assert [each.where for each in choose_prompts(rows, size, 0).prompts] == places
    one, again, other = ([x.where for x in choose_prompts(rows, 5, seed).prompts] for seed in (0, 0, 1))
    assert one == again != other and len(one) == 5 and one == [where for where in places if where in one]
    rows = [[sample(4, 5, where="a:1")], [sample(IGNORED, 6, where="a:2")], [sample(IGNORED, IGNORED, where="a:3")]]
    for cut_length, counts in ((None, (1, 2, "a:1")), (2, (0, 3, "a:1"))):
        found = choose_prompts(rows, None, 0, cut_length=cut_length)
        assert (len(found), found.num_left_out, found.first_left_out) == counts


SAID = {"system": "Be brief.", "user": "Hi", "assistant": "Yo"}
MESSAGES = [{"role": role, "content": text} for role, text in SAID.items()]
MESSAGES += [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ciao"}]
CHAT, PAIR = {"messages": MESSAGES}, {"prompt": "shelf", "completion": " one"}


@pytest.mark.parametrize("split_turns", [True, False])
def test_rows_of_the_validation(shop, tmp_path, split_turns):
    """What the chat template writes before the last turn; the completion's prompt; the text is left out."""
    path = str(write_rows(tmp_path / "rows.jsonl", [CHAT, PAIR, {"text": "shelf one"}]))
    (tmp_path / "marked.jinja").write_text(MARKED, encoding="utf-8")
    template = {"chat_template_path": str(tmp_path / "marked.jinja")}
    data = SFTData(validation_file=path, model_name_or_path=str(shop / "model"), split_turns=split_turns, **template)
    data.setup("validate")
    found = data.validation_prompts()
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    asked = {"add_generation_prompt": True, "tokenize": False, "chat_template": MARKED}
    before = tokenizer.apply_chat_template(MESSAGES[:-1], **asked)
    texts = [(tokenizer.decode(each.token_ids), tokenizer.decode(each.target_ids)) for each in found.prompts]
    chat, pair = texts
    assert pair == ("shelf", " one<|im_end|>")
    assert chat == (before, "Ciao<|im_end|>") and "Bye" in before
    assert (found.num_left_out, found.first_left_out) == (1, f"{path}:3")


def test_rows_of_predict(shop, tmp_path):
    """With and without an answer, and tokens as they are."""
    rows = [CHAT, {"messages": MESSAGES[3:4]}, PAIR, {"prompt": "shelf"}, {"text": "shelf"}]
    rows += [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6], "labels": [-100, 6]}]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    options = {"model_name_or_path": str(shop / "model"), "predict_prompts": True, "dataloader_num_workers": 0}
    data = SFTData(predict_file=path, completion_only_loss=False, batch_size=4, **options)
    data.setup("predict")
    prompts = [prompt for batch in data.predict_dataloader() for prompt in batch]
    tokenizer = data.tokenizer()
    texts = [tokenizer.decode(each.token_ids) for each in prompts[:5]]
    assert texts[0].endswith("Bye<|im_end|>\n<|im_start|>assistant\n") and texts[1].endswith("<|im_start|>assistant\n")
    assert texts[2:] == ["shelf"] * 3
    assert [each.token_ids.tolist() for each in prompts[5:]] == [[5, 6, 7], [5]]
    assert [each.where for each in prompts] == [f"{path}:{n}" for n in range(1, 8)]


def test_what_ends_an_answer(shop):
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    turn, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    ids = np.array([5])
    answered = [Prompt(ids, np.array([6, last]), "a:1") for last in (end, 7)]  # 7 is a token like any other
    assert end_tokens(tokenizer, answered) == {end}
    assert end_tokens(tokenizer, [Prompt(ids, ids[:0], "a:1")]) == {turn}
    tokenizer.chat_template = None
    assert end_tokens(tokenizer, []) == set()
