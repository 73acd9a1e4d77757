"""`samebits check SCRIPT --as N`: whether an unmodified script gives equal bits wherever its ranks run.

Its first steps run under one launcher, once more, and under two launchers that share the ranks as two machines would.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits import scratch
from samebits.cluster.address import ReservedPort
from samebits.errors import ConfigError
from samebits.launch.subcommand import SAMEBITS
from samebits.replay.check import Report
from samebits.replay.judge import Finding

NUM_STEPS = 6
TIMEOUT_S = 300.0
TAIL_LINES = 12  # of a failing script's output


@dataclass(frozen=True)
class _Placement:
    name: str
    shares: tuple[int, ...]  # the ranks of each launcher


def check_ranks(
    script: str, arguments: Sequence[str], num_ranks: int, progress: Callable[[str, int, int], None]
) -> Report:
    """Run the first steps of a script in several placements of its ranks, and compare the weights after each step.

    Args:
        script: The script; `arguments` are its own.
        num_ranks: How many ranks there are.
        progress: Called with (activity, done, total).

    Raises:
        ConfigError: The script fails, or trains no step.
    """
    began = time.monotonic()
    placements = [
        _Placement("one launcher", (num_ranks,)),
        _Placement("one launcher again", (num_ranks,)),
    ]
    if num_ranks > 1:
        half = num_ranks // 2
        placements.append(
            _Placement(
                f"two launchers, {num_ranks - half} + {half} ranks", (num_ranks - half, half)
            )
        )
    passed: list[str] = []
    findings: list[Finding] = []
    with scratch.scratch_folder(Path(tempfile.gettempdir())) as folder:
        reference: list[dict[str, int]] = []
        for number, placement in enumerate(placements):
            progress(placement.name, number, len(placements))
            steps = _run(script, arguments, placement, folder / str(number))
            finding = None if number == 0 else _compare(reference, steps, placement)
            reference = reference or steps
            if finding is not None:
                findings.append(finding)
                break  # the others would differ for the same reason
            passed.append(placement.name)
    return Report(findings, passed, time.monotonic() - began)


def _run(
    script: str, arguments: Sequence[str], placement: _Placement, folder: Path
) -> list[dict[str, int]]:
    """Return the checksums of rank 0's weights after each step."""
    folder.mkdir()
    port = 0
    reserved = ReservedPort()
    if len(placement.shares) > 1:
        port = reserved.renew()
    processes = []
    try:
        for node, _ in enumerate(placement.shares):
            flags = ["--trace", f"{folder}:{NUM_STEPS}", "--as", str(sum(placement.shares))]
            if port:
                shares = ",".join(map(str, placement.shares))
                flags += [
                    "--ranks",
                    shares,
                    "--node-rank",
                    str(node),
                    "--rdzv-endpoint",
                    f"127.0.0.1:{port}",
                ]
            log = (folder / f"launcher-{node}.log").open("w", encoding="utf-8")
            with log:
                processes.append(
                    subprocess.Popen(
                        [*SAMEBITS, "launch", *flags, script, *arguments],
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(os.environ),
                    )
                )  # fmt: skip
        end = time.monotonic() + TIMEOUT_S
        codes = [process.wait(max(0.0, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{script} made fewer than {NUM_STEPS} steps in {TIMEOUT_S:.0f} s with {placement.name}",
            fix="Check it on a smaller dataset or model.",
        ) from None
    finally:
        reserved.close()
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    trace = folder / "rank-0.json"
    if any(codes) or not trace.is_file():
        lines = (
            (folder / "launcher-0.log")
            .read_text(encoding="utf-8", errors="replace")
            .strip()
            .splitlines()
        )
        raise ConfigError(
            f"{script} failed, or made fewer than {NUM_STEPS} steps, with {placement.name} (exit code {codes[0]})",
            given="\n".join(lines[-TAIL_LINES:]) or None,
            fix=f"Run it without this command; it has to make {NUM_STEPS} steps.",
        )
    steps: list[dict[str, int]] = json.loads(trace.read_text(encoding="utf-8"))
    return steps


def _compare(
    one: Sequence[dict[str, int]], other: Sequence[dict[str, int]], placement: _Placement
) -> Finding | None:
    """Return the first difference; None if all is equal."""
    for step, (mine, its) in enumerate(zip(one, other, strict=False)):
        names = [name for name in mine if mine[name] != its.get(name)]
        if names:
            return Finding(
                f"{names[0]} differs after step {step} with {placement.name}",
                "the script depends on more than the number of ranks, the seed and itself",
                "It uses the time, process ids, host names, a generator of its own that it does not seed, or a file "
                "that an earlier start has left.",
                "Leave that out, or seed it.",
            )
    return None
