"""`samebits check SCRIPT`: whether a script is exact, by running its first steps in several worlds."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from samebits import scratch
from samebits.bench.processes import reserve_port
from samebits.cluster.signals import end_group
from samebits.errors import ConfigError
from samebits.portable.mode import LIST_OPERATIONS
from samebits.replay.check import Progress, Report
from samebits.replay.compare import SAMPLES, first_difference, merge_ranks
from samebits.replay.judge import Finding, not_portable, num_portable
from samebits.replay.trace import Trace

NUM_STEPS = 6
TIMEOUT_S = 300
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
    #: Ranks of each launcher of `samebits launch`; none: torchrun starts a script that has an exact loop.
    shares: tuple[int, ...] = ()


def launched(num_ranks: int) -> tuple[ScriptWorld, ...]:
    """Return the worlds of a script that `samebits launch --as N` starts, the ranks placed in several ways."""
    second = num_ranks // 2
    first = num_ranks - second
    worlds = [
        ScriptWorld("one launcher", num_ranks, shares=(num_ranks,)),
        ScriptWorld("one launcher again", num_ranks, "1", (num_ranks,)),
    ]
    if second:
        worlds.append(
            ScriptWorld(
                f"two launchers, {first} + {second} ranks", num_ranks, shares=(first, second)
            )
        )
    return tuple(worlds)


FIRST = ScriptWorld("1 process", 1)
_AGAIN = ScriptWorld("1 process again, with another PYTHONHASHSEED", 1, "1")
_WORLDS = (FIRST, _AGAIN, ScriptWorld("2 processes", 2), ScriptWorld("3 processes", 3))


@dataclass(frozen=True)
class ScriptOutcome:
    """The first steps of a script in one world, of all ranks together."""

    trace: Trace
    settings: dict[str, int]
    has_moved: bool = True  #: Whether a step has changed a parameter.
    operations: dict[str, Any] | None = None


_NOTHING = Finding(
    f"no parameter changed in {NUM_STEPS} steps",
    "the script trains nothing, so there is nothing to compare",
    "The loss does not depend on the parameters, its gradient is zero or dropped, or the learning rate is 0.",
    "Print the gradients before optimizer.step(), and check a step whose learning rate is not 0.",
)


def check_script(
    script: str,
    arguments: list[str],
    progress: Progress,
    num_ranks: int | None = None,
) -> Report:
    """Run the first steps of a script in several worlds, and compare them.

    Args:
        script: The script.
        progress: Called with (activity, done, total).
        num_ranks: Ranks of an unmodified script: under one launcher, once more, and under two that share the ranks as
            two machines would. None: 1, 2 and 3 processes, and twice one, of a script with an exact loop.

    Raises:
        ConfigError: The script fails, or makes too few steps.
    """
    began = time.monotonic()
    first, *others = _WORLDS if num_ranks is None else launched(num_ranks)
    command = [script, *arguments]
    with scratch.scratch_folder(Path(tempfile.gettempdir())) as folder:
        progress(first.name, 0, 1 + len(others))
        reference = observe(command, first, folder / "0")
        operations = reference.operations
        passed = [num_portable(operations)] if operations else []
        findings = not_portable(operations) if operations else []
        if not reference.has_moved and not first.shares:
            findings.append(_NOTHING)
        for number, world in enumerate(() if findings else others, start=1):
            progress(world.name, number, 1 + len(others))
            finding = _compare(reference, observe(command, world, folder / str(number)), world)
            if finding is None:
                passed.append(world.name)
            else:
                findings.append(finding)
                if world is _AGAIN or world.shares:
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
    reserved = reserve_port()

    def failure(what: str, fix: str, output: str = "") -> ConfigError:
        cause = "" if world.shares else _own_ranks(script)
        return ConfigError(
            f"{script} on {world.name} {what}",
            given=output or None,
            cause=cause or None,
            fix=_OWN_RANKS_FIX if cause else fix,
        )

    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world.procs}"]
    # Without -P, `python -m` would import a torch.py or samebits.py of the current folder, maybe a stranger's.
    python = [sys.executable, "-P", "-u", "-m"]
    observer = ["samebits.replay.script_trial", str(folder), str(num_steps), purpose]
    # One process too: a script may make its process group itself, from the launcher's variables.
    started = [[*python, *launcher, "--no-python", *python, *observer, *command]]
    if world.shares:
        flags = [
            "--trace", f"{folder}:{num_steps}:{purpose}", "--ranks", ",".join(map(str, world.shares)),
            "--rdzv-endpoint", f"127.0.0.1:{reserved.renew()}", "--node-rank",
        ]  # fmt: skip
        nodes = map(str, range(len(world.shares)))
        started = [[*python, "samebits", "launch", *flags, node, *command] for node in nodes]
    environ = {name: value for name, value in os.environ.items() if name not in _WORLD}
    environ |= {
        LIST_OPERATIONS: "1",
        "PYTHONHASHSEED": world.hash_seed,
        "OMP_NUM_THREADS": "1",
        # Hooks would change what torch.compile generates.
        "TORCHDYNAMO_DISABLE": str(int(purpose == "gate")),
    }
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"launcher-{number}.log" for number in range(len(started))]
    try:
        for arguments, path in zip(started, logs, strict=True):
            with path.open("wb") as log:
                process = subprocess.Popen(
                    # In a session of its own, so that `_end` can kill all that the script has started.
                    arguments, env=environ, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            processes.append(process)
        end = time.monotonic() + TIMEOUT_S
        codes = [process.wait(max(0.0, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        fix = "Check it on a smaller dataset or model."
        raise failure(f"made fewer than {num_steps} steps in {TIMEOUT_S} s", fix) from None
    finally:
        for process in processes:
            _end(process)
        reserved.close()
    files = [folder / f"rank-{rank}.json" for rank in range(world.procs)]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    traces = [Trace.from_plain(each.pop("trace")) for each in records]
    # A script without a process group is launched again as one rank.
    is_whole = len(records) == len(files) or (world.shares and len(records) == 1)
    least = num_steps if world.shares and purpose == "check" else 1
    if any(codes) or not is_whole or len(traces[0].steps) < least:
        text = logs[0].read_text(encoding="utf-8", errors="replace")
        lines = text.strip().splitlines()
        # The script's own ones: torchrun's report of a failed worker has more.
        own = list(takewhile(lambda line: TORCHRUN_LOG not in line, lines)) or lines
        tail = "\n".join(own[-TAIL_LINES:])
        kind = f"fewer than {least} steps" if world.shares else "no exact step"
        raise failure(
            f"failed, or made {kind} (exit code {codes[0]})",
            f"Run it without this command; it has to train {num_steps} steps.",
            tail,
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, and first its workers: each of them has a session of its own, which `killpg` does not reach."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    end_group(process.pid)  # what the script has left
    process.wait()


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
    first, second = (min(map(int, each.trace.steps), default=0) for each in (one, other))
    if first != second:
        return Finding(
            f"the script began with step {second} on {world.name}, and with step {first} before",
            "the script resumes from a checkpoint that an earlier start has saved",
            "Within the steps of a trial, the script saves a checkpoint, and its next start loads it.",
            "Delete that checkpoint, which the trials have left. Give the command an argument of the script, after "
            "--, with which it neither saves nor loads.",
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
    if world.shares:
        return Finding(
            what,
            "the script depends on more than the number of ranks, the seed and itself",
            "It uses the time, process ids, host names, a generator of its own that it does not seed, or a file "
            "that an earlier start has left.",
            "Leave that out, or seed it.",
        )
    if world is _AGAIN:
        return Finding(
            what,
            "another source of randomness",
            "Two runs on one process differ: something depends on time, on hashes, or has a generator of its own.",
            "Use the global generators of torch, numpy and random, which are seeded for each micro-batch.",
        )
    if is_data:
        return Finding(
            what,
            "samples depend on the process",
            "The dataset or collate_fn depends on the rank, the worker, or on samples that were read before.",
            "Make __getitem__ a function of the index and of the global generators.",
        )
    return Finding(
        what,
        "the loop depends on the number of processes",
        "The body of the loop keeps or counts something from one micro-batch to the next, or uses the rank: "
        "a step counter, a running value, a moving average or scheduler that is not in per_step.",
        "Give what acts once a step to exact(per_step=[...]), and use loader.step for counters.",
    )
