"""`radixtrain doctor`: what can train here, what is missing, and the command that installs it.

Imports packages that may be missing only inside functions, since a finding reports them.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from radixtrain import __version__
from radixtrain.cores import WAITING, num_cores, processor
from radixtrain.errors import UserError, bytes_text, first_line
from radixtrain.screen import printable
from radixtrain.settings.commands import Doctor
from radixtrain.versions import FIT, OLDEST, TESTED, WHY, installed, is_newer_than_tested, is_older, to_install

WIDTH = 24  # of the column of names
NEEDED = (*OLDEST, *FIT, "tokenizers")
OPTIONAL = {  # package -> what it is for
    "accelerate": "the trainers of Hugging Face and TRL, in scripts of your own",
    "peft": "LoRA, DoRA",
    "bitsandbytes": "QLoRA (model.load_in_4bit)",
    "flash-attn": "attention on CUDA, with a CUDA toolchain",
    "flash-attn-4": "attention on Hopper and Blackwell",
    "flash-linear-attention": "recurrent layers on CUDA",
    "causal-conv1d": "recurrent layers on CUDA",
    "matplotlib": "loss.png",
    "wandb": "trainer.logger: wandb",
    "trackio": "trainer.logger: trackio",
    "tensorboard": "trainer.logger: tensorboard",
    "mlflow": "trainer.logger: mlflow",
    "trl": "TRL's trainers, in scripts of your own",
}
HEAD_DIM = 128  # of most models


def run(settings: Doctor, words: Sequence[str]) -> None:
    """Print versions, devices, the attention that would run, and any problems.

    Raises:
        UserError: no training can run here, or should: a package is missing, or has a known vulnerability.
    """
    found = findings()
    blocking = [finding for finding in found if finding.blocks and finding.name not in FIT]
    if settings.json:
        entries = [finding._asdict() for finding in found]
        can = {"can_train": not blocking, "can_fit": not any(finding.blocks for finding in found)}
        print(json.dumps({**can, "findings": entries}, indent=2))  # noqa: T201
    else:
        print(printable(_text(found)))  # noqa: T201
    if blocking:
        raise UserError(f"training cannot run here: {'; '.join(f'{each.name} {each.text}' for each in blocking)}")


def _text(found: Sequence[Finding]) -> str:
    """Write a paragraph for each section, and a last line."""
    lines = []
    for section, group in groupby(found, key=lambda finding: finding.section):
        lines.append(section)
        for finding in group:
            blocked = "`radixtrain fit` cannot run: " if finding.name in FIT else "ERROR: "
            lines.append(f"  {finding.name:<{WIDTH}} {blocked if finding.blocks else ''}{finding.text}")
        lines.append("")
    blocking = {finding.name for finding in found if finding.blocks}
    if not blocking:
        lines.append("Training can run here. `radixtrain verify` compares its gradient with the ordinary one.")
    elif blocking <= FIT.keys():
        lines.append("Your own trainer can run here, with share_prefixes or RadixCollator.")
        lines.append("`radixtrain fit` cannot: in the folder of radixtrain, pip install '.[fit]'")
    return "\n".join(lines)


class Finding(NamedTuple):
    """A line of the report.

    problem: what is wrong or missing, empty if nothing is. fix: a command, or what to do. blocks: whether training, or
    `radixtrain fit` if the package is of FIT, cannot run, or should not, until it is fixed.
    """

    section: str
    name: str
    value: str
    problem: str = ""
    fix: str = ""
    blocks: bool = False

    @property
    def text(self) -> str:
        """Return the value, the problem and the fix, without those that are empty."""
        return ": ".join(filter(None, (self.value, self.problem, self.fix)))


def findings() -> list[Finding]:
    """List all findings. A check that fails is a finding itself."""
    found: list[Finding] = []
    for section, look in {"packages": _packages, "devices": _devices, "attention": _attention}.items():
        try:
            found += look()
        except (ImportError, OSError, RuntimeError) as error:  # a library that is missing, or does not load
            fix = "install torch again, see https://pytorch.org for the command"
            found.append(Finding(section, section, "unknown", first_line(error), fix, blocks=True))
    return found


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "radixtrain", __version__)
    yield Finding("packages", "python", platform.python_version())
    for name in (*NEEDED, *OPTIONAL):
        is_needed, version = name in NEEDED, installed(name)
        if version is None:
            problem = "not installed" if is_needed else f"not installed; it is for {OPTIONAL[name]}"
            yield Finding("packages", name, "", problem, to_install(name), is_needed)
        elif is_older(name, version):
            problem = WHY.get(name, "older ones lack functions that radixtrain calls")
            yield Finding("packages", name, version, problem, to_install(name), is_needed)
        else:
            newer = f"newer than tested ({TESTED[name]})" if is_newer_than_tested(name, version) else ""
            yield Finding("packages", name, version, newer)


def _devices() -> Iterator[Finding]:
    import torch

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    threads = f"torch uses {torch.get_num_threads()} of them"
    yield Finding("devices", "cpu", f"{processor()}, {num_cores()} cores, {threads}, {bytes_text(memory)}")
    waiting = [f"{name}={os.environ[name]}" for name in WAITING if name in os.environ]
    yield Finding("devices", "waiting threads", ", ".join(waiting) or "spin, which is slow next to other programs")
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
    """Yield what `auto` would run, and why each other kernel cannot, found by the functions that choose."""
    import torch

    from radixtrain.attention import choose_attention
    from radixtrain.kernels.varlen import KERNELS, KernelCall, varlen_refusal

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        choice = choose_attention("auto", "auto", device, dtype, HEAD_DIM)
        name = str(dtype).removeprefix("torch.")
        yield Finding("attention", f"auto, {name}", f"{choice.strategy} on {device.type}, kernel {choice.kernel}")
    call = KernelCall(device, torch.bfloat16, HEAD_DIM)
    for kernel in KERNELS:
        refusal = varlen_refusal(kernel, call)
        yield Finding("attention", kernel, f"cannot run in bfloat16: {refusal}" if refusal else "can run")
