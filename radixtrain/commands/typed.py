"""Checks a command line and its settings files for their keys, before imports that take seconds."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NamedTuple

import yaml

from radixtrain.commands.keys import Key, keys_of, known_keys
from radixtrain.errors import UsageError
from radixtrain.settings.commands import LINKS
from radixtrain.yaml_text import check_yaml, parse_yaml, read_yaml

MOST_SHOWN = 80  # characters of a value
PRINTING = ("help", "print_config")  # need no value, and no other key
PEFT = "model.use_peft"
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora")
# Key here, with what differs -> its names in Transformers and TRL, Axolotl, LLaMA-Factory, ms-swift.
# docs/configuration.md has the table.
SYNONYMS = {
    "model.model_name_or_path": "base_model model_name model_id model_path",
    "model.dtype": "torch_dtype",
    "model.optimizer": "optim",
    "model.learning_rate": "lr",
    "model.lr_scheduler_type": "lr_scheduler",
    "model.warmup_steps: below 1 a share": "warmup_ratio num_warmup_steps",
    "model.max_grad_norm": "gradient_clip_val gradient_clipping",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.kernel": "flash_attention flash_attn",
    "model.use_peft: true for LoRA, false for full": "finetuning_type adapter use_lora",
    "model.lora_r": "lora_rank",
    "model.lora_target_modules: all-linear for all": "lora_target target_modules lora_target_linear",
    "model.load_in_4bit: true for 4": "quantization_bit",
    "data.train_file": "dataset_name dataset datasets dataset_dir train_dataset",
    "data.validation_file": "eval_dataset test_datasets",
    "data.val_size": "val_set_size",
    "data.batch_size: of a whole optimizer step, on all devices": "per_device_train_batch_size train_batch_size "
    "micro_batch_size gradient_accumulation_steps accumulate_grad_batches",
    "data.max_tokens: tokens of a micro-batch; rows need no packing": "packing sample_packing "
    "neat_packing padding_free per_device_eval_batch_size",
    "data.max_length": "max_seq_length max_seq_len sequence_len cutoff_len model_max_length",
    "data.assistant_only_loss: negated, since true there is false here": "train_on_inputs train_on_input "
    "train_on_prompt",
    "data.assistant_only_loss": "train_on_responses_only answer_only_loss mask_prompt",
    "data.train_on: last_turn, if only the last turn is to be learned": "mask_history loss_scale",
    "data.chat_template_path: a file": "chat_template template",
    "data.system_prompt": "default_system",
    "data.group_by_prefix: rows of one prompt meet, not rows of one length": "group_by_length",
    "data.dataset_num_proc": "preprocessing_num_workers dataset_processes",
    "data.shuffle_dataset: negated, since true there is false here": "disable_shuffling",
    "trainer.max_epochs": "num_train_epochs num_epochs epochs",
    "trainer.precision: bf16-mixed or 16-mixed": "bf16 fp16 mixed_precision",
    "trainer.log_every_n_steps": "logging_steps",
    "trainer.val_check_interval: steps, or the share of an epoch between two": "eval_steps "
    "eval_strategy evals_per_epoch",
    "trainer.logger: wandb": "report_to use_wandb wandb_project",
    "trainer.enable_progress_bar: negated, since true there is false here": "disable_tqdm",
    "trainer.strategy: fsdp2": "deepspeed fsdp fsdp_config",
    "save_every_steps: steps": "save_steps save_strategy saves_per_epoch",
    "save_best": "load_best_model_at_end metric_for_best_model",
    "early_stopping": "early_stopping_patience",
    "ckpt_path: last": "resume_from_checkpoint auto_resume_from_checkpoints",
    "overwrite": "overwrite_output_dir",
    "seed_everything": "seed data_seed",
}
# What there is instead of a key -> names in those tools.
NO_KEYS = {
    "fit imitates answers; for preferences use share_prefixes in a trainer (docs/any-trainer.md)": "rl stage rlhf_type",
    "weights have 4 bits with model.load_in_4bit, or else those of model.dtype": "load_in_8bit load_in_16bit",
    "the tokens of the model's own tokenizer are used": "eos_token pad_token bos_token special_tokens add_tokens "
    "new_special_tokens additional_special_tokens",
}
MEANT = {name: key for key, names in SYNONYMS.items() for name in names.split()}
NOT_HERE = {name: reason for reason, names in NO_KEYS.items() for name in names.split()}
NEAR = 0.82  # a guess that is less alike misleads, such as train_on for train_on_eos
NEGATIONS = {"no", "not", "non", "disable", "without", "skip", "dont", "never"}


class Typed(NamedTuple):
    """A parsed command line.

    arguments: with the command, and `true` after each switch that no value follows. given: each key with its value,
    those of files included, in order of precedence, the last one wins. prints: whether settings are printed and nothing
    runs.
    """

    arguments: list[str]
    given: list[tuple[str, Any]]
    prints: bool


def check_typed(typed: Sequence[str]) -> Typed:
    """Parse a command line. typed: the command and its arguments.

    Raises UsageError for a key that is unknown, empty or missing, and for a file that cannot be read.
    """
    command, keys = typed[0], known_keys(typed[0])
    arguments, given, own, empty = [command], list[tuple[str, Any]](), set[str](), list[str]()
    words = deque(typed[1:])
    while words:
        word = words.popleft()
        if not _is_key(word):
            raise UsageError(f"{word} is not a key: write --key value, and --config FILE for a YAML file")
        name, equals, value = (word.removeprefix("--") if word != "-c" else "config").partition("=")
        arguments.append(word)
        if not equals and words and not _is_key(words[0]):
            arguments.append(value := words.popleft())
        elif not equals and name in keys and keys[name].kind == "true, false":
            arguments.append(value := "true")
        elif not equals and name in keys and name not in PRINTING:
            empty.append(name)
            continue
        own.add(name)
        given += _of_file(value, keys) if name == "config" else [(name, _bounded(value, keys.get(name)))]
    sections = {name.partition(".")[0] for name in keys if "." in name}
    unknown = [name for name, _ in given if name not in keys and name not in sections]
    if unknown:
        raise UsageError("; ".join(f"no key {name}{_meant(name, keys, command)}" for name in dict.fromkeys(unknown)))
    if empty:
        raise UsageError(f"{empty[0]} needs a value: --{empty[0]} VALUE")
    final = dict(given)
    for section in sections & final.keys():
        got = shortened(final[section])
        raise UsageError(f"{section} is a section: expected keys with their values; got {got}")
    _check_missing(keys, final)
    _check_lora(given, own)
    return Typed(arguments, [(name, value) for name, value in given if name not in PRINTING], "print_config" in own)


def _is_key(word: str) -> bool:
    return word.startswith("--") or word == "-c"


def shortened(value: object) -> str:
    """Shorten a value for a message."""
    text = "null" if value is None else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."


def _bounded(value: str, key: Key | None) -> str:
    is_text = key and key.kind in ("text", "text, null")  # a prompt of several lines may look like YAML
    with suppress(yaml.YAMLError):  # then it is a text
        check_yaml(json.dumps(value, ensure_ascii=False) if is_text else value)
    return value


def _of_file(value: str, keys: dict[str, Key]) -> list[tuple[str, Any]]:
    """Return the keys of `--config`, dotted, with their values. value: a path, or the settings themselves."""
    path = os.path.expanduser(value)
    is_path = os.path.exists(path) or not value.lstrip().startswith("{")
    if is_path and not os.path.isfile(path):
        raise UsageError(f"--config: {'not a file' if os.path.exists(path) else 'no such file'}: {value}")
    settings = read_yaml(path) if is_path else parse_yaml(value, "--config")
    if not isinstance(settings, dict) or not settings:
        got = "a list" if isinstance(settings, list) else "a text" if settings else "an empty file"
        raise UsageError(f"--config: expected keys with their values, such as `output_dir: runs/a`; got {got}")
    if "config" in settings:
        raise UsageError(f"--config {value}: the key config names another file, which is not read; give --config twice")
    return list(_leaves("", settings, keys))


def _leaves(section: str, settings: dict[Any, Any], keys: dict[str, Key]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        name = f"{section}.{key}".lstrip(".")
        if isinstance(value, dict) and value and name not in keys:
            yield from _leaves(name, value, keys)
        else:
            yield name, value


def _meant(name: str, keys: dict[str, Key], command: str) -> str:
    """Suggest a key: by another tool's name, by the same last part in another section, or by spelling."""
    for whole in keys:
        if name.startswith((f"{whole}.", f"{whole}+")):
            return f": write the whole value of {whole}"
    last = name.rpartition(".")[2].replace("-", "_")
    by_last = {key.rpartition(".")[2]: key for key in keys}
    key, _, note = MEANT.get(last, "").partition(": ")
    if key in keys:
        return f": here it is {', '.join(filter(None, [key, note]))}"
    if last in NOT_HERE:
        return f": {NOT_HERE[last]}"
    close = [last] if last in by_last else get_close_matches(last, by_last, n=1, cutoff=NEAR)
    if name not in LINKS and not close:
        return f" (`radixtrain {command} --help` lists the keys)"
    negated = ", negated" if close and NEGATIONS & ({*last.split("_")} - {*close[0].split("_")}) else ""
    return f", did you mean {LINKS[name] if name in LINKS else by_last[close[0]]}{negated}?"


def _check_missing(keys: dict[str, Key], given: dict[str, Any]) -> None:
    for key in keys.values():
        if key.default is None and given.get(key.name) is None:
            raise UsageError(f"{key.name} is missing: write --{key.name} VALUE, or the key in the file of --config")


def _check_lora(given: list[tuple[str, Any]], own: set[str]) -> None:
    """Raise UsageError for adapters that are described but not trained.

    A file that says `use_peft: false` may have their defaults: a run saves every key with its value.
    """
    final = dict(given)
    if str(final.get(PEFT, False)).lower() == "true" or PEFT in own:
        return
    defaults = {key.name: key.default for key in keys_of("fit")}
    for name, value in given:
        is_lora = name.removeprefix("model.") in LORA and name.startswith("model.")
        if is_lora and (name in own or PEFT not in final or str(value).lower() != defaults[name]):
            raise UsageError(
                f"{name} is set without model.use_peft, so all weights would be trained: add --model.use_peft true for "
                f"adapters, or leave {name} out"
            )
