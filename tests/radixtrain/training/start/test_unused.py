"""Keys that were set for nothing are named with the reason."""

import json

import pytest

from radixtrain.data.datamodule import SFTData
from radixtrain.training.module import RadixModule
from radixtrain.training.start.unused import unused_keys

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TEXT = {"text": "a"}


@pytest.fixture
def unused(tmp_path):
    def run(row=CHAT, model=None, trainer=None, **data):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        rows = SFTData(str(tmp_path / "rows.jsonl"), **data)
        return unused_keys(RadixModule("m", **(model or {})), rows, trainer or {})

    return run


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"lora_r": 8}, ["model.lora_r (only with use_peft: true)"]),
        ({"lora_r": 8, "use_peft": True}, []),
        ({"use_dora": True}, ["model.use_dora (only with use_peft: true)"]),
        ({"bnb_4bit_quant_type": "fp4"}, ["model.bnb_4bit_quant_type (only with load_in_4bit: true)"]),
        ({"bnb_4bit_quant_type": "fp4", "use_peft": True, "load_in_4bit": True}, []),
        ({"attn_implementation": "flash_attention_2"}, ["model.attn_implementation (only with dedup: false)"]),
        ({"attn_implementation": "eager"}, []),  # decides how soft-caps and sinks are computed
        ({"attention": "path", "dedup": False}, ["model.attention (not with dedup: false)"]),
        ({"next_tokens": ["yes"], "scores": "next_token_probs"}, ["model.scores (only for predict)"]),
        ({"warmup_steps": 10, "lr_scheduler_type": "constant"}, ["model.warmup_steps (the schedule constant has"]),
        ({"warmup_steps": 10}, []),
    ],
)
def test_keys_of_the_model(unused, model, named):
    found = unused(model=model)
    assert len(found) >= len(named) and all(a.startswith(b) for a, b in zip(found, named, strict=False))
    assert bool(found) == bool(named)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"val_size": 0.1, "validation_file": "v.jsonl"}, "data.val_size (beside validation_file)"),
        ({"max_length": None, "excess_length_strategy": "drop"}, "data.excess_length_strategy (only with max_length)"),
        ({"dedup": False, "pad_to_multiple_of": 8}, "data.pad_to_multiple_of (not with dedup: false)"),
        ({"test_file": "t.jsonl"}, "data.test_file (only for test and predict)"),
    ],
)
def test_keys_of_the_data(unused, data, named):
    assert unused(**data) == [named]


def test_the_chat_template_of_rows_that_are_no_chats(unused):
    for row, is_chat in (
        (CHAT, True),
        (TEXT, False),
        ({"prompt": "a", "completion": "b"}, False),
        ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, True),
        ({"input_ids": [1, 2]}, False),
        ({"nothing": 1}, True),  # an error elsewhere
    ):
        expected = [] if is_chat else ["data.chat_template_kwargs (the rows are no chats)"]
        assert unused(row, chat_template_kwargs={"enable_thinking": False}) == expected


def test_validation_without_rows_and_defaults(unused):
    trainer = {"val_check_interval": 10, "limit_val_batches": None}
    assert unused(trainer=trainer) == ["trainer.val_check_interval (there are no rows to validate on)"]
    assert unused(trainer=trainer, val_size=1) == unused() == unused(TEXT) == []
