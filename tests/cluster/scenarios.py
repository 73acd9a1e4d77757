"""Workers of the launcher's tests. Each writes a file with its rank in the name and its process id."""

import gc
import os
import signal
import sys
import time
from pathlib import Path


def work(scenario: str, folder: Path) -> int:
    """Join the world, and then succeed or fail according to `scenario`."""
    from samebits.cluster import collectives, env, signals, world
    from samebits.cluster.views.membership import Membership
    from samebits.errors import DataError

    here = env.read_assignment(os.environ)
    if scenario in ("killed early", "node lost early") and here.rank == 1 and here.restart == 0:
        _die_before_connecting(folder, scenario == "node lost early")
    if scenario == "stopped at the end":
        Membership(Path(here.views), here.member).mark("member")  # as a run does once it trains
        return _end_after_a_stop(folder, here.rank)
    if scenario == "joins late" and here.rank == 1:
        (folder / "waited-for").touch()
        time.sleep(1000)
    # As in training: until all have joined there is nothing to save.
    with world.join(here, device="cpu") as joined, signals.StopSignal() as asked:
        if env.LAUNCHED in os.environ:
            assert gc.isenabled()
            assert gc.get_freeze_count() > 100_000, "the fork server's imports are looked through again and again"
        (folder / f"started-{here.restart}-{joined.rank}").write_text(f"{os.getpid()} {time.time()}")
        if joined.rank == 1:
            if scenario == "data error":
                raise DataError("x.gz is truncated", where="byte 7")
            if scenario == "value error":
                raise ValueError("made to fail")
            if scenario == "exit 7 slowly":
                _end_slowly()
                sys.exit(7)
            if scenario == "vanish":
                os._exit(0)
            if scenario == "killed" or (scenario == "killed once" and here.restart == 0):
                os.kill(os.getpid(), signal.SIGKILL)
        if scenario == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        if scenario in ("ok", "killed once", "killed early", "node lost early"):
            # Fails at once where a peer is dead; a barrier alone would wait for it.
            collectives.all_gather_object(joined, joined.rank)
            collectives.barrier(joined, 10)
        else:
            for _ in range(6000):
                time.sleep(0.05)
                if any(collectives.all_gather_object(joined, asked.requested)):
                    break
        (folder / f"saved-{here.restart}-{joined.rank}").write_text(here.started_by)
        return asked.exit_code


def _end_after_a_stop(folder: Path, rank: int) -> int:
    """End at once on rank 0; on rank 1, be stopped once rank 0 has ended and the launcher has seen that."""
    pid = folder / "rank-0"
    if rank == 0:
        part = pid.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(pid)
        return 0
    while not pid.exists() or Path("/proc", pid.read_text()).exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def _end_slowly() -> None:
    """Let this process continue for seconds after its peers have lost it, as on a busy machine."""
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def slowly() -> None:
        destroy()
        time.sleep(60)  # the launcher does not wait for so long

    dist.destroy_process_group = slowly


def _die_before_connecting(folder: Path, with_node: bool) -> None:
    """Kill this process, or all of its node, when it has joined and would connect to the others."""
    from samebits.cluster import connecting

    def connect(*_: object, **__: object) -> None:
        (folder / "died").write_text(str(time.time()))
        if with_node:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    connecting.connect = connect  # type: ignore[assignment]
