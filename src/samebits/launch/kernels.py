"""Pin the CPU kernels of a run (`kernels`): the variables by which ATen, oneDNN and MKL choose among instruction sets.

The libraries read them at their first computation, so they are set before it. Importing torch computes nothing, so a
recipe file that imports torch may be loaded before. Nothing here imports torch.
"""

import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from samebits.errors import ConfigError

PINNED: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AVX2",
    },
    "portable": {},  # any kernels compute portable arithmetic
}
# The variables that `pin_kernels` may set.
PINS = tuple(PINNED["avx2"])
# What torch then reports as its capability.
CAPABILITY = {"avx2": "AVX2"}
# Instruction sets by which libraries choose kernels, as /proc/cpuinfo names them: those of x86-64, then those of ARM.
INSTRUCTIONS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimdhp", "asimddp", "asimdfhm", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
# What the pinned libraries and libm, which nothing pins, still choose by.
_LEFT = {"avx2": ("f16c", "fma", "avx2")}

_pinned: str | None = None  # by this process


def pin_kernels(kernels: str, *, only_children: bool = False) -> None:
    """Set the variables of `kernels` for this process, unless it computes nothing itself, and for those that it starts.

    Raises:
        ConfigError: The processor has no such kernels, a variable has another value, or torch has computed before.
    """
    global _pinned
    wanted = PINNED[kernels]
    # The libraries read the variables once in a process, so another value would have no effect and no error.
    if _pinned not in (None, kernels) and kernels != "portable":
        raise ConfigError(
            f"kernels={kernels} has no effect in this process, which has used kernels={_pinned} before",
            fix="Start another Python process.",
        )
    for name, value in wanted.items():
        found = os.environ.get(name, "")
        if found and found.upper() != value.upper():
            raise ConfigError(
                f"{name} is {found}, but kernels={kernels} sets it to {value}",
                fix=f"Unset {name}, or set kernels=auto.",
            )
    if wanted:
        _check_processor(kernels)
        os.environ.update(wanted)
        _pinned = kernels
    if not only_children and not has_effect(kernels):
        raise too_late(kernels)


def has_effect(kernels: str) -> bool:
    """Return whether this process computes with the pinned kernels. torch then chooses them, if it has not before."""
    torch = sys.modules.get("torch")
    wanted = CAPABILITY.get(kernels)
    return wanted is None or torch is None or torch.backends.cpu.get_cpu_capability() == wanted


def too_late(kernels: str) -> ConfigError:
    """Return the error for a process in which torch has chosen other kernels."""
    return ConfigError(
        f"kernels={kernels} has no effect in this process, because torch has computed before",
        cause="A recipe file computes with torch when it is imported, or the program has used torch.",
        fix="Compute in functions of the recipe only; train with the command or samebits.train; or set kernels=auto.",
    )


def _check_processor(kernels: str) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            f"kernels={kernels} is for x86-64 processors, and this one is {platform.machine()}",
            fix="Set kernels=auto.",
        )
    flags = cpu_info().get("flags", "").split()
    if kernels == "avx2" and flags and not {"avx2", "fma"} <= set(flags):
        raise ConfigError(
            "kernels=avx2 needs a processor with AVX2 and FMA, and this one does not have them",
            fix="Set kernels=portable or kernels=auto.",
        )


def describe_processor(kernels: str) -> dict[str, str]:
    """Return what the libraries choose kernels by, as far as `kernels` leaves them the choice: vendor, instructions."""
    info = cpu_info()
    flags = info.get("flags", info.get("Features", "")).split()
    found = [name for name in _LEFT.get(kernels, INSTRUCTIONS) if name in flags]
    vendor = info.get("vendor_id", info.get("CPU implementer", ""))
    values = {"CPU vendor": vendor, "CPU instructions": " ".join(found)}
    return {name: value for name, value in values.items() if value}


# The processor does not change, and the file has thousands of lines on a machine with many cores.
@cache
def cpu_info() -> Mapping[str, str]:
    """Return the first processor's entries in /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    info: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    return info
