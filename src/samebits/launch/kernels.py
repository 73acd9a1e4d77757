"""What ATen, oneDNN and MKL choose their CPU kernels by. Nothing here imports torch."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

# They read these at their first computation.
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
# Instruction sets by which libraries choose kernels, as /proc/cpuinfo names them: those of x86-64, then those of ARM.
INSTRUCTIONS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimdhp", "asimddp", "asimdfhm", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


def describe_processor() -> dict[str, str]:
    """Return what the libraries choose kernels by: vendor, instructions."""
    info = cpu_info()
    flags = info.get("flags", info.get("Features", "")).split()
    found = [name for name in INSTRUCTIONS if name in flags]
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
