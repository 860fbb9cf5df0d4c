"""A CUDA device for a process that has none: `python device.py LIBRARY GROUP` runs the steps of `steps.py` on it.

Torch asks only once, while it is imported, whether there is a device. Tensors on this one exist only under torch's
`FakeTensorMode`: they have a device, a dtype and a shape, and no values. LIBRARY: `device.cpp`, compiled.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

__all__ = ["answer", "pretend"]

TESTS = Path(__file__).resolve().parents[2]
CAPABILITY, NAME, BYTES = (9, 0), "NVIDIA H100 80GB HBM3", 80 * 2**30


def pretend(library: str) -> None:
    """Register the device of `device.cpp`, compiled as `library`, which torch then finds."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None and "torch" not in sys.modules
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)


def answer() -> None:
    """Have `torch.cuda` say what it says on an H100. Called once all is imported: Triton looks for a driver then."""
    from types import SimpleNamespace

    import torch
    from torch._subclasses import fake_tensor

    vars(fake_tensor)["init_gpu_context"] = lambda *_: None  # it would make a real tensor
    state = torch.get_rng_state()
    for module in (torch.cuda, torch.cuda.random):  # nothing is drawn
        vars(module).update(get_rng_state=lambda device=None: state, set_rng_state=lambda *_: None)
    vars(torch.cuda).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_capability=lambda device=None: CAPABILITY,
        get_device_name=lambda device=None: NAME,
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=BYTES),
        is_bf16_supported=lambda including_emulation=True: True,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device=None: (BYTES, BYTES),
        memory_allocated=lambda device=None: 0,
        memory_reserved=lambda device=None: 0,
        max_memory_allocated=lambda device=None: 0,
        reset_peak_memory_stats=lambda device=None: None,
    )


def main(library: str, group: str) -> None:
    pretend(library)
    sys.path.append(str(TESTS / "support"))
    import steps

    answer()
    steps.main(group)
    sys.stdout.flush()
    os._exit(0)  # without torch's own end, which now and then aborts over the threads of a device that is none


if __name__ == "__main__":
    main(*sys.argv[1:])
