"""What Samebits does on the GPUs of this machine, in one table: bits, throughput, reading of data, memory, peers.

    python -m benchmarks.gpu --peers-python .venv/bench/bin/python    # `make bench-gpu`: under 10 minutes
    python -m benchmarks.gpu --parts bits --device cpu                # one part, on the CPU

Runs commands on 1, 2, 4 ... GPUs, as many as there are, prints each with its results, and writes them with versions and
names of the GPUs to gpu-report.json, a file to send back. A command that fails is reported, and the next one runs.
Without a GPU it prints the commands that it would run.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import samebits

ROOT = Path(__file__).resolve().parents[1]
SAMEBITS = (sys.executable, "-m", "samebits")
SHAPES = ("classify/shapes", "epochs=3", "global_batch=256", "data.size_px=128")
NUM_PER_CLASS = 1000  # of five classes
REPORT = "gpu-report.json"
PART_S = 180.0  # for the commands of a part together


@dataclass(frozen=True)
class Row:
    """One result with its unit, and whether it is as it should be."""

    what: str
    value: str
    is_ok: bool = True


@dataclass(frozen=True)
class Part:
    """Some commands, and what is read from their output: (outputs of the commands) -> rows."""

    name: str
    title: str
    commands: Sequence[Sequence[str]]
    read: Callable[[Sequence[str]], Iterator[Row]]


def sizes(num_devices: int) -> list[int]:
    """Return 1, 2, 4 ... up to a number, and the number."""
    powers = [1 << power for power in range(num_devices.bit_length())]
    return sorted({*powers, num_devices})


def parts(device: str, procs: Sequence[int], folder: Path, peers_python: str) -> list[Part]:
    """Return all parts."""
    on = f"device={device}"
    listed = ",".join(map(str, procs))

    def runs(name: str, *settings: str) -> list[list[str]]:
        return [
            [*SAMEBITS, "train", *settings, on, "--procs", str(size), "--run-dir", str(folder / f"{name}-{size}")]
            for size in procs
        ]

    def same_bits(name: str) -> Callable[[Sequence[str]], Iterator[Row]]:
        def read(_: Sequence[str]) -> Iterator[Row]:
            results = {size: _json(folder / f"{name}-{size}" / "result.json") for size in procs}
            hashes = {result["weights_sha256"] for result in results.values()}
            yield Row(f"weights on {listed}", " ".join(sha256[:12] for sha256 in sorted(hashes)), len(hashes) == 1)
            for size, result in results.items():
                waited = result["seconds"]["data_wait"] / result["seconds"]["training"]
                rate = f"{result['samples_per_s']:,.0f} samples/s, {waited:.0%} of training time waiting for data"
                yield Row(f"training on {size}", rate)

        return read

    def steps(outputs: Sequence[str]) -> Iterator[Row]:
        for line in filter(None, outputs[0].splitlines()):
            if " ms" in line:
                network = line.split()[0]
            else:
                *title, step, ratio, _, peak, first = line.split()
                yield Row(
                    f"{network}: {' '.join(title)}", f"{step} ms, {ratio} of plain, {peak} MB, first step {first} s"
                )

    images = str(folder / "images")
    make = [*SAMEBITS, "data", "make", "classify", f"num_per_class={NUM_PER_CLASS}", "--out", images]
    shapes = [*SHAPES, f"data.root={images}"]
    peers = ["--peers-python", peers_python] if peers_python else []
    step = [sys.executable, "-m", "benchmarks.steps", "--steps", "20", "--rounds", "3", *peers]
    return [
        Part("bits", "digits: equal weights on any number", runs("digits", "digits", "epochs=2"), same_bits("digits")),
        Part(
            "images",
            "ResNet-18 on image files of 128 px: equal weights, and whether the files are read fast enough",
            [make, *runs("shapes", *shapes)],
            same_bits("shapes"),
        ),
        Part("peers", "step time and peak memory on one, beside Lightning and Accelerate", [step], steps),
    ]


def run(part: Part, known: dict[tuple[str, ...], str]) -> list[Row]:
    """Run a part's commands; return its rows, or one that names what failed.

    Args:
        part: The part.
        known: Outputs of commands that an earlier part has run, which are not run again; new ones are added.
    """
    end = time.monotonic() + PART_S
    for command in filter(lambda command: tuple(command) not in known, part.commands):
        print(f"  $ {shlex.join(_short(command))}", flush=True)
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, end - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            return [Row(shlex.join(_short(command)), f"not done after {PART_S:.0f} s", is_ok=False)]
        if done.returncode:
            last = (done.stderr or done.stdout).strip()[-600:]
            return [Row(shlex.join(_short(command)), f"exit code {done.returncode}: {last}", is_ok=False)]
        known[tuple(command)] = done.stdout
    return list(part.read([known[tuple(command)] for command in part.commands]))


def facts() -> dict[str, Any]:
    """Return versions and devices."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "samebits": samebits.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "gpus": names,
    }


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _short(command: Sequence[str]) -> list[str]:
    """Return a command line as one would type it."""
    words = [word.removeprefix(f"{ROOT}/") for word in command]
    return ["samebits", *words[3:]] if tuple(command[:3]) == SAMEBITS else ["python", *words[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--peers-python", default="", help="Python interpreter with lightning and accelerate")
    parser.add_argument("--parts", default="", help="names of parts, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=Path(REPORT))
    arguments = parser.parse_args()
    is_there = arguments.device == "cpu" or torch.cuda.is_available()
    procs = sizes(2 if arguments.device == "cpu" else max(1, torch.cuda.device_count()))
    with tempfile.TemporaryDirectory() as folder:
        every = parts(arguments.device, procs, Path(folder), arguments.peers_python)
        names = arguments.parts.split(",") if arguments.parts else [part.name for part in every]
        if unknown := set(names) - {part.name for part in every}:
            parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in every)}")
        known: dict[tuple[str, ...], str] = {}
        report: dict[str, Any] = {"facts": facts(), "parts": {}}
        if not is_there:
            print("No CUDA device is available here. On a machine with one, this would run:\n")
        for part in every:
            if part.name not in names:
                continue
            print(f"{part.name}: {part.title}", flush=True)
            if not is_there:
                print("".join(f"  $ {shlex.join(_short(command))}\n" for command in part.commands))
                continue
            began = time.monotonic()
            rows = run(part, known)
            for row in rows:
                print(f"  {row.what:<36} {'' if row.is_ok else 'FAIL  '}{row.value}")
            print(f"  {time.monotonic() - began:.0f} s\n", flush=True)
            report["parts"][part.name] = [[row.what, row.value, row.is_ok] for row in rows]
    if not is_there:
        return 0
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.out}  to send back")
    return 0 if all(is_ok for rows in report["parts"].values() for *_, is_ok in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
