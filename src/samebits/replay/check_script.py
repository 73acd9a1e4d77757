"""`samebits check SCRIPT`: whether a script's own loop is exact, by running its first steps in several worlds."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from samebits import scratch
from samebits.cluster.signals import end_group
from samebits.errors import ConfigError
from samebits.portable.mode import LIST_OPERATIONS
from samebits.replay.check import Report
from samebits.replay.compare import SAMPLES, first_difference, merge_ranks
from samebits.replay.judge import Finding, not_portable, num_portable
from samebits.replay.trace import Trace

NUM_STEPS = 6
TIMEOUT_S = 300.0
END_TIMEOUT_S = 40.0  # torchrun kills a worker 30 s after its SIGTERM
TAIL_LINES = 12  # of a failing script's output
TORCHRUN_LOG = "torch/distributed/elastic/"  # in each line that torchrun logs
_OWN_RANKS_FIX = (
    "Call init_process_group() without init_method, rank and world_size: "
    "torchrun sets RANK and MASTER_ADDR."
)
# torchrun's own variables: this command may run inside of a world itself.
_WORLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)


@dataclass(frozen=True)
class ScriptWorld:
    """Processes that run a script."""

    name: str
    procs: int
    hash_seed: str = "0"


FIRST = ScriptWorld("1 process", 1)
_AGAIN = ScriptWorld("1 process again, with another PYTHONHASHSEED", 1, "1")
_OTHERS = (_AGAIN, ScriptWorld("2 processes", 2), ScriptWorld("3 processes", 3))


@dataclass(frozen=True)
class ScriptOutcome:
    """The first steps of a script in one world, of all ranks together."""

    trace: Trace
    settings: dict[str, int]
    has_moved: bool = True  #: Whether a step has changed a parameter.
    operations: dict[str, Any] | None = None

    @property
    def first_step(self) -> int:
        """The first step that it made."""
        return min(map(int, self.trace.steps), default=0)


_NOTHING = Finding(
    f"no parameter changed in {NUM_STEPS} steps",
    "the script trains nothing, so there is nothing to compare",
    "The loss does not depend on the parameters, its gradient is zero or dropped, or the learning rate is 0.",
    "Print the gradients before optimizer.step(), and check a step whose learning rate is not 0.",
)


def check_script(
    script: str, arguments: list[str], progress: Callable[[str, int, int], None]
) -> Report:
    """Run the first steps of a script on 1, 2 and 3 processes, and twice on one, and compare them.

    Args:
        script: The script.
        progress: Called with (activity, done, total).

    Raises:
        ConfigError: The script fails, or makes no exact step.
    """
    began = time.monotonic()
    total = 1 + len(_OTHERS)
    command = [script, *arguments]
    with scratch.scratch_folder(Path(tempfile.gettempdir())) as folder:
        progress(FIRST.name, 0, total)
        reference = observe(command, FIRST, folder / "0")
        operations = reference.operations
        passed = [num_portable(operations)] if operations else []
        findings = not_portable(operations) if operations else []
        if not reference.has_moved:
            findings.append(_NOTHING)
        for number, world in enumerate(() if findings else _OTHERS, start=1):
            progress(world.name, number, total)
            finding = _compare(reference, observe(command, world, folder / str(number)), world)
            if finding is None:
                passed.append(world.name)
            else:
                findings.append(finding)
                if world is _AGAIN:
                    break  # other worlds would differ for the same reason
    return Report(findings, passed, time.monotonic() - began)


def observe(
    command: list[str],
    world: ScriptWorld,
    folder: Path,
    num_steps: int = NUM_STEPS,
    purpose: str = "check",
) -> ScriptOutcome:
    """Run the first steps of a script in a world, and return what all ranks have computed; see `ScriptTrial`.

    Args:
        command: The script and its arguments.
        folder: A new folder for the records.
        num_steps, purpose: The number of steps, and "gate" for a trace of each of them.

    Raises:
        ConfigError: The script fails, or makes no exact step.
    """
    folder.mkdir()
    script = command[0]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world.procs}"]
    # Without -P, `python -m` would import a torch.py or samebits.py of the current folder, maybe a stranger's.
    python = [sys.executable, "-P", "-u", "-m"]
    observer = ["samebits.replay.script_trial", str(folder), str(num_steps), purpose]
    # One process too: a script may make its process group itself, from the launcher's variables.
    started = [*python, *launcher, "--no-python", *python, *observer, *command]
    environ = {name: value for name, value in os.environ.items() if name not in _WORLD}
    environ |= {
        LIST_OPERATIONS: "1",
        "PYTHONHASHSEED": world.hash_seed,
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        # In a session of its own, so that `_end` can kill all that the script has started.
        started, env=environ, encoding="utf-8", errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{script} made fewer than {num_steps} steps in {TIMEOUT_S:.0f} s on {world.name}",
            cause=_own_ranks(script) or None,
            fix=_OWN_RANKS_FIX if _own_ranks(script) else "Check it on a smaller dataset or model.",
        ) from None
    finally:
        _end(process)
    files = [folder / f"rank-{rank}.json" for rank in range(world.procs)]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    traces = [Trace.from_plain(each.pop("trace")) for each in records]
    if len(records) < len(files) or process.returncode or not traces[0].steps:
        tail = "\n".join(_without_report((errors or output).strip().splitlines())[-TAIL_LINES:])
        raise ConfigError(
            f"{script} failed, or made no exact step, on {world.name} (exit code {process.returncode})",
            given=tail or None,
            cause=_own_ranks(script) or None,
            fix=_OWN_RANKS_FIX
            if _own_ranks(script)
            else f"Run it without this command; it has to train {num_steps} steps by samebits.exact.",
        )
    return ScriptOutcome(merge_ranks(traces)[0], **records[0])


def _own_ranks(script: str) -> str:
    """Return the cause of a failure if a script takes rank and address from its own options; else an empty text."""
    source = Path(script).read_text(encoding="utf-8", errors="replace")
    if not re.search(
        r"""["']--(?:rank|local[-_]rank|node[-_]rank)["']|["'](?:tcp|file)://""", source
    ):
        return ""
    return "each process has its rank and address from the script's own options or init_method, which are equal for all"


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, and first its workers: each of them has a session of its own, which `killpg` does not reach."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    end_group(process.pid)  # what the script has left
    process.wait()


def _without_report(lines: list[str]) -> list[str]:
    """Return the script's own lines: torchrun's report of a failed worker has more than `TAIL_LINES`."""
    return list(takewhile(lambda line: TORCHRUN_LOG not in line, lines)) or lines


def _compare(one: ScriptOutcome, other: ScriptOutcome, world: ScriptWorld) -> Finding | None:
    """Return the first difference between two worlds; None if all is equal."""
    differing = [name for name in one.settings if one.settings[name] != other.settings.get(name)]
    if differing:
        name, *_ = differing
        return Finding(
            f"{name} is {one.settings[name]} on 1 process and {other.settings.get(name)} on {world.name}",
            "an argument of exact() depends on the number of processes",
            "The script computes it from the number of processes, as scripts do that divide a batch size by it.",
            f"Give the same {name} at any number of processes; the DataLoader's batch_size counts as micro_batch.",
        )
    if one.first_step != other.first_step:
        return Finding(
            f"the script began with step {other.first_step} on {world.name}, and with step {one.first_step} before",
            "the script resumes from a checkpoint that an earlier start has saved",
            "Within the steps of a trial, the script saves a checkpoint, and its next start loads it.",
            "Give the command an argument of the script, after --, with which it neither saves nor loads.",
        )
    if (found := first_difference(one.trace, other.trace)) is not None:
        if found.stage == SAMPLES:
            what = f"samples of step {found.step} differ on {world.name}"
        else:
            what = (
                f"{found.name} differs after step {found.step} on {world.name}, with equal samples"
            )
        return _finding(what, world, is_data=found.stage == SAMPLES)
    if len(one.trace.steps) != len(other.trace.steps):
        return Finding(
            f"the script made {len(one.trace.steps)} steps on 1 process and {len(other.trace.steps)} on {world.name}",
            "the number of steps depends on the number of processes",
            "The loop counts bodies, whose number depends on the processes, or samples of its rank.",
            "Count steps: loader.step, len(loader), if loader.sync_gradients: ...",
        )
    return None


def _finding(what: str, world: ScriptWorld, *, is_data: bool) -> Finding:
    if world is _AGAIN:
        kind = "another source of randomness"
        cause = "Two runs on one process differ: something depends on time, on hashes, or has a generator of its own."
        fix = "Use the global generators of torch, numpy and random, which are seeded for each micro-batch."
    elif is_data:
        kind = "samples depend on the process"
        cause = "The dataset or collate_fn depends on the rank, the worker, or on samples that were read before."
        fix = "Make __getitem__ a function of the index and of the global generators."
    else:
        kind = "the loop depends on the number of processes"
        cause = (
            "The body of the loop keeps or counts something from one micro-batch to the next, or uses the rank: "
            "a step counter, a running value, a moving average or scheduler that is not in per_step."
        )
        fix = (
            "Give what acts once a step to exact(per_step=[...]), and use loader.step for counters."
        )
    return Finding(what, kind, cause, fix)
