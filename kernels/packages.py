"""The packages that kernels come from: is each installed, whole, new enough and made for this GPU? None is imported.

A name that Python finds says little. flash-attn (2) and flash-attn-4 both own `flash_attn/`: version 4 has only
`flash_attn/cute` in it, and version 2 brings an older `flash_attn/cute` of its own, so the one installed last wins.
The question is therefore always about the module that is imported in the end, and the distribution that brought it.
"""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from radixtrain.versions import installed, is_older, to_install


class Package(NamedTuple):
    """The distribution that a kernel comes from.

    name: of the distribution. module: what the kernel imports. how: to get it. majors: of the compute capabilities that
    it runs on, forward and backward; empty if it is not asked.
    """

    name: str
    module: str
    how: str
    majors: tuple[int, ...] = ()


PACKAGES = {
    "flash_attn": Package(
        "flash-attn", "flash_attn.flash_attn_interface", f"{to_install('flash-attn')}, needs a CUDA toolchain"
    ),
    "flash_attn_3": Package(
        "flash-attn-3", "flash_attn_3._C", "built from hopper/ of Dao-AILab/flash-attention", majors=(9,)
    ),
    # On 8.x it has no backward, on 12.x none in a fixed order.
    "flash_attn_4": Package(
        "flash-attn-4", "flash_attn.cute.interface", to_install("flash-attn-4"), majors=(9, 10, 11)
    ),
}


def package_missing(kernel: str, device: torch.device) -> str | None:
    """Say what a kernel lacks on a CUDA device, in the words of an error; None if nothing or if it has no package."""
    package = PACKAGES.get(kernel)
    if package is None:
        return None
    version = installed(package.name)
    if version is None:
        return f"the package {package.name} is not installed ({package.how})"
    if is_older(package.name, version):
        return f"the package {package.name} {version} is too old ({to_install(package.name)})"
    if not _is_whole(package):
        again = f"pip install --force-reinstall --no-deps {package.name}=={version}"
        return f"{package.module} is not that of {package.name} {version}, which was overwritten or removed ({again})"
    return unfit_device(package.majors, device) if package.majors else None


def unfit_device(majors: tuple[int, ...], device: torch.device) -> str | None:
    """Say why a CUDA device has none of these compute capabilities, in the words of an error; None if it has one."""
    fit = f"needs a GPU of compute capability {' or '.join(f'{major}.x' for major in majors)}"
    if not torch.cuda.is_available():
        return f"{fit}, and torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in majors else f"{fit}, this one has {major}.{minor}"


def _is_whole(package: Package) -> bool:
    """Return whether the module that would be imported exists, with the size that its distribution lists."""
    spec = _spec_of(package.module)
    if spec is None or spec.origin is None:
        return False
    origin = Path(spec.origin)
    inside = "/".join(origin.parts[-1 - package.module.count(".") :])
    sizes = [file.size for file in metadata.files(package.name) or () if file.as_posix() == inside]
    return sizes in ([], [None], [origin.stat().st_size])  # an install from a source tree lists none


def _spec_of(module: str) -> ModuleSpec | None:
    """Find a dotted module. `find_spec` would import the parents, and with them CUDA code that may fail."""
    name, *parts = module.split(".")
    spec = find_spec(name)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec
