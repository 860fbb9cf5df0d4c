"""Prompts of any kind become the token ids that transformers gives for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from radixtrain.data.rendering.template import MARK
from radixtrain.errors import DataError, UserError
from radixtrain.generation.prompts import token_ids_of

CHAT = [{"role": "system", "content": "You name the shelf."}, {"role": "user", "content": "Where is the pear?"}]
OTHER = [{"role": "user", "content": "Where is the saw?"}]
DROPS_DEVELOPER = (
    "{% for m in messages %}{% if m.role != 'developer' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if mood is defined %}{{ mood }}{% endif %}"
)


@pytest.fixture
def tokenizer(shop: Path) -> Any:
    return AutoTokenizer.from_pretrained(shop / "model")


def lists(found: list[np.ndarray]) -> list[list[int]]:
    assert all(ids.dtype == np.int64 and ids.ndim == 1 for ids in found)
    return [ids.tolist() for ids in found]


def chat_ids(tokenizer: Any, *chats: Any, **kwargs: Any) -> list[list[int]]:
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **kwargs}
    return [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]


class TestTokenIds:
    @pytest.mark.parametrize(
        "prompts",
        [
            [[5, 6], [7]],
            ([5, 6], (7,)),
            [np.array([5, 6], dtype=np.int32), torch.tensor([7])],
            [[np.int64(5), 6], np.array([7])],
            datasets.Dataset.from_dict({"ids": [[5, 6], [7]]})["ids"],
        ],
    )
    def test_as_they_are(self, prompts: Any) -> None:
        assert lists(token_ids_of(prompts)) == [[5, 6], [7]]

    @pytest.mark.parametrize("kind", [torch.tensor, np.array])
    def test_a_padded_array(self, kind: Any) -> None:
        ids, mask = kind([[0, 5, 6], [7, 0, 0], [1, 2, 3]]), kind([[0, 1, 1], [1, 0, 0], [1, 1, 1]])
        assert lists(token_ids_of(ids, attention_mask=mask)) == [[5, 6], [7], [1, 2, 3]]
        assert lists(token_ids_of(ids)) == [[0, 5, 6], [7, 0, 0], [1, 2, 3]]


class TestTexts:
    def test_with_the_tokenizers_special_tokens(self, tokenizer: Any) -> None:
        tokenizer.bos_token = "<|im_start|>"
        tokenizer.add_bos_token = True
        texts = ["Where is the pear?", "On shelf one."]
        assert lists(token_ids_of(texts, tokenizer)) == tokenizer(texts)["input_ids"]
        assert lists(token_ids_of(texts[0], tokenizer)) == tokenizer(texts[:1])["input_ids"]

    def test_what_the_tokenizer_returns(self, tokenizer: Any) -> None:
        texts = ["Where is the pear?", "On shelf one, said the saw."]
        tokenizer.pad_token = "<|im_end|>"
        expected = tokenizer(texts)["input_ids"]
        for side in ("left", "right"):
            padded = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
            assert lists(token_ids_of(padded)) == expected
            assert lists(token_ids_of(padded["input_ids"], None, padded["attention_mask"])) == expected
            assert lists(token_ids_of(tokenizer(texts, padding=True, padding_side=side))) == expected
        assert lists(token_ids_of(tokenizer(texts))) == expected


class TestConversations:
    def test_are_rendered_with_the_generation_prompt(self, tokenizer: Any) -> None:
        assert lists(token_ids_of([CHAT, OTHER], tokenizer)) == chat_ids(tokenizer, CHAT, OTHER)
        assert lists(token_ids_of(CHAT, tokenizer)) == chat_ids(tokenizer, CHAT)

    def test_beside_other_kinds_in_their_order(self, tokenizer: Any) -> None:
        found = token_ids_of([CHAT, [5, 6], "one", OTHER, "two"], tokenizer)
        (one, two), (chat, other) = tokenizer(["one", "two"])["input_ids"], chat_ids(tokenizer, CHAT, OTHER)
        assert lists(found) == [chat, [5, 6], one, other, two]

    def test_variables_of_the_template(self, tokenizer: Any) -> None:
        tokenizer.chat_template = DROPS_DEVELOPER
        found = lists(token_ids_of([CHAT], tokenizer, mood="Aha!"))
        assert found == chat_ids(tokenizer, CHAT, mood="Aha!") != chat_ids(tokenizer, CHAT)
        with pytest.raises(UserError, match="the chat template reads no variable 'moood', did you mean mood"):
            token_ids_of([CHAT], tokenizer, moood="Aha!")

    def test_a_developer_whom_the_template_drops_is_the_system(self, tokenizer: Any) -> None:
        tokenizer.chat_template = DROPS_DEVELOPER
        developer = [{"role": "developer", "content": MARK}, *OTHER]
        expected = chat_ids(tokenizer, [{"role": "system", "content": MARK}, *OTHER])
        assert lists(token_ids_of([developer], tokenizer)) == expected
        assert developer[0]["role"] == "developer"


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([[5], []], "prompt 1 is empty; a prompt needs at least one token"),
            ([[5], ""], "prompt 1 is a text, which needs a tokenizer"),
            ([[5], CHAT], "prompt 1 is a conversation, which needs a tokenizer"),
            ([[5], 7], "prompt 1: expected a text, a list of token ids, or a list of messages"),
            ([[5], None], "prompt 1: expected a text.* got NoneType"),
            ([{"messages": CHAT}], r'prompt 0 is made of rows, not of messages: give row\["messages"\] of each$'),
            ([[5, 6.5]], "prompt 0: expected .* got a list with 6.5"),
            ([[5, True]], "prompt 0: expected .* got a list with True"),
            ([[[5]]], r"prompt 0: expected .* got a list with \[5\]"),
            ([np.zeros((2, 2), dtype=int)], r"prompt 0: .* got an array of shape \(2, 2\)"),
            ([torch.tensor([1.0])], "prompt 0: .* dtype float32"),
            ([5, 6], r"expected a list of prompts, got a list of numbers; for one prompt write \[token_ids\]"),
            (7, "prompts: expected a list of prompts, got int"),
            (torch.tensor([5, 6]), r"token ids of shape \(batch, length\), got shape \(2,\)"),
            (torch.tensor([[0.5]]), "token ids of shape .* dtype float32"),
        ],
    )
    def test_prompts(self, prompts: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            token_ids_of(prompts)

    def test_masks(self) -> None:
        with pytest.raises(
            UserError, match=r"attention_mask: expected the shape of the prompts, \(1, 2\), got \(1, 3\)"
        ):
            token_ids_of(torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 3))
        with pytest.raises(UserError, match=r"attention_mask is for prompts in one .* these are a list"):
            token_ids_of([[5, 6]], attention_mask=torch.ones(1, 2))
        with pytest.raises(UserError, match="prompt 1 is empty"):
            token_ids_of(torch.tensor([[5], [6]]), attention_mask=torch.tensor([[1], [0]]))

        with pytest.raises(UserError, match="attention_mask: expected one number for each token of input_ids"):
            token_ids_of({"input_ids": [[5], [6]], "attention_mask": [[1], [1, 1]]})

    def test_texts(self, tokenizer: Any) -> None:
        with pytest.raises(UserError, match="prompt 1 is empty"):
            token_ids_of(["one", ""], tokenizer)
        with pytest.raises(DataError, match=r"prompt 1: text holds \\ud83d, half of a surrogate pair"):
            token_ids_of(["one", "\ud83d"], tokenizer)

    def test_conversations(self, tokenizer: Any) -> None:
        with pytest.raises(DataError, match="prompt 1: messages: turn 1: unknown role 'robot'"):
            token_ids_of([CHAT, [{"role": "robot", "content": "a"}]], tokenizer)
        with pytest.raises(DataError, match=r"prompt 0: messages: turn 2.*expected"):
            token_ids_of([[*OTHER, "and the pear?"]], tokenizer)
        tokenizer.chat_template = None
        with pytest.raises(UserError, match="prompt 1 is a conversation, and the tokenizer has no chat template"):
            token_ids_of([[5], CHAT], tokenizer)
