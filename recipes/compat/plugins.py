"""Run other projects' trainers untouched and with radixtrain's plug-in: compare losses, grad_norms, r and seconds.

    python recipes/compat/plugins.py                    # all; each gets its own environment in build/plugins
    python recipes/compat/plugins.py swift axolotl      # some

Each command trains a tiny Qwen3 twice for three steps, on rows that share a prompt, in float32 on a CPU, and fills one
line of the table. `worst` is the largest relative difference of any loss or grad_norm. Exits with 1 above 3e-6.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "plugins"
INPUTS = BUILD / "inputs"  # where the commands run
BAR = 3e-6
# Names of the tables below: what the environment installs, besides radixtrain and torch.
REQUIREMENTS = {
    "trl": ["trl[peft]==1.16.0", "transformers==5.23.0"],
    "swift": ["ms-swift==4.6.0"],
    "axolotl": ["axolotl==0.19.0"],
    "llamafactory": ["llamafactory==0.9.5"],
    "verl": ["verl==0.9.1"],
}
TORCH = "torch==2.13.0"
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": "."}
OFFLINE |= {"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
TRAIN = """\
import sys
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("json", data_files="sft/train.jsonl", split="train")
arguments = SFTConfig(output_dir=sys.argv[1], gradient_checkpointing=False, **STEPS)
trainer = SFTTrainer(model="model", args=arguments, train_dataset=rows)
trainer.train()
trainer.accelerator.end_training()
"""
Log = list[tuple[float, float]]
STEPS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_steps": 3,
    "logging_steps": 1,
    "save_steps": 3,
    "learning_rate": 1e-3,
    "bf16": False,
    "report_to": "none",
}
WORDS = "the red blue slow fast dog cat house river runs eats sees likes green tall small bird tree near"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", metavar="HOST", help=", ".join(REQUIREMENTS))
    hosts = parser.parse_args().hosts or list(REQUIREMENTS)
    INPUTS.mkdir(parents=True, exist_ok=True)
    write_inputs(INPUTS)
    print("| command | versions | loss | r | worst | seconds, untouched and shared |\n|---|---|---|---|---|---|")
    differences = []
    for host in hosts:
        for line, worst in lines_of(host):
            print(line, flush=True)
            differences.append(worst)
    sys.exit(max(differences) > BAR)


def write_inputs(folder: Path) -> None:
    """Write a model, and 32 rows with one prompt in the formats that the trainers read."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from tiny import tiny_qwen3, train_tokenizer

    random.seed(0)
    say = lambda count: " ".join(random.choices(WORDS.split(), k=count))  # noqa: E731
    system, rows = say(200), [(say(4), f" {say(10)}", f" {say(10)}") for _ in range(32)]
    tokenizer = train_tokenizer([system, *(text for row in rows for text in row)], 512)
    tokenizer.save_pretrained(folder / "model")
    tiny_qwen3(tokenizer, hidden=64).save_pretrained(folder / "model")

    def write(name: str, lines: list[Any]) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    chat = lambda user, answer: [  # noqa: E731
        {"role": role, "content": text}
        for role, text in zip(("system", "user", "assistant"), (system, user, answer), strict=True)
    ]
    write("sft/train.jsonl", [{"prompt": f"{system} {user}", "completion": good} for user, good, _ in rows])
    pairs = [{"prompt": f"{system} {user}", "chosen": good, "rejected": bad} for user, good, bad in rows]
    write("dpo/train.jsonl", pairs)
    write("grpo/train.jsonl", [{"prompt": row["prompt"]} for row in pairs])
    write("chats.jsonl", [{"messages": chat(user, good)} for user, good, _ in rows])
    write("pairs.jsonl", [{"messages": chat(user, good), "rejected_response": bad} for user, good, bad in rows])
    write("factory/rows.jsonl", [{"system": system, "instruction": user, "output": good} for user, good, _ in rows])
    columns = {"system": "system", "prompt": "instruction", "response": "output"}
    write("factory/dataset_info.json", [{"rows": {"file_name": "rows.jsonl", "columns": columns}}])
    (folder / "train.py").write_text(TRAIN.replace("STEPS", repr(STEPS)))
    (folder / "rewards.py").write_text(
        "def vowels(completions, **_):\n    return [float(sum(map(text.count, 'aeiou'))) for text in completions]\n"
    )


def environment(host: str) -> Path:
    """Return the folder of the host's programs. It is created once; delete build/plugins to create it again."""
    folder = BUILD / host
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        for wanted in ([TORCH], [TORCH, *REQUIREMENTS[host]], ["-e", str(ROOT)]):
            subprocess.run([*pip, "install", "--quiet", *wanted], check=True)
        if host == "llamafactory":  # it imports both for pictures and sound; their wheels need CUDA's libraries
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio"], check=True)
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "torchaudio.py").touch()
        (folder / "done").touch()
    return folder / "bin"


def commands(host: str, programs: Path) -> Iterator[tuple[str, list[str], list[str], dict[str, str]]]:
    """Of a host: name, the untouched command, the one that shares, and what its environment gets besides.

    OUT in a command is the folder that it writes to.
    """
    run = [str(programs / "radixtrain"), "run", "--"]
    model = {"model_name_or_path": "model", "output_dir": "OUT"}
    if host == "trl":
        for method in ("sft", "dpo", "grpo"):
            own = {"num_generations": 4, "max_completion_length": 12, "reward_funcs": "rewards.vowels", "beta": 0.1}
            given = {**model, **STEPS, "dataset_name": method, "gradient_checkpointing": False}
            command = ["trl", method, *flags(given | (own if method == "grpo" else {}))]
            yield f"`radixtrain run -- trl {method}`", command, [*run, *command], {}
        launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        command = [*launch, "--mixed_precision", "no", "--dynamo_backend", "no", "train.py", "OUT"]
        yield "`radixtrain run -- accelerate launch train.py`, two processes", command, [*run, *command], {}
    if host == "swift":
        own = {"model": "model", "model_type": "qwen3", "template": "qwen3", "use_hf": True, "tuner_type": "full"}
        more = {"torch_dtype": "float32", "fp16": False, "gradient_checkpointing": False, "split_dataset_ratio": 0}
        given = own | more | STEPS | {"output_dir": "OUT", "add_version": False}
        plugin = ["--external_plugins", str(ROOT / "radixtrain/plugins/swift_plugin.py"), "--callbacks", "radixtrain"]
        for method, file in ((["sft"], "chats.jsonl"), (["rlhf", "--rlhf_type", "dpo"], "pairs.jsonl")):
            command = ["swift", *method, *flags(given | {"dataset": file})]
            name = f"`swift {' '.join(method)} --external_plugins ... --callbacks radixtrain`"
            yield name, command, [*command, *plugin], {}
    if host == "axolotl":
        rows = {
            "path": "chats.jsonl",
            "ds_type": "json",
            "type": "chat_template",
            "field_messages": "messages",
        }
        own = {"base_model": "model", "datasets": [rows], "chat_template": "tokenizer_default", "sequence_len": 2048}
        given = own | STEPS | {"output_dir": "OUT", "micro_batch_size": 8, "gradient_accumulation_steps": 1}
        given |= {
            "optimizer": "adamw_torch",
            "attn_implementation": "sdpa",
            "special_tokens": {"pad_token": "<|endoftext|>"},
        }
        plugin = {"plugins": ["radixtrain.plugins.axolotl_plugin.RadixtrainPlugin"], "radixtrain": {}}
        yield "`axolotl train` with `radixtrain: {}`", ["axolotl", given], ["axolotl", given | plugin], {}
    if host == "llamafactory":
        given = {**model, **STEPS, "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "rows"}
        given |= {"dataset_dir": "factory", "template": "qwen", "disable_gradient_checkpointing": True}
        command = ["llamafactory-cli", given]
        yield "`radixtrain run -- llamafactory-cli train`", command, [*run, *command], {}
    if host == "verl":
        command = ["python", str(ROOT / "recipes/compat/plugins_verl.py"), "OUT"]
        yield "verl's FSDP2 actor, `VERL_USE_EXTERNAL_PLUGINS=radixtrain`", command, command, {PLUGINS: "radixtrain"}


def flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def measured(words: list[Any], programs: Path, out: Path, variables: dict[str, str]) -> tuple[Log, str, float]:
    """Losses and grad_norms of each step, what was shared, and the seconds of the command. A dict is a YAML file."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = []
    for word in words:
        if isinstance(word, dict):
            (out / "config.yaml").write_text(json.dumps(word).replace("OUT", str(out)))  # JSON is YAML
            command += ["train", str(out / "config.yaml")]
        else:
            command.append(word.replace("OUT", str(out)))
    environment = {**os.environ, **OFFLINE, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=INPUTS, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    state = next(out.rglob("trainer_state.json"))
    steps = [step for step in json.loads(state.read_text())["log_history"] if "grad_norm" in step]
    ratios = re.findall(r"radixtrain: .* r = ([\d.]+), \d+ of \d+ calls shared", done.stdout + done.stderr)
    return [(step["loss"], step["grad_norm"]) for step in steps], ", ".join(ratios), seconds


def lines_of(host: str) -> Iterator[tuple[str, float]]:
    """A line of the table for each command, and its worst difference."""
    programs = environment(host)
    packages = [REQUIREMENTS[host][0].partition("==")[0].partition("[")[0], "transformers"]
    asked = f"from importlib.metadata import version; print(*(version(name) for name in {packages}))"
    versions = subprocess.check_output([programs / "python", "-c", asked], text=True).split()
    named = ", ".join(f"{name} {version}" for name, version in zip(packages, versions, strict=True))
    for number, (name, ordinary, shared, variables) in enumerate(commands(host, programs)):
        out = BUILD / "out" / f"{host}{number}"
        before, _, seconds = measured(ordinary, programs, out / "ordinary", {})
        after, ratios, seconds_shared = measured(shared, programs, out / "shared", variables)
        assert len(before) == len(after) == 3 and ratios, (before, after, ratios)
        worst = max(
            abs(one - other) / max(abs(one), 1e-3)
            for steps in zip(before, after, strict=True)
            for one, other in zip(*steps, strict=True)
        )
        losses = " ".join(f"{loss:.4f}" for loss, _ in after)
        yield f"| {name} | {named} | {losses} | {ratios} | {worst:.1e} | {seconds:.0f}, {seconds_shared:.0f} |", worst


if __name__ == "__main__":
    main()
