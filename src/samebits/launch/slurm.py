"""Generate a Slurm batch script that is warned before its time limit, saves, requeues itself and resumes."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import ConfigError

# Slurm sends this signal to every process a set time before it ends the job.
WARNING = "USR1"
# Exit code of ranks that have saved after the warning: 128 + SIGUSR1.
WARNED = 138


@dataclass(frozen=True)
class BatchJob:
    """Resources and commands of a Slurm job."""

    command: Sequence[str]  #: Command of each task; `--run-dir` is added.
    run_dir: Path  #: The run folder, on a disk that all nodes share.
    nodes: int = 1  #: Number of machines.
    procs: int = 1  #: Tasks per machine, one per GPU.
    gpus: int = 0  #: GPUs per machine; 0: request none.
    cpus: int = 1  #: Cores per task.
    time: str = ""  #: Time limit in Slurm's format: "4:00:00"; "": the partition's default.
    warning_s: int = 120  #: Seconds between the warning and the time limit.
    options: Sequence[str] = ()  #: Additional sbatch options, such as "--partition=gpu".


def batch_script(job: BatchJob) -> str:
    """Generate the batch script.

    Raises:
        ConfigError: A value contains a line break or another control character, which would end a line of #SBATCH.
    """
    for option, text in (
        ("--run-dir", str(job.run_dir)),
        ("--time", job.time),
        *(("--sbatch", o) for o in job.options),
    ):
        # A line break in an option would end the comment and start a command of the script.
        if any(ord(char) < 32 or ord(char) == 127 for char in text):
            raise ConfigError(
                f"{option} has a line break or another control character",
                given=repr(text),
                fix="Remove the control character.",
            )
    # Slurm replaces % in file names, so a literal one is doubled.
    log = str(job.run_dir).replace("%", "%%")
    options = [
        _option("job-name", f"samebits-{job.run_dir.name}"),
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.procs}",
        f"--cpus-per-task={job.cpus}",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([_option("time", job.time)] if job.time else []),
        f"--signal={WARNING}@{job.warning_s}",
        "--requeue",
        "--open-mode=append",
        _option("output", f"{log}.log"),
        *job.options,
    ]
    command = [*job.command, "--run-dir", str(job.run_dir), "--resume", "auto"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        "# Ranks sign their messages with a key of this start. srun passes the environment on.",
        'export SAMEBITS_KEY="${SAMEBITS_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")}"',
        "# Ranks detect a failed rank by themselves; Slurm must not kill those that are still saving.",
        f"srun --kill-on-bad-exit=0 {shlex.join(command)}",
        "code=$?",
        f"# {WARNED}: Slurm has warned of the time limit, and the run has saved. The requeued job resumes it.",
        f'if [ "$code" -eq {WARNED} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _option(name: str, value: str) -> str:
    """Format an option of #SBATCH, where Slurm parses quotes and backslashes much as a shell does."""
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'
