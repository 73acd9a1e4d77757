"""The environment of a run: versions, hardware and commit, for `environment.json`."""

import os
import platform
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from samebits.cluster.world import World
from samebits.config.plain_file import read_plain
from samebits.launch.kernels import cpu_info, describe_processor
from samebits.portable.arithmetic import VERSION
from samebits.version import __version__

# Libraries that compute parts of a run's result.
COMPUTING = (
    "torch", "torchvision", "numpy", "opencv-python-headless", "opencv-python", "pillow", "simplejpeg", "scikit-learn",
)  # fmt: skip
PACKAGES = (*COMPUTING, "safetensors")
# Environment variables by which libraries select their kernels.
VARIABLES = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
# Properties of the hardware in which ranks may differ without a difference of software.
HARDWARE = ("CPU capability", "CPU vendor", "CPU instructions", "GPU")
PROCESSOR = "processor"
_MAX_GIT_BYTES = 1 << 26  # packed-refs has a line for each branch and tag


def environment(world: World) -> dict[str, Any]:
    """Describe the environment for which equal weights are promised: versions, hardware, commit and world."""
    return {
        "python": platform.python_version(),
        "packages": {"samebits": __version__} | {name: found for name in PACKAGES if (found := version_of(name))},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "gpu": device_name(world.device) if world.device.type == "cuda" else None,
        "cuda": torch.version.cuda if world.device.type == "cuda" else None,
        "commit": commit_of(Path.cwd()),
        "command": sys.argv,
        "world": {"size": world.size, "backend": world.backend, "device": world.device.type, "host": world.host},
    }


def describe_kernels(device: torch.device, kernels: str) -> dict[str, str]:
    """Return what determines a run's bits beside code, settings and data: versions, kernels and hardware, by name.

    What the setting `kernels` pins is not a property of the processor any more.
    """
    if kernels == "portable":
        # What computes has no part in the bits; what decodes and draws samples has.
        decoders = {name: version_of(name) for name in COMPUTING if not name.startswith("torch")}
        own = {"samebits": __version__, "arithmetic": VERSION, **decoders}
        return {name: value for name, value in own.items() if value}
    # Versions of the libraries that torch found when it was loaded; some builds share the system's MKL.
    text = torch.__config__.show()
    libraries = {
        "MKL": re.search(r"Math Kernel Library Version (\S+)", text),
        "oneDNN": re.search(r"MKL-DNN v(\S+)", text),
    }
    found: dict[str, str | None] = {
        "samebits": __version__,
        **{name: version_of(name) for name in COMPUTING},
        "torch": torch.__version__,  # with +cpu or +cu126
        **{name: match[1] for name, match in libraries.items() if match},
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        **describe_processor(kernels),
        **{name: os.environ.get(name) for name in VARIABLES},
        PROCESSOR: cpu_name(),
    }
    if device.type == "cuda":
        found |= {"GPU": device_name(device), "CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
    return {name: value for name, value in found.items() if value}


@cache
def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Return a device's name: the GPU model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_name() -> str:
    """Return the processor with the details by which kernels are selected: two of one name may differ in their bits."""
    info = cpu_info()
    name = info.get("model name", platform.processor())
    numbers = [f"{key.removeprefix('cpu ')} {info[key]}" for key in ("cpu family", "model", "stepping") if key in info]
    return ", ".join([name, *numbers, torch.backends.cpu.get_cpu_capability()])


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder's repository, 12 digits; None outside of git.

    It is read from git's files, since git itself runs programs that the repository's settings name (`core.fsmonitor`,
    filters). So uncommitted changes are not detected.
    """
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        try:
            if git.is_file():  # in a worktree or a submodule: a file with the folder's path
                git = parent / _text(git).removeprefix("gitdir:").strip()
            if git.is_dir():
                return _resolve(git)
        except (OSError, ValueError):
            return None
    return None


def _resolve(git: Path) -> str | None:
    name = _text(git / "HEAD")
    # A worktree has its own HEAD, and its branches are in the repository's common folder.
    common = git / _text(git / "commondir") if (git / "commondir").is_file() else git
    if name.startswith("ref:"):
        ref = name.removeprefix("ref:").strip()
        # In a stranger's repository, HEAD must not lead to other files.
        if not ref.startswith("refs/") or ".." in ref:
            return None
        if (common / ref).is_file():
            name = _text(common / ref)
        else:
            packed = _text(common / "packed-refs").splitlines() if (common / "packed-refs").is_file() else []
            name = next((line.split()[0] for line in packed if line.endswith(f" {ref}")), "")
    return name[:12] if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name) else None


def _text(path: Path) -> str:
    return read_plain(path, _MAX_GIT_BYTES).decode().strip()
