"""SmolLM2-135M-Instruct on banking77, with radixtrain and without: losses, accuracy, answers, time and memory.

    python recipes/real_model.py --data_dir path/to/sft                             # an hour on one x86-64 core
    python recipes/real_model.py --data_dir path/to/sft --parts fit --modes "LoRA, float32"
    python recipes/real_model.py --tiny                                             # the same code, in minutes

`--model` is a folder with weights, tokenizer and chat template; `--data_dir` holds banking77_train.jsonl and
banking77_test.jsonl, one {"messages": [...]} a line. `--tiny` writes a random model and rows of its own.

| part       | what                                                                                                    |
|------------|---------------------------------------------------------------------------------------------------------|
| `fit`      | `radixtrain fit` of each mode: with deduplication, without it, and without it in smaller micro-batches, |
|            | which shows how far another order of summation alone takes two runs apart                               |
| `accuracy` | `fit` for more steps, and the answers of `predict` to test rows, before and after                       |
| `answers`  | the same answers by radixtrain's cache and by `model.generate`                                          |
| `trl`      | TRL's SFT, DPO and GRPO as they are, and with `share_prefixes`                                          |

Each run is a process of its own, so its peak is its own: resident memory on a CPU, allocated memory on CUDA. Seconds
are the processor's on a CPU, and by the clock on CUDA. What has run is kept in output_dir/runs.json and not run again.
`recipes/benchmarks/gpu_trainers.py --parts real` is the same comparison by Hugging Face's Trainer.
"""

import argparse
import csv
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any

PARTS = ("fit", "accuracy", "answers", "trl")
LORA = ("--model.use_peft=true", "--model.learning_rate=1e-3")
MODES = {
    "full, float32": (),
    "full, bfloat16": ("--trainer.precision=bf16-mixed",),
    "LoRA, float32": LORA,
    "LoRA, bfloat16": (*LORA, "--model.dtype=bfloat16"),
}
ORDINARY_TOKENS = {"cpu": 2880, "cuda": 11_520}  # of a padded micro-batch: 4 rows of 16, which take 22 GiB; all 16
ARMS = ("radixtrain", "ordinary", "other cut")
TRAINERS = ("SFT", "DPO", "GRPO")
SETTINGS = {"data.batch_size": 16, "data.max_length": 1024, "model.lr_scheduler_type": "constant"}
TRL_ROWS = 8  # of a batch
CLOCKS = ("time", "second", "epoch", "num_tokens")  # in names of what a trainer logs and radixtrain should change
Record = dict[str, Any]


def flags_of(mode: str, arm: str, device: str) -> tuple[str, ...]:
    """What `fit` receives in a mode and an arm."""
    tokens = {"ordinary": ORDINARY_TOKENS[device], "other cut": ORDINARY_TOKENS[device] // 2}
    return (*MODES[mode], *(("--dedup=false", f"--data.max_tokens={tokens[arm]}") if arm in tokens else ()))


def main(argv: Sequence[str]) -> None:
    options = parse(argv)
    if options.child:
        return child(options)
    runs = Runs(options)
    parts = {"fit": fit, "accuracy": accuracy, "answers": answers, "trl": trl}
    for part in options.parts:
        print(f"## {part}\n\n{parts[part](runs, options)}\n", flush=True)
    return None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/real/smollm2"))
    parser.add_argument("--data_dir", type=Path)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/real_model"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=4, help="of the runs that are compared")
    parser.add_argument("--accuracy_steps", type=int, default=30)
    parser.add_argument("--num_tests", type=int, default=200, help="test rows that are answered")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what a process of its own runs, and the file of its record
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.tiny and not options.child:
        prepare_tiny(options)
    elif not (options.child or options.data_dir):
        parser.error("--data_dir is needed, or --tiny")
    return options


def prepare_tiny(options: argparse.Namespace) -> None:
    """A random model and rows, and a few steps on them."""
    from demo import write_demo

    folder = options.output_dir / "demo"
    if not folder.exists():
        write_demo(folder, 0, 64, 8)
        for split, name in (("train", "train"), ("test", "validation")):
            (folder / f"{name}.jsonl").rename(folder / f"banking77_{split}.jsonl")
    options.model, options.data_dir = folder / "model", folder
    options.steps, options.accuracy_steps, options.num_tests = 2, 3, 4


@dataclass
class Runs:
    """The runs, each in a process of its own and each once, with what they have left."""

    options: argparse.Namespace
    records: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder: Path = self.options.output_dir
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "runs.json"
        if self.file.exists():
            self.records = json.loads(self.file.read_text("utf-8"))
        self.train = self.first_rows("train", None)
        self.test = self.first_rows("test", self.options.num_tests)

    def first_rows(self, split: str, number: int | None) -> Path:
        source = self.options.data_dir / f"banking77_{split}.jsonl"
        if number is None:
            return source
        file = self.folder / source.name
        with source.open(encoding="utf-8") as rows:
            file.write_text("".join(islice(rows, number)), encoding="utf-8")
        return file

    def record(self, name: str, kind: str, arguments: Sequence[str], read: Callable[[], Record] = dict) -> Record:
        """Seconds and peak bytes of a run, and what `read` finds once it has ended."""
        if name not in self.records:
            print(f"{name} ...", file=sys.stderr, flush=True)
            file = self.folder / "record.json"
            own = [f"--child={kind}", f"--output_dir={file}", f"--device={self.options.device}", "--", *arguments]
            subprocess.run([sys.executable, __file__, *own], check=True, stdout=subprocess.DEVNULL)
            self.records[name] = json.loads(file.read_text("utf-8")) | read()
            self.file.write_text(json.dumps(self.records, indent=1), encoding="utf-8")
        return self.records[name]

    def fitted(self, name: str, steps: int, flags: Sequence[str]) -> Record:
        """A run of `fit`, with the loss and gradient norm of each step; its model stays in the folder of this name."""
        folder = self.folder / name.replace(", ", "-").replace(" ", "_")
        own = {**SETTINGS, "model.model_name_or_path": self.options.model, "data.train_file": self.train}
        own |= {"trainer.max_steps": steps, "output_dir": folder, "overwrite": "true", "trainer.log_every_n_steps": 1}
        typed = self.typed("fit", own, flags)

        def read() -> Record:
            shutil.rmtree(folder / "checkpoints")  # gigabytes that nothing here reads
            return read_log(folder)

        return self.record(name, "radixtrain", typed, read) | {"model": folder / "model"}

    def typed(self, command: str, keys: Mapping[str, object], flags: Sequence[str]) -> list[str]:
        """A command line on the device that was asked for."""
        keys = {**keys, "trainer.accelerator": self.options.device}
        return [command, *(f"--{key}={value}" for key, value in keys.items()), *flags]

    def predicted(self, name: str, model: Path, *flags: str) -> list[str]:
        """The answers of `predict` to the test rows."""
        folder = self.folder / f"predict-{name.replace(', ', '-').replace(' ', '_')}"
        own = {"model.model_name_or_path": model, "model.generate": "true", "data.predict_file": self.test}
        own |= {"output_dir": folder, "evaluate_generation.max_new_tokens": 24}

        def read() -> Record:
            lines = (folder / "predictions.jsonl").read_text("utf-8").splitlines()
            return {"answers": [json.loads(line)["answer"] for line in lines]}

        typed = self.typed("predict", own, flags)
        found: list[str] = self.record(f"predict {name}", "radixtrain", typed, read)["answers"]
        return found


def child(options: argparse.Namespace) -> None:
    """Run what is asked for in this process, and write what it took."""
    import torch

    kind, arguments, found = options.child, options.arguments, {}
    clock = clock_of(options.device)
    began = clock()
    if kind == "radixtrain":
        from radixtrain.__main__ import main as command

        if code := command(arguments):
            sys.exit(code)
    else:
        found = trained_by_trl(kind, *arguments, device=options.device)
    found = {"seconds": clock() - began, **found}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of Linux: KiB
    found["peak_bytes"] = resident if options.device == "cpu" else torch.cuda.max_memory_allocated()
    options.output_dir.write_text(json.dumps(found), encoding="utf-8")


def clock_of(device: str) -> Callable[[], float]:
    """Seconds of the processor; on CUDA those by the clock, once the device has finished."""
    return cpu_seconds if device == "cpu" else seconds_by_the_clock


def seconds_by_the_clock() -> float:
    import torch

    if torch.cuda.is_initialized():  # a command chooses its device by itself
        torch.cuda.synchronize()
    return time.perf_counter()


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def read_log(folder: Path) -> Record:
    with (folder / "logs" / "version_0" / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    names = ("loss", "grad_norm", "tokens_per_second", "r")
    return {name: [float(row[name]) for row in rows] for name in names}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows))


def fit(runs: Runs, options: argparse.Namespace) -> str:
    """Each mode in each arm."""
    rows, steps = [], []
    for mode in options.modes:
        found = {arm: runs.fitted(f"{mode}, {arm}", options.steps, flags_of(mode, arm, options.device)) for arm in ARMS}
        for name, record in found.items():
            off = [apart(record[signal], found["ordinary"][signal]) for signal in ("loss", "grad_norm")]
            rate, gib = statistics.median(record["tokens_per_second"]), record["peak_bytes"] / 2**30
            numbers = (f"{rate:,.0f}", f"{record['seconds']:.0f}", f"{gib:.2f}", *(f"{each:.1e}" for each in off))
            rows.append([f"{mode}, {name}", f"{statistics.median(record['r']):.2f}", *numbers])
            for signal in ("loss", "grad_norm"):
                steps.append([f"{mode}, {name}: {signal}", *(f"{value:.6f}" for value in record[signal])])
    draw(runs, options.modes)
    heads = ["run", "r", "tokens/s", "seconds, start included", "peak, GiB", "loss off by", "gradient norm off by"]
    by_step = table(["run", *(f"step {number + 1}" for number in range(options.steps))], steps)
    return f"{table(heads, rows)}\n\n{by_step}"


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two logs at any step, over the larger of 1 and the second."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True))


def accuracy(runs: Runs, options: argparse.Namespace) -> str:
    """Exact match before training, after the steps of both arms, and after more of them."""
    with runs.test.open(encoding="utf-8") as file:
        targets = [json.loads(line)["messages"][-1]["content"] for line in file]

    def right(name: str, model: Path) -> list[str]:
        found = runs.predicted(name, model)
        number = sum(answer.strip() == target for answer, target in zip(found, targets, strict=True))
        return [name, f"{number} of {len(targets)}", f"{number / len(targets):.1%}"]

    rows = [right("before", options.model)]
    for mode in [mode for mode in options.modes if mode.endswith("float32")]:
        for arm in ("radixtrain", "ordinary"):
            name, flags = f"{mode}, {arm}", flags_of(mode, arm, options.device)
            rows.append(right(name, runs.fitted(name, options.steps, flags)["model"]))
        name = f"{mode}, {options.accuracy_steps} steps"
        rows.append(right(name, runs.fitted(name, options.accuracy_steps, MODES[mode])["model"]))
    return table(["model", "exact match", ""], rows)


def answers(runs: Runs, options: argparse.Namespace) -> str:
    """Of the model before training and of the one after most steps: radixtrain's answers and `model.generate`'s."""
    mode = options.modes[0]
    after = runs.fitted(f"{mode}, {options.accuracy_steps} steps", options.accuracy_steps, MODES[mode])
    rows = []
    for name, model in (("before", options.model), (f"{mode}, {options.accuracy_steps} steps", after["model"])):
        ours, theirs = runs.predicted(name, model), runs.predicted(f"{name}, generate", model, "--dedup=false")
        seconds = (runs.records[f"predict {each}"]["seconds"] for each in (name, f"{name}, generate"))
        equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
        rows.append([name, f"{equal} of {len(ours)}", *(f"{each:.0f}" for each in seconds)])
    return table(["model", "equal answers", "seconds, radixtrain", "seconds, model.generate"], rows)


def trl(runs: Runs, options: argparse.Namespace) -> str:
    """Each trainer as it is, and with the one line."""
    rows = []
    for name in TRAINERS:
        plain, shared = (
            runs.record(f"{name}, {line}", name, [line, str(options.model), str(runs.train), str(options.steps // 2)])
            for line in ("as it is", "share_prefixes")
        )
        worst = {key: apart(shared["log"][key], plain["log"][key]) for key in plain["log"]}
        key = max(worst, key=lambda each: worst[each])
        seconds = (f"{each['seconds']:.0f}" for each in (plain, shared))
        peaks = (f"{each['peak_bytes'] / 2**30:.2f}" for each in (plain, shared))
        times = f"{plain['seconds'] / shared['seconds']:.1f}x"
        rows.append([name, *seconds, times, *peaks, f"{worst[key]:.1e} ({key}, of {len(worst)})"])
    heads = ["trainer", "seconds", "with `share_prefixes`", "", "peak, GiB", "with `share_prefixes`"]
    return table([*heads, "largest difference of a metric"], rows)


def trained_by_trl(name: str, line: str, model: str, train: str, steps: str, device: str) -> Record:
    """Train with one of TRL's trainers, its own settings and batches of `TRL_ROWS` rows."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from radixtrain import share_prefixes

    def load() -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(model)
        return share_prefixes(loaded) if line == "share_prefixes" else loaded

    with open(train, encoding="utf-8") as file:
        chats = [json.loads(row)["messages"] for row in islice(file, TRL_ROWS * int(steps))]
    rows = Dataset.from_list(list(rows_of(name, chats)))
    sizes = {"per_device_train_batch_size": TRL_ROWS // 2 if name == "DPO" else TRL_ROWS, "max_steps": int(steps)}
    sizes |= {"num_generations": TRL_ROWS, "max_completion_length": 16} if name == "GRPO" else {"max_length": None}
    own = {"output_dir": str(Path(train).parent), "save_strategy": "no", "report_to": "none", "logging_steps": 1}
    own |= {"seed": 0, "bf16": device == "cuda", "use_cpu": device == "cpu", "learning_rate": 2e-5}
    arguments = getattr(trl, f"{name}Config")(**sizes, **own, disable_tqdm=True)
    models = (load(), load()) if name == "DPO" else (load(), likeness) if name == "GRPO" else (load(),)
    trainer = getattr(trl, f"{name}Trainer")(*models, args=arguments, train_dataset=rows)
    clock = clock_of(device)
    began = clock()
    trainer.train()
    return {"seconds": clock() - began, "log": numbers(trainer.state.log_history[: int(steps)])}


def rows_of(trainer: str, chats: Sequence[list[dict[str, str]]]) -> Iterator[Record]:
    """Rows of a trainer; of a pair the worse answer is the right one in capitals."""
    for chat in chats:
        prompt, answer = chat[:-1], chat[-1:]
        loud = [{**answer[0], "content": answer[0]["content"].upper()}]
        yield {
            "SFT": {"prompt": prompt, "completion": answer},
            "DPO": {"prompt": prompt, "chosen": answer, "rejected": loud},
            "GRPO": {"prompt": prompt, "answer": answer[0]["content"]},
        }[trainer]


def likeness(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [SequenceMatcher(None, c[0]["content"], a).ratio() for c, a in zip(completions, answer, strict=True)]


def numbers(log: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What was logged at each step, but for times and counts."""
    names = [name for name, value in log[0].items() if isinstance(value, int | float)]
    kept = [name for name in names if not any(clock in name for clock in CLOCKS)]
    return {name: [float(entry[name]) for entry in log] for name in kept}


def draw(runs: Runs, modes: Sequence[str]) -> None:
    """losses.png and memory.png in the output folder."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(modes), 2.8), layout="constrained")
    for mode, axes in zip(modes, figure.subplots(1, len(modes), sharey=True, squeeze=False)[0], strict=True):
        for arm, style in (("ordinary", {"lw": 4, "alpha": 0.4}), ("radixtrain", {"lw": 1.2, "color": "black"})):
            losses = runs.records[f"{mode}, {arm}"]["loss"]
            axes.plot(range(1, len(losses) + 1), losses, label=arm, **style)
        axes.set(title=mode, xlabel="step", xticks=range(1, len(losses) + 1))
    axes.legend(frameon=False)
    figure.supylabel("loss")
    figure.savefig(runs.folder / "losses.png", dpi=110)
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    for shift, arm in ((-0.2, "ordinary"), (0.2, "radixtrain")):
        gib = [runs.records[f"{mode}, {arm}"]["peak_bytes"] / 2**30 for mode in modes]
        bars = axes.barh([place + shift for place in range(len(modes))], gib, 0.36, label=arm)
        axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set(yticks=range(len(modes)), yticklabels=modes, xlabel="peak of the process, GiB")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    figure.legend(frameon=False, loc="outside upper right", ncols=2)
    figure.savefig(runs.folder / "memory.png", dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
