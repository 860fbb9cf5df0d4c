"""`radixtrain doctor`: can training run here, what is missing, and the command that gets it.

Nothing is imported at the top that may be missing: a finding says so.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from radixtrain import __version__
from radixtrain.commands.reading import print_settings
from radixtrain.commands.typed import Typed
from radixtrain.cores import WAITING, num_cores
from radixtrain.errors import UserError, bytes_text, first_line
from radixtrain.screen import printable
from radixtrain.settings.commands import Doctor
from radixtrain.versions import FIT, OLDEST, OLDEST_OPTIONAL, WHY, installed, is_older

WIDTH = 24  # of the names
NEEDED = (*OLDEST, *FIT, "tokenizers")
# Package -> what it is for, and what installs it.
OPTIONAL = {
    "accelerate": ("Hugging Face's Trainer and those of TRL, in scripts of your own", "pip install accelerate"),
    "peft": ("LoRA, DoRA", "pip install 'radixtrain[peft]'"),
    "bitsandbytes": ("QLoRA (model.load_in_4bit)", "pip install 'radixtrain[qlora]'"),
    "flash-attn": ("attention on CUDA", "pip install 'radixtrain[flash]', which needs a CUDA toolchain"),
    "flash-attn-4": ("attention on Hopper and Blackwell", "pip install 'radixtrain[flash4]'"),
    "flash-linear-attention": ("recurrent layers on CUDA", "pip install flash-linear-attention"),
    "causal-conv1d": ("recurrent layers on CUDA", "pip install causal-conv1d"),
    "matplotlib": ("loss.png and the plot of bench", "pip install matplotlib"),
    "trackio": ("trainer.logger: trackio", "pip install trackio"),
    "swanlab": ("trainer.logger: swanlab", "pip install swanlab"),
    "tensorboard": ("trainer.logger: tensorboard", "pip install tensorboard"),
    "trl": ("TRL's trainers, in scripts of your own", "pip install trl"),
}
HEAD_DIM = 128  # of most models
MOST_NAMED = 5  # damaged files of a kind
LEAST_ROOM = 1 << 30  # bytes; less than that, not even a small model is saved


def run(settings: Doctor, typed: Typed) -> None:
    """Print versions, devices, the attention that would run, room, caches and logins, and what is wrong with them.

    Raises:
        UserError: training cannot run here, or should not: a package is missing, or has a hole that is known.
    """
    if typed.prints:
        return print_settings(settings)
    found = findings()
    blocking = [finding for finding in found if finding.blocks]
    if settings.json:
        entries = [finding._asdict() for finding in found]
        print(json.dumps({"can_train": not blocking, "findings": entries}, indent=2))  # noqa: T201
    else:
        print(printable(_text(found)))  # noqa: T201
    if blocking:
        told = "; ".join(f"{each.name} {each.value}: {each.problem}: {each.fix}" for each in blocking)
        raise UserError(f"training cannot run here: {told}")


def _text(found: Sequence[Finding]) -> str:
    """A paragraph for each section, and a last line."""
    lines = []
    for section, group in groupby(found, key=lambda finding: finding.section):
        lines.append(section)
        for finding in group:
            problem = f"ERROR: {finding.problem}" if finding.blocks else finding.problem
            parts = [part for part in (finding.value, problem, finding.fix) if part]
            lines.append(f"  {finding.name:<{WIDTH}} {': '.join(parts)}")
        lines.append("")
    if not any(finding.blocks for finding in found):
        lines.append("Training can run here. `radixtrain verify` compares its gradient with the ordinary one.")
    return "\n".join(lines)


class Finding(NamedTuple):
    """A line of the report.

    problem: what is wrong or missing, empty if nothing is. fix: a command, or what to do. blocks: whether training
    cannot run, or should not, until it is fixed.
    """

    section: str
    name: str
    value: str
    problem: str = ""
    fix: str = ""
    blocks: bool = False


def findings() -> list[Finding]:
    """All of them. What cannot even be looked at is a finding itself."""
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": _packages,
        "devices": _devices,
        "attention": _attention,
        "disks": _disks,
        "caches": _caches,
        "services": _services,
    }
    found: list[Finding] = []
    for name, look in sections.items():
        try:
            found += look()
        except (ImportError, OSError, RuntimeError) as error:  # a library that is missing, or does not load
            fix = "pip install --force-reinstall radixtrain"
            found.append(Finding(name, name, "unknown", first_line(error), fix, blocks=True))
    return found


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "radixtrain", __version__)
    yield Finding("packages", "python", platform.python_version())
    for name in NEEDED:
        yield _package(name, "not installed", f"pip install {name}", is_needed=True)
    for name, (purpose, fix) in OPTIONAL.items():
        yield _package(name, f"not installed; it is for {purpose}", fix, is_needed=False)


def _package(name: str, missing: str, fix: str, is_needed: bool) -> Finding:
    """missing, fix: what is said if it is not installed."""
    version = installed(name)
    if version is None:
        return Finding("packages", name, "", missing, fix, blocks=is_needed)
    if not is_older(name, version):
        return Finding("packages", name, version)
    problem = WHY.get(name, "older ones lack what radixtrain calls")
    oldest = (OLDEST | FIT | OLDEST_OPTIONAL)[name]
    return Finding("packages", name, version, problem, f"pip install -U '{name}>={oldest}'", blocks=is_needed)


def _devices() -> Iterator[Finding]:
    import torch

    from radixtrain.bench.environment import processor

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    threads = f"torch uses {torch.get_num_threads()} of them"
    yield Finding("devices", "cpu", f"{processor()}, {num_cores()} cores, {threads}, {bytes_text(memory)}")
    waiting = [f"{name}={os.environ[name]}" for name in WAITING if name in os.environ]
    yield Finding("devices", "waiting threads", ", ".join(waiting) or "spin, which is slow beside other programs")
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding("devices", f"cuda:{number}", f"{name}, {bytes_text(free)} of {bytes_text(total)} free")
    if torch.cuda.is_available():
        return
    build = torch.version.cuda or torch.version.hip
    problem, fix = "", ""
    if shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists():
        problem = f"a GPU is here, and {'torch does not see it' if build else 'this torch is built without CUDA'}"
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if build else "see https://pytorch.org for the command"
    value = f"none; torch is built for {f'CUDA {build}' if build else 'the CPU'}"
    yield Finding("devices", "cuda", value, problem, fix)


def _attention() -> Iterator[Finding]:
    """What `auto` would run, and for every other kernel why it cannot. The functions asked are those that choose."""
    import torch

    from radixtrain.attention import choose_attention, unlogged
    from radixtrain.kernels.varlen import KERNELS, KernelCall, varlen_refusal

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        with unlogged():
            choice = choose_attention("auto", "auto", device, dtype, HEAD_DIM)
        name = str(dtype).removeprefix("torch.")
        yield Finding("attention", f"auto, {name}", f"{choice.strategy} on {device.type}, kernel {choice.kernel}")
    call = KernelCall(device, torch.bfloat16, HEAD_DIM)
    for kernel in KERNELS:
        refusal = varlen_refusal(kernel, call)
        yield Finding("attention", kernel, f"cannot run in bfloat16: {refusal}" if refusal else "can run")


def _disks() -> Iterator[Finding]:
    from radixtrain.data.tokenized.cache import cache_folder

    for name, folder in {"working folder": Path.cwd(), "cache": cache_folder()}.items():
        above = folder.absolute()
        while not above.exists():
            above = above.parent
        free = shutil.disk_usage(above).free
        problem, fix = ("it is almost full", "make space, or use another disk") if free < LEAST_ROOM else ("", "")
        if not os.access(above, os.W_OK):
            problem, fix = "it cannot be written to", "RADIXTRAIN_CACHE names another folder" if name == "cache" else ""
        yield Finding("disks", name, f"{folder}: {bytes_text(free)} free", problem, fix)


def _caches() -> Iterator[Finding]:
    """How many entries, and a line for each of the first damaged ones."""
    from radixtrain.data.tokenized.cache import TokenizingOptions, damage_in

    folder = TokenizingOptions().folder
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    entries = [entry for entry in inside if entry.is_dir() and not entry.name.startswith(".")]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    yield Finding("caches", "tokenised data", f"{len(entries):,}, {bytes_text(size)} in {folder}")
    damaged = [(entry, damage) for entry in entries if (damage := damage_in(entry))]
    for entry, damage in damaged[:MOST_NAMED]:
        yield Finding("caches", "damaged", str(entry), damage, "the next run that needs it makes it again")
    if len(damaged) > MOST_NAMED:
        yield Finding("caches", "damaged", f"and {len(damaged) - MOST_NAMED:,} more")


def _services() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    from radixtrain.commands.loggers import is_logged_in, is_online, settings_of_wandb, unreachable

    problem, fix = "", ""
    if constants.HF_HUB_OFFLINE:
        value = "offline (HF_HUB_OFFLINE): only what was downloaded"
    else:
        value, problem = f"online, at {constants.ENDPOINT}", unreachable(constants.ENDPOINT)
        fix = "HF_HUB_OFFLINE=1 uses only what was downloaded, without waiting" if problem else ""
    login = "logged in" if get_token() else "not logged in"
    yield Finding("services", "Hugging Face", f"{login}; {'not ' if problem else ''}{value}", problem, fix)
    settings = settings_of_wandb()
    login = "logged in" if is_logged_in(settings) else "not logged in: `wandb login` (only for trainer.logger: wandb)"
    yield Finding("services", "Weights & Biases", login if is_online(settings) else f"{settings.mode} (WANDB_MODE)")
