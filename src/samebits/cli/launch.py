"""`samebits launch`, `submit` and the hidden `call`: scripts, Slurm jobs and functions in several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

from samebits.cli.options import (
    Debug,
    Overrides,
    SourceName,
    argument,
    flag,
    option,
    path_option,
)
from samebits.errors import ConfigError, LaunchError, cannot_make
from samebits.launch.subcommand import SAMEBITS
from samebits.process_range import parse_range

# `samebits launch`: a DistributedDataParallel script, unmodified, as on N GPUs, on whatever there is.


Arguments = Annotated[
    list[str],
    argument("[FLAGS] SCRIPT [ARGUMENTS]", "As for torchrun."),
]
# Flags have values, which only their own parser knows: all that follows is left to it.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(arguments: Arguments) -> int:
    """Start an unmodified DDP script as N ranks, on whatever there is.

    For example: samebits launch --as 8 train.py --epochs 3. The result depends on N, the seed and the script, not on
    where ranks run.

    --as N: ranks, as torchrun's processes; --seed N: of what the script leaves unseeded; --dry-run: one step, its batch
    size, learning rate and memory; --max-restarts N; -m MODULE; --cuda-on-cpu: GPUs for the script that are the CPU.

    Output: that of rank 0; --local-ranks-filter 0,3: of these; --tee 3: of all, with their ranks; --log-dir DIR: kept
    in files.

    Machines: --nnodes M --rdzv-endpoint HOST:PORT [--node-rank R --ranks 6,2]. --nproc-per-node, --master-addr,
    --master-port, --rdzv-id are torchrun's.
    """
    from samebits.ranks.start import start

    return start(arguments, lambda text: print(f"samebits  {text}", file=sys.stderr, flush=True))


# `samebits call`: the processes of `samebits.launch`, which starts this command. Not for users.


Procs = Annotated[str, option("N", "Number of processes.")]
Threads = Annotated[int, option("N", "CPU threads of each process.")]


def call(description: Path, procs: Procs = "1", threads: Threads = 1) -> int:
    """Call a function that `samebits.launch` has pickled."""
    from samebits.launch import forkserver
    from samebits.launch.subcommand import PRELOAD, call_in_worker, end_with_caller, read_call

    end_with_caller()
    content = read_call(description)
    size = parse_range(procs, "procs")
    # Before torch is imported here, so that both imports run at the same time.
    forkserver.prepare(PRELOAD, threads)
    from samebits.launch.launch import launch

    return launch(size.most, call_in_worker, (content,), min_procs=size.least, preload=PRELOAD)


# `samebits submit`: a run as a Slurm job.


Nodes = Annotated[int, option("N", "Nodes.", min=1)]
ProcsPerNode = Annotated[
    int | None, option("N", "Processes per node; default: one per GPU.", min=1)
]
Gpus = Annotated[int, option("N", "GPUs per node.", min=0)]
Cpus = Annotated[
    int,
    option("N", "Cores per process, for its threads and DataLoader workers.", min=1),
]
Time = Annotated[
    str,
    option("H:MM:SS", "Time limit of a job. The run requeues itself and resumes."),
]
Warning = Annotated[
    int,
    option("S", "Seconds before the time limit at which the run saves.", "--warning-s", min=10),
]
RunDir = Annotated[
    Path, path_option("--run-dir", "DIR", "Run folder, on a file system that all nodes share.")
]
Sbatch = Annotated[
    list[str] | None,
    option("OPTION", "Further option for sbatch, such as --sbatch=-pgpu. Repeatable.", "--sbatch"),
]
DryRun = Annotated[bool, flag("--dry-run", "Print the batch script and submit nothing.")]


def submit(
    source: SourceName,
    run_dir: RunDir,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    procs: ProcsPerNode = None,
    gpus: Gpus = 0,
    cpus: Cpus = 1,
    time: Time = "",
    warning_s: Warning = 120,
    sbatch: Sbatch = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Submit a run to Slurm. Before its time limit it saves, requeues itself and resumes, with equal results."""
    from samebits.launch.slurm import BatchJob, batch_script
    from samebits.recipes.catalog import command_arguments, find
    from samebits.recipes.trust import check_tracker_files
    from samebits.storage.run_folder import check_run_dir

    found = find(source)
    loaded = found.load(overrides or [])
    check_tracker_files(loaded.config.report.trackers, overrides or [])
    job = BatchJob(
        # Resolved now: the job does not read the YAML file, which may change while it waits.
        command=[*SAMEBITS, "train", *command_arguments(found, loaded)],
        run_dir=run_dir.absolute(),
        nodes=nodes,
        procs=procs or gpus or 1,
        gpus=gpus,
        cpus=cpus,
        time=time,
        warning_s=warning_s,
        options=sbatch or [],
    )
    text = batch_script(job)
    if dry_run:
        print(text, end="")
        return
    check_run_dir(run_dir, "auto")
    try:
        run_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_make(run_dir, error) from None
    print(_submitted(text))


def _submitted(text: str) -> str:
    """Submit a script, and return what sbatch prints."""
    try:
        done = subprocess.run(
            ["sbatch"],
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a path may hold any bytes
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not installed on this machine",
            fix="Log in to a Slurm login node. --dry-run prints the script.",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            "sbatch did not answer within 60 s",
            fix="Check with sinfo that the Slurm controller is up.",
        ) from None
    if done.returncode:
        raise LaunchError(
            "sbatch refused the job",
            given="\n".join(line for line in text.splitlines() if line.startswith("#SBATCH")),
            cause=done.stderr.strip(),
            fix="Correct the options. --dry-run prints the script.",
        )
    return done.stdout.strip()
