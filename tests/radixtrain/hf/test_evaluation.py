"""Evaluation in Hugging Face's Trainer and TRL's: the loss is that of ordinary batches, other metrics are refused.

Also what the refusal recommends: a trainer that evaluates on ordinary batches, `recipes/hf_trainer_metrics.py`.
"""

import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainingArguments

import radixtrain.hf.hooks
from radixtrain import RadixCollator, prepare_model
from radixtrain.errors import UserError
from radixtrain.hf.evaluation import check_evaluation

RECIPES = Path(__file__).parents[3] / "recipes"
from hf_trainer_metrics import OrdinaryEvaluation, compute_metrics  # noqa: E402

BAR = 1e-6
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
REFUSED = r"Trainer uses the logits of this evaluation .* in the order of the tree.*recipes/hf_trainer_metrics\.py"

Row = dict[str, list[int]]


def make_rows() -> list[Row]:
    """11 answers of 1 to 9 tokens to one prompt, the last of three batches short; every batch has a repeated answer."""
    rng = np.random.default_rng(0)
    answers = [rng.integers(10, 50, length).tolist() for length in (3, 5, 9, 3, 7, 1, 2, 7, 6, 4, 6)]
    answers[3], answers[7], answers[10] = answers[0], answers[4], answers[8]
    return [{"input_ids": PROMPT + answer, "labels": [-100] * len(PROMPT) + answer} for answer in answers]


ROWS = make_rows()


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(n): n for n in range(50)}, unk_token="2"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 3e-3,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "seed": 0,
        **others,
    }


def hugging_face(
    model: nn.Module, collator: Any, folder: Path, kind: type = Trainer, arguments: Any = None, **others: Any
) -> Any:
    return kind(
        model=model,
        args=TrainingArguments(**settings(folder, **(arguments or {}))),
        train_dataset=ROWS,
        eval_dataset=ROWS,
        data_collator=collator,
        processing_class=tokenizer(),
        **others,
    )


def trl(model: nn.Module, collator: Any, folder: Path, kind: Any = None, arguments: Any = None, **others: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list(ROWS)
    return (kind or SFTTrainer)(
        model=model,
        args=SFTConfig(**settings(folder, max_length=None, **(arguments or {}))),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collator,
        processing_class=tokenizer(),
        **others,
    )


def ordinary_collator() -> DataCollatorForSeq2Seq:
    return DataCollatorForSeq2Seq(tokenizer())


TRAINERS = pytest.mark.parametrize("make_trainer", [hugging_face, trl])
METRICS: dict[str, Any] = {
    "compute_metrics": compute_metrics,
    "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
}


@TRAINERS
class TestRefused:
    def test_compute_metrics(self, tiny_qwen3, tmp_path, make_trainer):
        trainer = make_trainer(prepare_model(tiny_qwen3()), RadixCollator(), tmp_path, **METRICS)
        with pytest.raises(UserError, match=REFUSED):
            trainer.evaluate()

    def test_compute_metrics_during_training(self, tiny_qwen3, tmp_path, make_trainer):
        arguments = {"eval_strategy": "steps", "eval_steps": 1}
        trainer = make_trainer(prepare_model(tiny_qwen3()), RadixCollator(), tmp_path, arguments=arguments, **METRICS)
        with pytest.raises(UserError, match=REFUSED):
            trainer.train()

    def test_predict(self, tiny_qwen3, tmp_path, make_trainer):
        trainer = make_trainer(prepare_model(tiny_qwen3()), RadixCollator(), tmp_path)
        with pytest.raises(UserError, match=REFUSED):
            trainer.predict(trainer.eval_dataset)


def test_what_is_refused_would_be_wrong(tiny_qwen3, tmp_path, monkeypatch):
    """Without the check: one row per batch. The tokens are counted correctly, the answers are not."""
    monkeypatch.setattr(radixtrain.hf.hooks, "check_evaluation", lambda backbone: None)
    trainers = [
        hugging_face(model, collator, tmp_path, arguments={"max_steps": 40}, **METRICS)
        for model, collator in ((prepare_model(tiny_qwen3()), RadixCollator()), (tiny_qwen3(), ordinary_collator()))
    ]
    for trainer in trainers:
        trainer.train()
    radix, ordinary = (trainer.predict(ROWS) for trainer in trainers)
    assert len(radix.predictions) == 3 and len(ordinary.predictions) == len(ROWS)
    assert radix.metrics["test_token_accuracy"] == ordinary.metrics["test_token_accuracy"] > 0.5
    assert radix.metrics["test_exact_match"] == 0.0 < ordinary.metrics["test_exact_match"]


class TestLossOnly:
    @TRAINERS
    def test_is_that_of_ordinary_batches(self, tiny_qwen3, tmp_path, make_trainer):
        """In training and after it; TRL's own metrics too, except its count of tokens, which are the unique ones."""
        logged = []
        for model, collator in ((prepare_model(tiny_qwen3()), RadixCollator()), (tiny_qwen3(), ordinary_collator())):
            trainer = make_trainer(model, collator, tmp_path, arguments={"eval_strategy": "steps", "eval_steps": 4})
            trainer.train()
            trainer.evaluate()
            logged.append([entry for entry in trainer.state.log_history if "eval_loss" in entry])
        radix, ordinary = logged
        compared = [name for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy") if name in ordinary[0]]
        assert len(compared) == (3 if make_trainer is trl else 1) and len(ordinary) == 4
        for name in compared:
            values = [[entry[name] for entry in entries] for entries in (radix, ordinary)]
            np.testing.assert_allclose(*values, rtol=BAR)
        if make_trainer is trl:
            assert 0 < radix[-1]["eval_num_tokens"] < 0.6 * ordinary[-1]["eval_num_tokens"], "unique tokens"

    @TRAINERS
    def test_by_the_training_argument(self, tiny_qwen3, tmp_path, make_trainer):
        trainer = make_trainer(
            prepare_model(tiny_qwen3()), RadixCollator(), tmp_path, arguments={"prediction_loss_only": True}, **METRICS
        )
        expected = make_trainer(tiny_qwen3(), ordinary_collator(), tmp_path).evaluate()["eval_loss"]
        predicted = trainer.predict(trainer.eval_dataset)
        assert predicted.predictions is None
        assert predicted.metrics["test_loss"] == pytest.approx(expected, rel=BAR)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=BAR)

    def test_is_a_mean_over_rows_of_the_mean_of_their_batch(self, tiny_qwen3, tmp_path):
        """The Trainer takes the mean of batches with every collator, not the mean over tokens."""
        trainer = hugging_face(prepare_model(tiny_qwen3()), RadixCollator(), tmp_path)
        batches = [ROWS[start : start + 4] for start in (0, 4, 8)]
        model = trainer.model.eval()
        with torch.no_grad():
            losses = [model(**RadixCollator()(batch)).loss.item() for batch in batches]
            whole = model(**RadixCollator()(ROWS)).loss.item()
        by_rows = np.average(losses, weights=[len(batch) for batch in batches])
        assert trainer.evaluate()["eval_loss"] == pytest.approx(by_rows, rel=BAR)
        assert by_rows != pytest.approx(whole, rel=1e-3)


class TestOrdinaryEvaluation:
    """The trainer of the recipe."""

    @pytest.mark.parametrize("base", ["Trainer", "SFTTrainer"])
    def test_metrics_are_those_of_an_ordinary_run(self, tiny_qwen3, tmp_path, base):
        from trl import SFTTrainer

        kinds = {"Trainer": (Trainer, OrdinaryEvaluation), "SFTTrainer": (SFTTrainer, evaluating_ordinary(SFTTrainer))}
        make_trainer = {"Trainer": hugging_face, "SFTTrainer": trl}[base]
        arms = (tiny_qwen3(), ordinary_collator()), (prepare_model(tiny_qwen3()), RadixCollator())
        arguments = {"eval_strategy": "steps", "eval_steps": 10, "max_steps": 40}
        found = []
        for (model, collator), kind in zip(arms, kinds[base], strict=True):
            trainer = make_trainer(model, collator, tmp_path, kind=kind, arguments=arguments, **METRICS)
            trainer.train()
            assert trainer.data_collator is collator
            logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
            predicted = trainer.predict(trainer.eval_dataset)
            found.append((logged, predicted))
        (ordinary_log, ordinary), (radix_log, radix) = found
        assert len(radix_log) == len(ordinary_log) == 4
        for name in ("eval_loss", "eval_token_accuracy", "eval_exact_match"):
            values = [[entry[name] for entry in log] for log in (radix_log, ordinary_log)]
            np.testing.assert_allclose(*values, rtol=BAR)
        assert radix_log[-1]["eval_exact_match"] > 0
        np.testing.assert_array_equal(radix.predictions, ordinary.predictions)
        np.testing.assert_array_equal(radix.label_ids, ordinary.label_ids)
        assert radix.metrics["test_exact_match"] == ordinary.metrics["test_exact_match"]

    def test_a_second_trainer(self, tiny_qwen3, tmp_path):
        """The other way that the message names."""
        model = prepare_model(tiny_qwen3())
        hugging_face(model, RadixCollator(), tmp_path).train()
        second = Trainer(
            model=model, args=TrainingArguments(**settings(tmp_path)), data_collator=ordinary_collator(), **METRICS
        )
        assert 0 <= second.evaluate(ROWS)["eval_token_accuracy"] <= 1


def evaluating_ordinary(base: type) -> type:
    return type("OrdinaryEvaluation", (OrdinaryEvaluation, base), {})


class TestCheckEvaluation:
    def test_a_loop_of_ones_own_gets_the_logits(self, tiny_qwen3):
        model, batch = prepare_model(tiny_qwen3()).eval(), RadixCollator()(ROWS)

        class Loop:
            def prediction_step(self, prediction_loss_only: bool) -> Any:
                return model(**batch).logits

        assert Loop().prediction_step(False).shape == (1, batch["labels"].shape[1], 50)

    @pytest.mark.parametrize(("asked", "refused"), [(True, False), (False, True), (None, True)])
    def test_the_innermost_prediction_step_decides(self, tiny_qwen3, tmp_path, asked, refused):
        """An override may ask its parent class for something else than it was asked for."""

        class Own(Trainer):
            def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: Any, ignore_keys: Any = None):
                return super().prediction_step(model, inputs, asked, ignore_keys)

        trainer = hugging_face(prepare_model(tiny_qwen3()), RadixCollator(), tmp_path, kind=Own)
        if refused:
            with pytest.raises(UserError, match=r"^Own uses the logits"):
                trainer.evaluate()
        else:
            assert trainer.evaluate()["eval_loss"] > 0

    def test_takes_microseconds(self):
        model = nn.Identity().eval()

        def deep(levels: int) -> float:
            if levels:
                return deep(levels - 1)
            return min(timeit.repeat(lambda: check_evaluation(model), number=1000, repeat=5)) / 1000

        assert deep(200) < 1e-4
