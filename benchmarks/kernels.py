"""Which operations have the same bits under other CPU kernels, other numbers of threads and on other processors.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --emulator qemu-x86_64-static     also on emulated processors (a quarter of an hour)

Each operation runs on the same inputs in a process of its own for each column, with the variables that `kernels=auto`,
`avx2` and `portable` pin; its result, and its gradients where it has some, are hashed. `=` means equal bits, and
operations with the same row are joined. Emulated processors show what the setting cannot pin: the libraries also look
at vendor, model and caches, and libm at FMA. QEMU computes with IEEE's rounding, as processors do, but for the
approximate instructions (rcpps, rsqrtps).
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.launch.kernels import PINNED

if TYPE_CHECKING:
    from torch import Tensor


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


AUTO, AVX2, PORTABLE = Variant("auto"), Variant("avx2"), Variant("portable")
COLUMNS = [
    ("auto = avx2", AUTO, AVX2),
    ("avx2 = portable", AVX2, PORTABLE),
    *((f"{one.kernels}: 1 = 2 threads", one, Variant(one.kernels, 2)) for one in (AUTO, AVX2, PORTABLE)),
]
EMULATED = [
    ("avx2 = Haswell's", AVX2, Variant("avx2", cpu="Haswell")),
    ("avx2 = EPYC's", AVX2, Variant("avx2", cpu="EPYC")),
    ("portable = EPYC's", PORTABLE, Variant("portable", cpu="EPYC")),
    ("portable = Nehalem's", PORTABLE, Variant("portable", cpu="Nehalem")),
]


BACKWARD = ", backward"
NOT_EMULATED = "lstm"  # QEMU 7.2 crashes in oneDNN's


Operations = Iterator[tuple[str, "Callable[[], list[Tensor]]"]]


@cache
def _generator() -> Any:
    import numpy as np

    return np.random.default_rng(0)


def draw(*shape: int) -> Tensor:
    """Draw numbers by numpy's integers and one rounding: the same on every processor."""
    import torch

    return torch.from_numpy((2 * _generator().random(shape) - 1).astype("float32"))


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """Return a function that returns the gradients of an operation."""
    import torch

    def run() -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        output = function(*leaves)
        weights = torch.arange(output.numel(), dtype=torch.float32).remainder(7).sub(3).view(output.shape)
        return list(torch.autograd.grad(output, leaves, weights))

    return run


def both(name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Operations:
    """Yield an operation and its backward pass."""
    yield name, lambda: [function(*inputs)]
    yield f"{name}{BACKWARD}", gradients(function, *inputs)


def last(values: Tensor) -> Tensor:
    """Return pictures in the memory format that training uses."""
    import torch

    return values.contiguous(memory_format=torch.channels_last)


def operations() -> Operations:
    """Yield the name of each operation, and a function that returns its results."""
    yield from layers()
    yield from elementwise()
    yield from updates_and_random_numbers()


def layers() -> Operations:
    """Yield the layers and losses of networks."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    for name, shape, weight, options in (
        ("conv2d 3x3, 32 to 32", (4, 32, 14, 14), (32, 32, 3, 3), {"padding": 1}),
        ("conv2d 3x3 stride 2, 64 to 128", (2, 64, 14, 14), (128, 64, 3, 3), {"padding": 1, "stride": 2}),
        ("conv2d 1x1, 64 to 128", (4, 64, 14, 14), (128, 64, 1, 1), {}),
        ("conv2d 7x7 stride 2, 3 to 32", (2, 3, 48, 48), (32, 3, 7, 7), {"padding": 3, "stride": 2}),
        ("conv2d 3x3, 1 to 16 (digits)", (32, 1, 8, 8), (16, 1, 3, 3), {"padding": 1}),
        ("conv2d 3x3, depthwise 32", (4, 32, 14, 14), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
    ):
        yield from both(name, lambda x, w, o=options: F.conv2d(x, w, **o), last(draw(*shape)), last(draw(*weight)))
    yield from both("linear, 512 to 1000", F.linear, draw(16, 512), draw(1000, 512), draw(1000))
    yield from both("linear, 64 to 10", F.linear, draw(32, 64), draw(10, 64), draw(10))
    yield from both("batched matmul", torch.bmm, draw(4, 32, 48), draw(4, 48, 40))
    yield from both(
        "batch norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        last(draw(8, 32, 14, 14)),
        draw(32),
        draw(32),
    )
    yield from both("layer norm", lambda x, w, b: F.layer_norm(x, (192,), w, b), draw(64, 192), draw(192), draw(192))
    yield from both("group norm", lambda x, w, b: F.group_norm(x, 4, w, b), draw(4, 32, 14, 14), draw(32), draw(32))
    yield from both("softmax", lambda x: F.softmax(x, 1), draw(32, 1000))
    yield from both("log_softmax", lambda x: F.log_softmax(x, 1), draw(32, 10))
    labels = torch.arange(32) % 10
    yield from both("cross_entropy", lambda x: F.cross_entropy(x, labels), draw(32, 10))
    yield from both("attention", F.scaled_dot_product_attention, *(draw(2, 4, 49, 32) for _ in range(3)))
    lengths = torch.full((4,), 30), torch.full((4,), 6)
    targets = torch.arange(24).view(4, 6) % 19 + 1
    yield from both("ctc_loss", lambda x: F.ctc_loss(F.log_softmax(x, 2), targets, *lengths), draw(30, 4, 20))
    torch.manual_seed(0)
    lstm = nn.LSTM(32, 24, batch_first=True)
    for parameter in lstm.parameters():
        parameter.data = draw(*parameter.shape)
    yield from both("lstm", lambda x: lstm(x)[0], draw(4, 20, 32))
    yield from both("max pooling", lambda x: F.max_pool2d(x, 2), last(draw(4, 32, 14, 14)))
    yield from both("average pooling", lambda x: F.adaptive_avg_pool2d(x, 1), last(draw(4, 32, 14, 14)))
    yield from both("bilinear resize", lambda x: F.interpolate(x, (20, 20), mode="bilinear"), last(draw(4, 32, 14, 14)))


def elementwise() -> Operations:
    """Yield reductions and functions of single values."""
    import torch
    import torch.nn.functional as F

    wide = draw(64, 3000)
    for name, reduce in (
        ("sum", torch.sum), ("mean", torch.mean), ("vector norm", torch.linalg.vector_norm), ("variance", torch.var),
        ("sum of columns", lambda x: x.sum(0)), ("sum of rows", lambda x: x.sum(1)),
    ):  # fmt: skip
        yield name, lambda function=reduce: [function(wide)]
    for name, unary in (
        ("exp", torch.exp), ("log", lambda x: (x + 2).log()), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid),
        ("gelu", F.gelu), ("silu", F.silu), ("erf", torch.erf), ("sin", torch.sin),
        ("pow 0.7", lambda x: (x + 2) ** 0.7),
        ("sqrt", lambda x: (x + 2).sqrt()), ("rsqrt", lambda x: (x + 2).rsqrt()), ("divide", lambda x: x / (x + 2)),
        ("relu, add, multiply", lambda x: F.relu(x) * x + x),
    ):  # fmt: skip
        yield from both(name, unary, wide)


def updates_and_random_numbers() -> Operations:
    """Yield optimizers and generators."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    for name, make in (
        ("SGD with momentum", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-4)),
        ("Adam", lambda p: torch.optim.Adam(p, 0.01)), ("AdamW", lambda p: torch.optim.AdamW(p, 0.01)),
    ):  # fmt: skip
        start, gradient = draw(5000), draw(5000)

        def steps(make: Any = make, start: Tensor = start, gradient: Tensor = gradient) -> list[Tensor]:
            weights = nn.Parameter(start.clone())
            optimizer = make([weights])
            for _ in range(3):
                weights.grad = gradient.clone()
                optimizer.step()
            return [weights.detach()]

        yield f"{name}, 3 steps", steps

    def seeded(function: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            torch.manual_seed(5)
            return [function()]

        return run

    yield "random numbers: uniform", seeded(lambda: torch.rand(1000))
    yield "random numbers: normal", seeded(lambda: torch.randn(1000))
    yield "random numbers: permutation", seeded(lambda: torch.randperm(1000))
    yield "random numbers: dropout", seeded(lambda: F.dropout(torch.ones(1000), 0.3))


def child(path: str, threads: int, without: str) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, run in operations():
        if without and name.startswith(without):
            continue
        digest = hashlib.sha256()
        for tensor in run():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()[:12]
    Path(path).write_text(json.dumps(found))


def run(variant: Variant, emulator: str | None, folder: Path) -> dict[str, str]:
    out = folder / "result.json"
    environ = {name: value for name, value in os.environ.items() if name not in PINNED["avx2"]}
    environ |= {**PINNED[variant.kernels], "OMP_NUM_THREADS": str(variant.threads)}
    before = [str(emulator), "-cpu", variant.cpu] if variant.cpu else []
    command = [*before, sys.executable, __file__, "--child", str(out), "--threads", str(variant.threads)]
    command += ["--without", NOT_EMULATED] if variant.cpu else []
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{variant.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return dict(json.loads(out.read_text()))


def digits_sha256(variant: Variant, folder: Path) -> str:
    """Train one epoch of digits, and return the SHA-256 of the weights."""
    run_dir = folder / f"digits-{variant.kernels}-{variant.threads}"
    settings = ["epochs=1", f"kernels={variant.kernels}", f"num_threads={variant.threads}"]
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "digits",
        *settings,
        "--procs",
        "1",
        "--run-dir",
        str(run_dir),
    ]
    environ = {name: value for name, value in os.environ.items() if name not in PINNED["avx2"]}
    subprocess.run(command, env=environ, check=True, capture_output=True)
    return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])


def cell(one: str, other: str | None) -> str:
    return "-" if other is None else "=" if one == other else "≠"


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
    widest = next((name for name in ("amx_tile", "avx512f", "avx2", "sse4_2") if name in lines), "unknown")
    return f"{found[1] if found else platform.processor()} (with {widest})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", help="qemu-x86_64-static, version 7.2 or newer")
    parser.add_argument("--digits", action="store_true", help="only the hashes of the recipe digits")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.threads, arguments.without)
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
        cells = tuple(cell(found[one][name], found[other].get(name)) for _, one, other in columns)
        rows.setdefault(cells, []).append(name)
    for cells, names in rows.items():
        print(f"| {'; '.join(shortened(names))} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
