"""Which operations have the same bits under other CPU kernels, other numbers of threads and on other processors.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --emulator qemu-x86_64-static     also on emulated processors (a quarter of an hour)

Each operation runs on the same inputs in a process of its own for each column, as `kernels=auto` and `portable`
compute it, and as `auto` does with the kernels for AVX2; its result, and its gradients where it has some, are hashed.
`=` means equal bits, and operations with the same row are joined. Emulated processors show what variables cannot pin:
the libraries also look at vendor, model and caches, and libm at FMA. QEMU computes with IEEE's rounding, as processors
do, but for the approximate instructions (rcpps, rsqrtps).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernel_operations import BACKWARD, operations
from samebits.launch.kernels import VARIABLES as READ


@dataclass(frozen=True)
class Variant:
    """One process: its kernels, threads and processor (None: this one)."""

    kernels: str
    threads: int = 1
    cpu: str | None = None

    @property
    def name(self) -> str:
        """The variant in words."""
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"{self.kernels}{threads}{f' on {self.cpu}' if self.cpu else ''}"


# Portable arithmetic on the kernels of a processor without AVX.
PLAIN = "portable without AVX"
WITH_AVX2 = "auto with AVX2"
VARIABLES: dict[str, dict[str, str]] = {
    "auto": {},
    "portable": {},
    WITH_AVX2: dict(zip(READ, ("avx2", "AVX2", "AVX2", "AVX2"), strict=True)),
    PLAIN: {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
AUTO, AVX2, PORTABLE = Variant("auto"), Variant(WITH_AVX2), Variant("portable")
COLUMNS = [
    ("auto = auto with AVX2", AUTO, AVX2),
    ("portable = portable without AVX", PORTABLE, Variant(PLAIN)),
    *((f"{one.kernels}: 1 = 2 threads", one, Variant(one.kernels, 2)) for one in (AUTO, AVX2, PORTABLE)),
]
EMULATED = [
    ("AVX2 = Haswell's", AVX2, Variant(WITH_AVX2, cpu="Haswell")),
    ("AVX2 = EPYC's", AVX2, Variant(WITH_AVX2, cpu="EPYC")),
    ("portable = EPYC's", PORTABLE, Variant("portable", cpu="EPYC")),
    ("portable = Nehalem's", PORTABLE, Variant("portable", cpu="Nehalem")),
]
NOT_EMULATED = "lstm"  # QEMU 7.2 crashes in oneDNN's


def child(path: str, threads: int, without: str, *, is_portable: bool) -> None:
    import torch

    from samebits.errors import ConfigError
    from samebits.portable.arithmetic import use_portable_arithmetic

    use_portable_arithmetic(is_portable)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, run in operations():
        if without and name.startswith(without):
            continue
        digest = hashlib.sha256()
        try:
            tensors = run()
        except ConfigError:  # it has no portable form
            continue
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()[:12]
    Path(path).write_text(json.dumps(found))


def run(variant: Variant, emulator: str | None, folder: Path) -> dict[str, str]:
    out = folder / "result.json"
    environ = {name: value for name, value in os.environ.items() if name not in READ}
    environ |= {**VARIABLES[variant.kernels], "OMP_NUM_THREADS": str(variant.threads)}
    before = [str(emulator), "-cpu", variant.cpu] if variant.cpu else []
    command = [
        *before, sys.executable, "-m", "benchmarks.kernels", "--child", str(out), "--threads", str(variant.threads),
    ]  # fmt: skip
    command += ["--without", NOT_EMULATED] if variant.cpu else []
    command += ["--portable"] if variant.kernels.startswith("portable") else []
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{variant.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return dict(json.loads(out.read_text()))


def digits_sha256(variant: Variant, folder: Path) -> str:
    """Train one epoch of digits, and return the SHA-256 of the weights."""
    run_dir = folder / f"digits-{variant.kernels}-{variant.threads}"
    settings = ["epochs=1", f"kernels={variant.kernels.partition(' ')[0]}", f"num_threads={variant.threads}"]
    command = [
        sys.executable, "-m", "samebits", "train", "digits", *settings, "--procs", "1", "--run-dir", str(run_dir),
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name not in READ}
    environ |= VARIABLES[variant.kernels]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])


def cell(one: str | None, other: str | None) -> str:
    return "-" if one is None or other is None else "=" if one == other else "≠"


def shortened(names: list[str]) -> list[str]:
    """Join an operation and its backward pass."""
    forward = [
        name for name in names if name.removesuffix(BACKWARD) == name or name.removesuffix(BACKWARD) not in names
    ]
    return [f"{name} (also backward)" if f"{name}{BACKWARD}" in names else name for name in forward]


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", lines, re.MULTILINE)
    widest = next(
        (name for name in ("amx_tile", "avx512_vnni", "avx512f", "avx2", "sse4_2") if name in lines), "unknown"
    )
    return f"{found[1] if found else platform.processor()} (with {widest})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", help="qemu-x86_64-static, version 7.2 or newer")
    parser.add_argument("--digits", action="store_true", help="only the hashes of the recipe digits")
    parser.add_argument("--portable", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.threads, arguments.without, is_portable=arguments.portable)
        return
    emulator = arguments.emulator and shutil.which(arguments.emulator)
    if arguments.emulator and emulator is None:
        raise SystemExit(f"{arguments.emulator} is not a program")
    columns = COLUMNS + (EMULATED if emulator else [])
    variants = list(dict.fromkeys(each for _, *pair in columns for each in pair))
    print(f"{processor()}, {platform.platform()}\n")
    with tempfile.TemporaryDirectory() as folder:
        print("| digits, one epoch | SHA-256 of the weights |\n|---|---|")
        for variant in variants:
            if variant.cpu is None:
                print(f"| {variant.name} | {digits_sha256(variant, Path(folder))[:16]} |", flush=True)
        if arguments.digits:
            return
        found = {variant: run(variant, emulator, Path(folder)) for variant in variants}
    print()
    print("| operations | " + " | ".join(title for title, *_ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in found[AUTO]:
        cells = tuple(cell(found[one].get(name), found[other].get(name)) for _, one, other in columns)
        rows.setdefault(cells, []).append(name)
    for cells, names in rows.items():
        print(f"| {'; '.join(shortened(names))} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
