"""One rank of `samebits launch`: sets the process up, runs the script as Python would, and judges its end.

    launcher ── fork server, with torch loaded ── rank 0, rank 1, ...   run_script() in each of them

The script sees what torchrun shows it on one machine with N processes: RANK, LOCAL_RANK, WORLD_SIZE and the like, on
whatever machines the ranks are.
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import re
import resource
import runpy
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from samebits.cluster.env import read_assignment, show_one_machine
from samebits.cluster.signals import exit_with_parent
from samebits.frames import error_line
from samebits.launch import cleanup
from samebits.module.determinism import set_kernels
from samebits.own_loop.ending import fault_at_end, leave_errors_to_launcher, named_error
from samebits.ranks.devices import VISIBLE, Baton, deal, use_cpu_as_gpu, use_dealt_device
from samebits.ranks.doors import Doors, Generators
from samebits.ranks.trained import TrainedModules
from samebits.storage.weights import weights_sha256

if TYPE_CHECKING:
    from samebits.ranks.trial import RankTrial

# Exit code of a rank whose script trains without a process group: the launcher starts it again as one rank.
NO_GROUP = 98
FIRST = "rank-0"  # a file of that rank then, in the folder of its machine's ranks


@dataclass(frozen=True)
class Script:
    """What each rank runs."""

    target: str  #: The script's file, or a module's name.
    arguments: Sequence[str]  #: Its arguments.
    is_module: bool = False  #: As `python -m`.
    seed: int = 0  #: Seed of what the script leaves unseeded.
    shown: Sequence[int] | None = (
        0,
    )  #: Ranks whose output is shown; None: all, each line with its rank.
    log_dir: str = ""  #: Folder of each rank's output; empty: none is kept.
    #: GPUs of this machine that its ranks share; none: they compute on CPUs.
    gpus: Sequence[str] = ()
    folder: str = ""  #: A temporary folder of this machine's ranks.
    is_dry_run: bool = False  #: End after the first step, with a description of it.
    trace: str = ""  #: FOLDER:STEPS:PURPOSE, to compare the first steps; see `trial.RankTrial`.
    has_cpu_for_gpu: bool = False  #: The script sees a GPU for each rank, which is the CPU.


class _Ended(SystemExit):
    """Ends the script where the launcher has asked for it."""


def run_script(script: Script) -> int:
    """Run the script as the rank that the environment names; return the exit code."""
    here = read_assignment(os.environ)
    assert here is not None, "the launcher sets the world's variables"
    local_rank = here.local_rank or 0
    num_here = here.local_world_size or 1
    _redirect(script, here.rank)
    _be_a_process_of_python()
    baton = None
    if script.gpus:
        gpu = deal(local_rank, num_here, script.gpus)
        os.environ[VISIBLE] = gpu  # CUDA reads it at its first call
        is_shared = num_here > len(script.gpus)
        baton = Baton(f"{script.folder}/gpu-{script.gpus.index(gpu)}" if is_shared else "")
    show_one_machine(os.environ)
    address = here.init.removeprefix("tcp://")
    if address.startswith("127.") and sys.platform == "linux":
        # All ranks are here: gloo then listens where no other machine can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    set_kernels(1, torch.device("cuda" if script.gpus else "cpu"))
    # Until the first step: weights that a script forgets to initialize are NaN then, and not what is in the memory.
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # not in torch's types
    generators = Generators(script.seed, here.rank)
    doors = Doors(here.rank, here.world_size, address, generators, baton)
    if script.gpus:
        use_dealt_device(here.world_size)
    elif script.has_cpu_for_gpu:
        os.environ[VISIBLE] = ""  # also one that is there
        use_cpu_as_gpu(here.rank, here.world_size)
    rank = _Rank(script, here.rank, here.world_size, doors, generators)
    if baton is not None:
        baton.take()
    try:
        _execute(script)
        _run_exit_functions()
    except _Ended as ended:
        return int(str(ended.code))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        _run_exit_functions()
    except Exception as error:
        if (named := named_error(error)) is not None:
            named.slots.setdefault("where", error_line(error))
            raise named from error
        if not script.gpus and re.search(r"CUDA|NVIDIA", str(error)):
            error.add_note(
                "This machine has no GPU. samebits launch --cuda-on-cpu shows the script a GPU for each rank, which "
                "is the CPU."
            )
        raise
    finally:
        if baton is not None:
            baton.give()
    if (fault := fault_at_end()) is not None:
        raise fault
    rank.end()
    return 0


class _Rank:
    """What a rank reports about its script.

    Args:
        rank, num_ranks: This rank, and how many there are.
    """

    def __init__(
        self, script: Script, rank: int, num_ranks: int, doors: Doors, generators: Generators
    ) -> None:
        self._script = script
        self._rank = rank
        self._num_ranks = num_ranks
        self._doors = doors
        self._generators = generators
        self._pid = os.getpid()
        self._trained = TrainedModules(self._check_start, self._after_step)
        self._trial: RankTrial | None = None
        if script.trace:
            from samebits.ranks import trial

            self._trial = trial.RankTrial(
                script.trace, rank, num_ranks, torch.device("cuda" if script.gpus else "cpu")
            )

    def _check_start(self) -> None:
        """Check the script before its first step."""
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for speed
        if os.getpid() != self._pid:
            return  # of a process that the script has started
        if self._num_ranks > 1 and not dist.is_initialized():
            if self._rank == 0:
                Path(self._script.folder, FIRST).touch()
            raise _Ended(NO_GROUP)
        if self._rank == 0:
            self._judge_resume()

    def _judge_resume(self) -> None:
        epoch = self._generators.epoch
        doors = self._doors
        has_state = bool(self._trained.first is not None and self._trained.first.state)
        if doors.has_loaded_state and not epoch:
            say(
                "an optimizer's state was loaded, and no epoch was set by set_epoch(), or epoch 0: unless the script "
                "skips what is done, epochs are trained again"
            )
        elif doors.has_loaded_file and epoch and not doors.has_loaded_state and not has_state:
            say(
                f"training begins with epoch {epoch} without the optimizer's state, so it is not the undisturbed run: "
                "save optimizer.state_dict() too, and load it"
            )

    def _after_step(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._trial is not None:
            self._trial.step()
        if self._script.is_dry_run:
            if self._rank == 0:
                for line in self._describe():
                    say(line)
            raise _Ended(0)

    def _describe(self) -> list[str]:
        loader = self._doors.loader
        optimizer = self._trained.first
        size = getattr(loader, "batch_size", None)
        lines = []
        if loader is not None:
            batch = "by its batch sampler"
            if size:
                batch = f"{size} a rank, {size * self._num_ranks} samples a step over {self._num_ranks} ranks"
            lines.append(f"batch size    {batch}")
            kind = (
                ""
                if not isinstance(loader.sampler, DistributedSampler)
                else ", shared out by DistributedSampler"
            )
            try:
                lines.append(f"an epoch      {len(loader):,} batches a rank{kind}")
            except TypeError:  # a stream
                lines.append("an epoch      of unknown length")
        if optimizer is not None:
            rates = ", ".join(f"{group['lr']:g}" for group in optimizer.param_groups[:4])
            lines.append(f"learning rate {rates} ({type(optimizer).__name__})")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        what = "memory of the process"
        if self._script.gpus:
            peak = torch.cuda.max_memory_allocated()
            what = "GPU memory"
        lines.append(
            f"memory        {peak / 2**20:,.0f} MiB of {what} a rank until the end of its first step"
        )
        return lines

    def end(self) -> None:
        """Print the hash of the final weights and buffers on rank 0, and wait for the others."""
        self._doors.check_children()
        if self._trained.num_steps:
            # on all ranks, since some may have only a shard
            state = self._trained.state()
            digest = weights_sha256(state)
            if self._rank == 0:
                say(f"{self._trained.num_steps:,} steps done; weights sha256 {digest}")
                bad = [name for name, value in state.items() if not value.isfinite().all()]
                if bad:
                    say(
                        f"{len(bad)} of {len(state)} weights and buffers have values that are not finite, "
                        f"first {bad[0]}: the loss diverged, or a layer was never initialized"
                    )
        elif self._rank == 0:
            say(
                "no optimizer has made a step in this process, so there are no weights to give a hash of"
            )
        self._doors.wait_for_all()


def say(text: str) -> None:
    """Print a line for the user, also where the script has replaced print() or sys.stderr."""
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as out:
        out.write(f"samebits  {text}\n")


def _execute(script: Script) -> None:
    """Run the script as `__main__`, which it stays: what it pickles and the processes that it starts look for it."""
    if script.is_module:
        sys.path.insert(0, os.getcwd())
        sys.argv = [script.target, *script.arguments]
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(script.target)
    sys.path.insert(0, os.path.dirname(path))
    sys.argv = [script.target, *script.arguments]
    main = ModuleType("__main__")
    main.__file__ = script.target
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), script.target, "exec"), main.__dict__)


def _be_a_process_of_python() -> None:
    """Undo what only a process of multiprocessing has: the script starts as if Python had started it."""
    atexit.unregister(cleanup.sweep)  # the fork server's
    leave_errors_to_launcher()
    # The default way to start processes is still open: scripts choose one.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    # A DataLoader's worker looks for another parent than its first one: it would stay if the rank was killed before.
    multiprocessing.util.register_after_fork(exit_with_parent, lambda watch: watch())
    # As torchrun's: systems that share cores between sessions give each rank as much as another program.
    os.setsid()


def _run_exit_functions() -> None:
    """Run what the script has registered for its exit: a process of multiprocessing ends without."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _redirect(script: Script, rank: int) -> None:
    """Send what this rank prints where the user has asked for it: here, into a file, both or nowhere."""
    is_shown = script.shown is None or rank in script.shown
    log = f"{script.log_dir}/rank-{rank}.log" if script.log_dir else ""
    if is_shown and not log and script.shown is not None:
        return
    for number in (1, 2):
        sink = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if is_shown:
            sink = _tee(os.dup(number), sink, f"[rank{rank}]: " if script.shown is None else "")
        os.dup2(sink, number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _tee(shown: int, log: int, prefix: str) -> int:
    """Return the end of a pipe whose lines a thread copies to two files."""
    source, sink = os.pipe()

    def copy() -> None:
        with os.fdopen(source, "rb") as lines:
            for line in lines:
                os.write(shown, prefix.encode() + line)
                os.write(log, line)

    threading.Thread(target=copy, name="output", daemon=True).start()
    return sink
