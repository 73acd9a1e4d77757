"""A script for eight GPUs, under torchrun with 8, 4 and 1 processes, and as 8 ranks in several places.

    make demo-ranks
    python -m benchmarks.ranks --script examples/eight_gpus.py --as 8

Prints the table of the README. The hash is the one that the script prints.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from samebits.cluster.address import ReservedPort

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "eight_gpus.py"
LAUNCH = [sys.executable, "-P", "-m", "samebits", "launch"]


def run(commands: list[list[str]]) -> str:
    """Run commands at the same time; return what the first one has printed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        for command in commands
    ]
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("\n".join(texts))
    return texts[0]


def row(name: str, text: str) -> str:
    """Return a line of the table, from what a start has printed."""
    ((rate, steps),) = re.findall(r"learning rate ([\d.]+), (\d+) steps an epoch", text)
    accuracy = re.findall(r"accuracy ([\d.]+%)", text)[-1]
    (digest,) = re.findall(r"^sha256 (\w{12})", text, re.MULTILINE)
    return f"| {name} | {rate} | {steps} | {accuracy} | {digest} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, default=SCRIPT)
    parser.add_argument("--as", type=int, default=8, dest="ranks")
    arguments = parser.parse_args()
    ranks, script = arguments.ranks, [str(arguments.script)]
    print("| started by | learning rate | steps an epoch | accuracy | SHA-256 of the weights |\n|---|---|---|---|---|")
    for procs in (ranks, ranks // 2, 1):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={procs}"]
        print(row(f"`torchrun --nproc-per-node {procs}`", run([[*torchrun, *script]])), flush=True)
    print(row(f"`samebits launch --as {ranks}`", run([[*LAUNCH, "--as", str(ranks), *script]])), flush=True)
    one_core = ["taskset", "-c", "0"] if sys.platform == "linux" else []
    text = run([[*one_core, *LAUNCH, "--as", str(ranks), *script]])
    print(row("the same on one core", text), flush=True)
    port = ReservedPort()
    few = max(ranks // 4, 1)
    flags = ["--ranks", f"{ranks - few},{few}", "--rdzv-endpoint", f"127.0.0.1:{port.renew()}"]
    text = run([[*LAUNCH, *flags, "--node-rank", str(node), *script] for node in range(2)])
    port.close()
    print(row(f"the same under two launchers, {ranks - few} + {few} ranks", text), flush=True)


if __name__ == "__main__":
    main()
