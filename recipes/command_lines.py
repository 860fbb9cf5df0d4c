"""Record exit code, stdout and stderr of 400 command lines, to compare two versions of radixtrain.

    PYTHONPATH=A python recipes/command_lines.py record a.json     # with A, the root of one version
    PYTHONPATH=B python recipes/command_lines.py record b.json
    python recipes/command_lines.py compare a.json b.json          # the lines that differ, and how

Each line runs in its own folder, in a fork of a process that has imported everything. Few of them train.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HOME = Path(tempfile.gettempdir()) / "radixtrain-command-lines"
SECONDS = 120
# Written before each line into its folder: files that the lines name.
FILES = {
    "good.yaml": "output_dir: runs/a\nmodel:\n  model_name_or_path: model\n  learning_rate: 1e-4\n"
    "data:\n  train_file: rows.jsonl\n  batch_size: 4\ntrainer:\n  max_epochs: 2\n",
    "over.yaml": "model: {learning_rate: 2e-5, use_peft: true, lora_r: 4}\ndata: {batch_size: 2}\n",
    "empty.yaml": "",
    "list.yaml": "- a\n- b\n",
    "text.yaml": "hello\n",
    "broken.yaml": "a: [\n",
    "tab.yaml": "a:\n\t b: 1\n",
    "twice.yaml": "data:\n  batch_size: 8\n  batch_size: 4\n",
    "deep.yaml": "[" * 60 + "]" * 60,
    "other.yaml": "config: good.yaml\n",
    "fit.yaml": "fit:\n  model:\n    learning_rate: 1\n",
    "null.yaml": "model:\n",
    "nulls.yaml": "model: {learning_rate: null}\ndata: {batch_size: null}\n",
    "numbers.yaml": "model: {learning_rate: 1, warmup_steps: 3, weight_decay: .5, adam_epsilon: 1e-9}\n"
    "data: {batch_size: 1_000, max_tokens: 0x100, val_size: 5}\nsave_every_minutes: 3\n",
    "kinds.yaml": "output_dir: 5\n",
    "kinds2.yaml": "data: {batch_size: '8'}\n",
    "kinds3.yaml": "data: {batch_size: 8.0}\n",
    "kinds4.yaml": "model: {learning_rate: '1e-4'}\n",
    "kinds5.yaml": "model: {use_peft: 'true'}\n",
    "kinds6.yaml": "data: {train_file: [a.jsonl, {path: b.jsonl, weight: 2}], columns: {user: q, assistant: null}}\n",
    "kinds7.yaml": "data: {columns: {user: 5}}\n",
    "kinds8.yaml": "data: {val_size: yes}\n",
    "kinds9.yaml": "model: {lora_target_modules: [q_proj, 1], use_peft: true}\n",
    "words.yaml": "model: {next_tokens: [yes, no], scores: next_token_probs}\n",
    "callbacks.yaml": "trainer:\n  callbacks:\n  - class_path: EarlyStopping\n    init_args: {monitor: eval_loss}\n"
    "  - class_path: lightning.pytorch.callbacks.LearningRateMonitor\n  - class_path: Timer\n"
    "    init_args: {duration: {hours: 1}}\n",
    "logger.yaml": "trainer:\n  logger:\n    class_path: CSVLogger\n    init_args: {save_dir: logs, version: 3}\n",
    "loggers.yaml": "trainer: {logger: [csv, {class_path: CSVLogger, init_args: {save_dir: logs}}]}\n",
    "evil.yaml": "trainer:\n  callbacks:\n  - class_path: evil.Callback\n",
    "hub.yaml": "trainer:\n  callbacks:\n  - class_path: torch.hub.load\n    init_args: {repo_or_dir: x, model: y}\n",
    "strategy.yaml": "trainer:\n  devices: 2\n  strategy: {class_path: DDPStrategy, init_args: {static_graph: true}}\n",
    "ddp.yaml": "trainer: {strategy: {class_path: lightning.pytorch.strategies.DDPStrategy}}\n",
    "unicode.yaml": "output_dir: läufe/ä\ndata: {system_prompt: 'Größe → 5'}\n",
    "secret.yaml": "trainer:\n  logger: wandb\nwandb_api_key: abcdefgh\n",
    "secret2.yaml": "model: {hub_token: abc}\n",
    "anchors.yaml": "data: &a {batch_size: 8}\nmodel: *a\n",
    "nan.yaml": "model: {learning_rate: .nan}\n",
    "rows.jsonl": "",
}
# `fit` below stands for a run with a model and rows. A line may begin with variables of the environment.
LINES = r"""

--help
-h
--version
nonsense
fitt
fit --help
fit -h
fit --help batch_size
fit --help data.batch_size
fit --help --model.lora_r
fit --help data
fit --help model
fit --help evaluate_generation
fit --help bath_size
fit --help output_dir
fit --help trainer
fit --help trainer.devices
validate --help
test --help
predict --help
report --help
report --help max_seconds
verify --help
inspect --help
inspect --help row
export --help
doctor --help
run --help
run
FIT --print_config
FIT --print_config --config good.yaml
FIT --print_config --config good.yaml --config over.yaml
FIT --print_config --config over.yaml --config good.yaml
FIT --print_config --data.batch_size 3 --config good.yaml
FIT --print_config --config good.yaml --data.batch_size 3
FIT --print_config --data.batch_size=3 --data.batch_size 5
FIT --print_config -c good.yaml
FIT --print_config --config '{data: {batch_size: 7}, output_dir: runs/b}'
FIT --print_config --config numbers.yaml
FIT --print_config --config unicode.yaml
FIT --print_config --config kinds6.yaml
FIT --print_config --config callbacks.yaml
FIT --print_config --config logger.yaml
FIT --print_config --config loggers.yaml
FIT --print_config --config ddp.yaml
validate --model.model_name_or_path=model --print_config
test --model.model_name_or_path=model --print_config
predict --model.model_name_or_path=model --model.scores=perplexity --print_config
predict --model.model_name_or_path=model --model.scores='[perplexity, embedding]' --print_config
report --model.model_name_or_path=model --max_seconds 3 --print_config
verify --model.model_name_or_path=model --num_sequences 2 --print_config
inspect --model.model_name_or_path=model --row 3 --print_config
inspect --model.model_name_or_path=model --row rows.jsonl:3 --print_config
export --ckpt_path=a --output_dir=b --print_config
doctor --json --print_config
FIT --print_config --model.learning_rate 1e-5
FIT --print_config --model.learning_rate 1
FIT --print_config --model.warmup_steps .5
FIT --print_config --data.max_tokens 1_000
FIT --print_config --data.batch_size 3.0
FIT --print_config --data.val_size 3.0
FIT --print_config --data.max_tokens 0x10
FIT --print_config --data.max_length null
FIT --print_config --data.max_length none
FIT --print_config --data.max_length ''
FIT --print_config --dedup no
FIT --print_config --dedup yes
FIT --print_config --dedup True
FIT --print_config --dedup off
FIT --print_config --dedup 1
FIT --print_config --dedup
FIT --print_config --overwrite --dedup=false
FIT --print_config --output_dir 5
FIT --print_config --output_dir ''
FIT --print_config --output_dir=
FIT --print_config --output_dir null
FIT --print_config --output_dir 'läufe/ä b'
FIT --print_config --hub_model_id 5
FIT --print_config --hub_model_id null
FIT --print_config --save_best eval_loss
FIT --print_config --sp_size 2
FIT --print_config --sp_size 2
FIT --print_config --seed_everything true
FIT --print_config --seed_everything false
FIT --print_config --seed_everything 7
FIT --print_config --data.train_file a.jsonl
FIT --print_config --data.train_file '[a.jsonl, b.jsonl]'
FIT --print_config --data.train_file '[{path: a.jsonl, weight: 2}]'
FIT --print_config --data.columns '{user: question}'
FIT --print_config --data.chat_template_kwargs '{enable_thinking: false, n: 3}'
FIT --print_config --data.group_by_prefix true
FIT --print_config --data.group_by_prefix 4
FIT --print_config --data.min_shared_tokens 16
FIT --print_config --model.activation_checkpointing 0.5
FIT --print_config --model.activation_checkpointing true
FIT --print_config --model.activation_checkpointing 1
FIT --print_config --model.use_peft --model.lora_target_modules '[q_proj, k_proj]'
FIT --print_config --model.use_peft --model.lora_target_modules q_proj
FIT --print_config --model.allow_dropout '[Dropout]'
FIT --print_config --model.allow_dropout Dropout
FIT --print_config --model.next_tokens '["yes", "no"]'
FIT --print_config --evaluate_generation.metric exact_match
FIT --print_config --evaluate_generation.generation_kwargs '{top_p: 0.9, stop_strings: ["###"]}'
FIT --print_config --trainer.max_time 00:01:00:00
FIT --print_config --trainer.max_time '{hours: 2}'
FIT --print_config --trainer.val_check_interval 0.5
FIT --print_config --trainer.val_check_interval 5
FIT --print_config --trainer.devices 2
FIT --print_config --trainer.devices '[0, 1]'
FIT --print_config --trainer.devices 0,1
FIT --print_config --trainer.devices auto
FIT --print_config --trainer.precision bf16-mixed
FIT --print_config --trainer.precision 64
FIT --print_config --trainer.limit_train_batches 3
FIT --print_config --trainer.limit_train_batches 0.5
FIT --print_config --trainer.fast_dev_run
FIT --print_config --trainer.fast_dev_run 2
FIT --print_config --trainer.deterministic warn
FIT --print_config --trainer.logger wandb
FIT --print_config --trainer.logger '[wandb, csv]'
FIT --print_config --trainer.logger none
FIT --print_config --trainer.logger false
FIT --print_config --trainer.callbacks '[{class_path: EarlyStopping, init_args: {monitor: eval_loss, patience: 2}}]'
FIT --print_config --trainer.profiler simple
FIT --print_config --ckpt_path last
FIT --print_config --weights_only true
FIT_TRAINER__MAX_EPOCHS=5 FIT --print_config
PL_TRAINER__MAX_EPOCHS=5 FIT --print_config
FIT --lr 1
FIT --model.learning_rte 1
FIT --output-dir x
FIT --learning_rate 1e-4
FIT --max_epoch 2
FIT --data.max_token=1
FIT --zzz=1
FIT --data.zzz 1
FIT --dta.batch_size=1 --model.dtyp=2
FIT stray
FIT --save_best
FIT --config
FIT --num_train_epochs 3 --bf16 true
FIT --training_args.per_device_train_batch_size 3
FIT --model.dedup true
FIT --data.seed 3
FIT --trainer.default_root_dir x
FIT --model.lora_r 16
FIT --model.use_dora --model.use_rslora
FIT --overwrite --model.nope 1
FIT --model.learning_rate.foo 1
FIT --data.batch_size.foo 1
FIT --model x
FIT --trainer x
FIT --config nope.yaml
FIT --config .
FIT --config empty.yaml
FIT --config list.yaml
FIT --config text.yaml
FIT --config broken.yaml
FIT --config tab.yaml
FIT --config twice.yaml
FIT --config deep.yaml
FIT --config other.yaml
FIT --config fit.yaml
FIT --config null.yaml
FIT --config nulls.yaml
FIT --config kinds.yaml
FIT --config kinds2.yaml
FIT --config kinds3.yaml
FIT --config kinds4.yaml
FIT --config kinds5.yaml
FIT --config kinds7.yaml
FIT --config kinds8.yaml
FIT --config kinds9.yaml
FIT --config words.yaml
FIT --config evil.yaml
FIT --config hub.yaml
FIT --config strategy.yaml
FIT --config '{'
FIT --config '{a: 1}'
fit
export
export --ckpt_path=a
export --outputdir=1
export --overwrite
export --ckpt_path none --output_dir out
doctor --nope
doctor --json maybe
FIT --data.excess_length_strategy=dropp
FIT --model.attention=ring
FIT --model.dtype=float16
FIT --model.learning_rate=abc
FIT --model.learning_rate=true
FIT --model.learning_rate=nan
FIT --model.learning_rate=.inf
FIT --model.learning_rate=-1
FIT --model.learning_rate=null
FIT --model.learning_rate='[1]'
FIT --model.adam_beta2=1.0
FIT --model.activation_checkpointing=1.5
FIT --model.activation_checkpointing=some
FIT --model.use_peft=maybe
FIT --model.use_peft=null
FIT --model.use_peft --model.lora_r=0
FIT --model.use_peft --model.lora_r=ten
FIT --model.allow_dropout='{a: 1}'
FIT --model.lora_target_modules='{a: 1}' --model.use_peft
FIT --model.next_tokens='[yes, no]'
FIT --model.max_skipped_steps=true
FIT --model.scores=nonsense
FIT --model.generate --model.scores=perplexity
FIT --save_every_steps=0.5
FIT --save_every_steps=
FIT --save_every_steps=0
FIT --save_every_minutes=0
FIT --save_total_limit=0
FIT --save_total_limit=null
FIT --early_stopping=0
FIT --sp_size=0
FIT --sp_size=some
FIT --ddp_timeout=99999999
FIT --seed_everything=-1
FIT --seed_everything=99999999999999999999999
FIT --seed_everything=abc
FIT --weights_only=false
FIT --data.batch_size=0
FIT --data.batch_size=1e30
FIT --data.batch_size=abc
FIT --data.max_tokens=0
FIT --data.max_length=1
FIT --data.pad_to_multiple_of=99999
FIT --data.val_size=.nan
FIT --data.val_size=-1
FIT --data.group_by_prefix=9999
FIT --data.group_by_prefix=0
FIT --data.group_by_prefix=some
FIT --data.group_by_prefix --data.shuffle_dataset=false
FIT --data.min_shared_tokens=some
FIT --data.min_shared_tokens=0
FIT --data.train_on=last_turn --data.split_turns=false
FIT --data.columns=5
FIT --data.chat_template_kwargs='[1]'
FIT --data.train_file=5
FIT --data.split_turns=maybe
FIT --evaluate_generation.num_samples=0
FIT --evaluate_generation.max_new_tokens=0
FIT --evaluate_generation.temperature=1
FIT --evaluate_generation.pattern=x
FIT --evaluate_generation.metric=nonsense
FIT --evaluate_generation.generation_kwargs=5
FIT --evaluate_generation.generation_kwargs='{max_new_tokens: 3}'
FIT --evaluate_generation.metric=exact_match
FIT --trainer.accumulate_grad_batches=4
FIT --trainer.barebones=true
FIT --trainer.gradient_clip_val=1.0
FIT --trainer.precision=16-mixed
FIT --trainer.precision=bf17
FIT --trainer.num_nodes=2
FIT --trainer.val_check_interval=0
FIT --trainer.check_val_every_n_epoch=0
FIT --trainer.log_every_n_steps=-1
FIT --trainer.devices=9223372036854775808
FIT --trainer.devices=many
FIT --trainer.max_time=soon
FIT --trainer.max_time='{fortnights: 1}'
FIT --trainer.max_epochs=many
FIT --trainer.max_epochs=1.5
FIT --trainer.max_steps=null
FIT --trainer.enable_progress_bar=maybe
FIT --trainer.accelerator=cpu --trainer.devices=0
FIT --trainer.accelerator=tpuu
FIT --trainer.strategy=nonsense
FIT --trainer.strategy=fsdp
FIT --trainer.strategy=rows.jsonl
FIT --trainer.limit_train_batches=1.5
FIT --trainer.limit_train_batches=some
FIT --trainer.plugins=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
FIT --trainer.inference_mode=5
FIT --trainer.logger=tensorbord
FIT --trainer.logger=wandbb
FIT --trainer.logger='[none, csv]'
FIT --trainer.logger=CSVLogger
FIT --trainer.logger=5
FIT --trainer.callbacks=EarlyStoping
FIT --trainer.callbacks='[{class_path: EarlyStoping}]'
FIT --trainer.callbacks='[{class_path: EarlyStopping}]'
FIT --trainer.callbacks='[{class_path: EarlyStopping, init_args: {monitr: x}}]'
FIT --trainer.callbacks='[{class_path: EarlyStopping, init_args: {monitor: eval_loss, patience: many}}]'
FIT --trainer.callbacks='[{class_path: EarlyStopping, init_args: {monitor: eval_los}}]'
FIT --trainer.callbacks='[{class_path: EarlyStopping, init_args: {monitor: eval_loss, mode: sideways}}]'
FIT --trainer.callbacks=evil.Callback
FIT --trainer.callbacks='[{"class_path": "evil.Callback"}]'
FIT --trainer.callbacks='[{"class_path": "os.system"}]'
FIT --trainer.callbacks='[{"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}]'
FIT --trainer.callbacks='[{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "x"}}]'
FIT --trainer.callbacks=5
FIT --trainer.callbacks='{a: 1}'
FIT --trainer.profiler=nonsense
FIT --ckpt_path=best
FIT --ckpt_path=rows.jsonl
FIT --ckpt_path=nope
FIT --model.model_name_or_path=nowhere/at/all
FIT --model.model_name_or_path=
FIT --data.train_file=
FIT --hub_model_id=a --push_to_hub
validate --model.model_name_or_path=model
test --model.model_name_or_path=model --verbose=maybe
predict --model.model_name_or_path=model --return_predictions=maybe
verify --model.model_name_or_path=model --data.train_file=none.jsonl --num_steps=0
inspect --model.model_name_or_path=model --step=first
inspect --model.model_name_or_path=model --data.train_file=chats.jsonl --row=1
inspect --model.model_name_or_path=model --ckpt_path=x
report --model.model_name_or_path=model --data.train_file=chats.jsonl --max_seconds=0
report --model.model_name_or_path=model --max_seconds=-1 --data.train_file=chats.jsonl
TRAIN
TRAIN --model.use_peft --model.lora_r=2 --evaluate_generation.metric=contains --evaluate_generation.max_new_tokens=2
TRAIN --config callbacks.yaml
TRAIN --config loggers.yaml --seed_everything=5
TRAIN --data.system_prompt='Größe → 5' --save_best=eval_loss --early_stopping=2
FIT --print_config --trainer.logger mlflow
FIT --print_config --trainer.logger tensorboard
FIT --print_config --trainer.logger trackio
FIT --trainer.logger swanlab
FIT --trainer.logger.api_key abcdefgh
FIT --trainer.logger '{class_path: WandbLogger, init_args: {api_key: secret-words}}'
FIT --trainer.logger '{class_path: lightning.pytorch.loggers.WandbLogger, init_args: {project: p}}'
FIT --trainer.api_key abcdefgh
FIT --api_key abcdefgh
FIT --hub_token hf_abcdefghijklmnopqrstuv
FIT --model.token hf_abcdefghijklmnopqrstuv
FIT --trainer.password letmein
FIT --config secret.yaml
FIT --config secret2.yaml
FIT --data.columns '{password: text}' --print_config
FIT --data.columns '{user: password}' --print_config
FIT --data.train_file s3://me:pw@bucket/x.jsonl
FIT --model.model_name_or_path https://me:pw@example.com/x
FIT --model.learning_rate https://me:pw@example.com/x
FIT --trainer.run_name r1 --trainer.project p1 --trainer.logger wandb --print_config
FIT --base_model x
FIT --gradient_accumulation_steps 4
FIT --report_to wandb
FIT --deepspeed ds.json
FIT --max_seq_length 128
FIT --packing true
FIT --resume_from_checkpoint true
FIT --seed 3
FIT --rl dpo
FIT --load_in_8bit true
FIT --eos_token x
FIT --trainer.gradient_accumulation_steps 4
FIT --data.no_split_turns=true
FIT --data.system_prompt '# Role' --print_config
FIT --data.system_prompt 1 --print_config
FIT --data.system_prompt yes --print_config
FIT --output_dir 2026-11-28 --print_config
FIT --output_dir 1e5 --print_config
FIT --data.template_date 2026-11-28 --print_config
FIT --data.template_date soon
FIT --data.train_file 2026 --print_config
FIT --data.train_file 2026
FIT --seed_everything maybe
FIT --learning_rate 1e-4 --model.lora_r 4
FIT --data.batch_size 0 --model.learning_rate -1
FIT --trainer.callbacks+ Timer
FIT --data.columns.user question
FIT --config anchors.yaml
FIT --config nan.yaml
FIT --print_config --help
FIT --help_all
FIT --ckpt_path auto --print_config
FIT --ckpt_path ''
FIT --trainer.strategy ddp --print_config
FIT --trainer.strategy fsdp2 --print_config
FIT --trainer.strategy '{class_path: DDPStrategy}' --print_config
FIT --trainer.strategy deepspeed
FIT --trainer.strategy ddp_spawn
FIT --trainer.accelerator '{class_path: CPUAccelerator}'
FIT --trainer.plugins MixedPrecision
FIT --trainer.gradient_clip_algorithm norm
FIT --trainer.use_distributed_sampler false
FIT --trainer.model_registry a
FIT --data.batch_size ' 8' --print_config
FIT --data.batch_size +8 --print_config
FIT --data.batch_size 010 --print_config
FIT --trainer.max_epochs 2 --trainer.max_epochs 3 --print_config
FIT --data.max_tokens null
FIT --evaluate_generation.generation_kwargs '{top_p: .9}' --print_config
FIT --data.train_file '{path: a}'
FIT --data.train_file '[1]'
inspect --model.model_name_or_path=model --row=x:y --print_config
inspect --model.model_name_or_path=model --row= --print_config
validate --model.model_name_or_path=model --overwrite=maybe
predict --model.model_name_or_path=model --model.next_tokens=yes
doctor --json=true --print_config
doctor stray
export --ckpt_path=1 --output_dir=2 --print_config
""".strip("\n").splitlines()
SHORT = {
    "FIT": "fit --model.model_name_or_path=model --data.train_file=none.jsonl --output_dir=out",
    "TRAIN": "fit --model.model_name_or_path=model --data.train_file=chats.jsonl --output_dir=out --data.val_size=4 "
    "--trainer.max_steps=2 --data.batch_size=4 --trainer.enable_progress_bar=false --data.max_tokens=4096",
}
# What another machine, minute or process gives in place of the same answer.
VARYING = (
    (r"\d[\d,]*(\.\d+)?([eE][-+]?\d+)? ?(s|ms|MiB|GiB|min|tokens/s|h)\b", "N"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", "DATE"),
    (r"\d\d:\d\d:\d\d", "TIME"),
)


def typed(line: str) -> tuple[dict[str, str], list[str]]:
    """Split a line into its leading variables and its arguments."""
    words = [part for word in shlex.split(line) for part in (shlex.split(SHORT[word]) if word in SHORT else [word])]
    variables = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words


def answer(line: str, number: int) -> dict[str, Any]:
    """Run a line in a fork. Returns its exit code, its output and the configuration that it saved."""
    folder = HOME / "lines" / str(number)
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "model").symlink_to(HOME / "model")
    (folder / "chats.jsonl").symlink_to(HOME / "chats.jsonl")
    pid = os.fork()
    if not pid:
        _child(line, folder)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.alarm(SECONDS)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(0)
    printed = {name: (folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr")}
    saved = {str(path.relative_to(folder)): path.read_text("utf-8") for path in sorted(folder.rglob("out/**/*.yaml"))}
    shutil.rmtree(folder)
    return {"line": line, "code": code, **{name: _plain(text) for name, text in printed.items()}, "saved": saved}


def _plain(text: str) -> str:
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text


def _child(line: str, folder: Path) -> None:
    code = 70
    try:
        os.chdir(folder)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        variables, arguments = typed(line)
        os.environ.update(variables)
        sys.argv = ["radixtrain", *arguments]
        code = importlib.import_module("radixtrain.__main__").main()
    except SystemExit as done:
        code = int(done.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def record(path: str) -> None:
    """Run every line with the radixtrain that is imported, and write the answers."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    os.environ.update(COLUMNS="120", RADIXTRAIN_CACHE=str(HOME / "cache"), WANDB_MODE="offline")
    _make_shop()
    for name in ("__main__", "commands.lightning", "commands.export", "commands.doctor"):
        importlib.import_module(f"radixtrain.{name}")
    answers = [answer(line, number) for number, line in enumerate(LINES)]
    shutil.rmtree(HOME)
    Path(path).write_text(json.dumps(answers, indent=1, ensure_ascii=False), encoding="utf-8")


def _make_shop() -> None:
    import tiny

    rows = [[("user", f"Where is number {n}?"), ("assistant", f"On shelf {n % 3}.")] for n in range(12)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    (HOME / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    tokenizer = tiny.train_tokenizer(sorted({text for row in rows for _, text in row}), 400)
    tiny.tiny_qwen3(tokenizer, layers=1, hidden=64, seed=0).save_pretrained(HOME / "model")
    tokenizer.save_pretrained(HOME / "model")


def differences(old: str, new: str) -> Iterator[str]:
    """Return a text for each line whose results differ."""
    first, second = (json.loads(Path(path).read_text(encoding="utf-8")) for path in (old, new))
    for before, after in zip(first, second, strict=True):
        changed = list(difflib.unified_diff(_shown(before), _shown(after), lineterm="", n=0))[2:]
        if changed:
            yield "\n  ".join([before["line"], *(line for line in changed if not line.startswith("@@"))])


def _shown(answer: dict[str, Any]) -> list[str]:
    """The lines to compare. Keys that are printed or saved have no order."""
    texts = [f"exit code {answer['code']}", answer["stderr"], answer["stdout"], *answer["saved"].values()]
    return [line for text in texts for line in _lines(text)]


def _lines(text: str) -> list[str]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    return (yaml.safe_dump(value, allow_unicode=True) if isinstance(value, dict) else text).splitlines()


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2])
    else:
        found = list(differences(*sys.argv[2:4]))
        print("\n".join(found), f"\n{len(LINES) - len(found)} of {len(LINES)} lines answer alike", sep="")
