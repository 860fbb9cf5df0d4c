"""What an unknown key may mean: its name in Transformers and TRL, Axolotl, LLaMA-Factory, ms-swift; or its spelling."""

from collections.abc import Mapping
from difflib import get_close_matches

# Key here, with what differs -> its names in Transformers and TRL, Axolotl, LLaMA-Factory, ms-swift.
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
    "data.max_tokens: tokens of a micro-batch; rows need no packing or padding": "packing sample_packing "
    "neat_packing padding_free pad_to_multiple_of per_device_eval_batch_size",
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
    "trainer.max_steps: a few, in an output_dir of their own": "fast_dev_run",
    "trainer.max_epochs": "num_train_epochs num_epochs epochs",
    "trainer.precision: bf16-mixed": "bf16 fp16 mixed_precision",
    "trainer.log_every_n_steps": "logging_steps",
    "trainer.val_check_interval: steps, or the share of an epoch between two": "eval_steps "
    "eval_strategy evals_per_epoch",
    "trainer.logger: wandb": "report_to use_wandb",
    "trainer.project": "wandb_project",
    "trainer.run_name": "wandb_name",
    "trainer.enable_progress_bar: negated, since true there is false here": "disable_tqdm",
    "trainer.strategy: fsdp2": "deepspeed fsdp fsdp_config",
    "save_every_steps: steps": "save_steps save_strategy saves_per_epoch",
    "save_best": "load_best_model_at_end metric_for_best_model",
    "early_stopping": "early_stopping_patience",
    "ckpt_path: last": "resume_from_checkpoint auto_resume_from_checkpoints",
    "overwrite": "overwrite_output_dir",
    "output_dir": "default_root_dir",
    "seed_everything": "seed data_seed",
}
# What there is instead of a key -> names in those tools.
NO_KEYS = {
    "fit imitates answers; for preferences use share_prefixes in a trainer (docs/any-trainer.md)": "rl stage rlhf_type",
    "weights have 4 bits with model.load_in_4bit, or else those of model.dtype": "load_in_8bit load_in_16bit",
    "callbacks and plugins of Lightning are for a script with RadixModule (docs/configuration.md)": "callbacks plugins",
    "torchrun or srun starts the ranks of several machines (docs/devices.md)": "num_nodes nnodes",
    "steps and shares of an epoch are values of trainer.val_check_interval": "check_val_every_n_epoch",
    "for a part of the rows give a file of them; trainer.max_steps ends a run": "limit_train_batches "
    "limit_test_batches limit_predict_batches overfit_batches",
    "2 steps of the validation are tried before training; trainer.limit_val_batches: 0 skips "
    "validations": "num_sanity_val_steps",
    "to upload a model write `hf upload OWNER/NAME OUTPUT_DIR/model`": "push_to_hub hub_model_id hub_private_repo",
    "delete the folder data.cache_dir to tokenise again": "overwrite_cache",
    "a settings file names no other one; give --config twice": "config",
    "a checkpoint is always read as data, never run as code": "weights_only",
    "the tokens of the model's own tokenizer are used": "eos_token pad_token bos_token special_tokens add_tokens "
    "new_special_tokens additional_special_tokens",
}
NEAR = 0.82  # a guess that is less alike misleads, such as train_on for train_on_eos
NEGATIONS = {"no", "not", "non", "disable", "without", "skip", "dont", "never"}


def suggestion(command: str, name: str, known: Mapping[str, str]) -> str:
    """Suggest a key: by another tool's name, by the same last part in another section, or by spelling.

    known: every key, with the one that fills it in.
    """
    if known.get(name):
        return f", did you mean {known[name]}?"
    if whole := next((key for key in known if name.startswith(f"{key}.")), ""):
        return f": write the whole value of {whole}"
    last = name.rpartition(".")[2].replace("-", "_")
    key, _, note = _entry(SYNONYMS, last).partition(": ")
    if key in known:
        return f": here it is {', '.join(filter(None, [key, note]))}"
    if reason := _entry(NO_KEYS, last):
        return f": {reason}"
    by_last = {key.rpartition(".")[2]: key for key, filled_by in known.items() if not filled_by}
    close = [last] if last in by_last else get_close_matches(last, by_last, n=1, cutoff=NEAR)
    if not close:
        return f" (`radixtrain {command} --help` lists the keys)"
    negated = ", negated" if NEGATIONS & ({*last.split("_")} - {*close[0].split("_")}) else ""
    return f", did you mean {by_last[close[0]]}{negated}?"


def _entry(table: Mapping[str, str], name: str) -> str:
    """Return the key of a table that has this name; empty if none has."""
    return next((key for key, names in table.items() if name in names.split()), "")
