"""A Slurm batch script for a run: pure text. It asks to be warned before its time is up, saves, queues itself again and
goes on.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError

# Slurm sends this to every process so many seconds before it ends the job.
WARNING = "USR1"
# What the ranks exit with once they have saved: 128 + SIGUSR1.
WARNED = 138


@dataclass(frozen=True)
class BatchJob:
    """What a person asks Slurm for.

    Attributes:
        command: What each task runs; `--run-dir` is added.
        run_dir: The run's folder, on a disk that all nodes share.
        nodes: Machines.
        procs: Tasks on each, one a GPU.
        gpus: GPUs on each machine; 0: none are asked for.
        cpus: Cores for each task.
        time: The longest that the job may run, as Slurm writes it: "4:00:00"; "": the partition's own.
        warning_s: How long before the end it is told.
        options: More lines for sbatch, each such as "--partition=gpu".
        variants: Settings of each job of an array, such as ("optim.lr=0.1", "epochs=3"); none: one job.
    """

    command: Sequence[str]
    run_dir: Path
    nodes: int = 1
    procs: int = 1
    gpus: int = 0
    cpus: int = 1
    time: str = ""
    warning_s: int = 120
    options: Sequence[str] = ()
    variants: Sequence[Sequence[str]] = ()


def batch_script(job: BatchJob) -> str:
    """The batch script.

    Raises:
        ConfigError: Something in it has a line break, or another sign that ends a line of #SBATCH.
    """
    for what, text in (("--run-dir", str(job.run_dir)), ("--time", job.time), *(("--sbatch", o) for o in job.options)):
        if any(ord(sign) < 32 or ord(sign) == 127 for sign in text):
            raise ConfigError(
                f"{what} has a line break or another control character", given=repr(text), fix="leave it out"
            )
    is_array = bool(job.variants)
    folder = shlex.quote(str(job.run_dir)) + ("-$SLURM_ARRAY_TASK_ID" if is_array else "")
    asked = [
        _option("job-name", f"lockstep-{job.run_dir.name}"),
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.procs}",
        f"--cpus-per-task={job.cpus}",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([_option("time", job.time)] if job.time else []),
        *([f"--array=0-{len(job.variants) - 1}"] if is_array else []),
        f"--signal={WARNING}@{job.warning_s}",
        "--requeue",
        "--open-mode=append",
        _option("output", f"{str(job.run_dir).replace('%', '%%')}{'-%a' if is_array else ''}.log"),
        *job.options,
    ]
    words = [shlex.join(job.command), *(['"${settings[@]}"'] if is_array else []), f"--run-dir {folder} --resume auto"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in asked),
        "",
        *_choice(job.variants),
        "# Ranks sign their messages with a key of this start. srun passes the environment on.",
        'export LOCKSTEP_KEY="${LOCKSTEP_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")}"',
        "# Ranks notice by themselves when one dies; Slurm must not end those that are still saving.",
        f"srun --kill-on-bad-exit=0 {' '.join(words)}",
        "code=$?",
        f"# {WARNED}: Slurm has warned it that its time is nearly up, and it has saved. It goes on at its next turn.",
        f'if [ "$code" -eq {WARNED} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _option(name: str, value: str) -> str:
    """An option of #SBATCH; Slurm reads quotes and backslashes there much as a shell does."""
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def _choice(variants: Sequence[Sequence[str]]) -> list[str]:
    if not variants:
        return []
    cases = [f"    {number}) settings=({shlex.join(settings)}) ;;" for number, settings in enumerate(variants)]
    return ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", ""]
