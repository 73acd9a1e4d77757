"""One process of a world, for the tests: joins, does one thing, and returns the outcome."""

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

DIES = "dies"
FAILS = "fails"
SKIPS_BARRIER = "skips the barrier"
# What happens to a process between the rendezvous and the connections of its process group.
DIES_EARLY = "dies before it connects"
DIES_ELSEWHERE = "dies before it connects, on another host"
STOPS_EARLY = "is stopped before it connects"
LEAVES = "does nothing and leaves"
LEAVES_LATE = "is slow to be connected, does nothing and leaves"
LATE_S = 3.0
HURRIES = "has 3 s to connect"
WRONG_INTERFACE = "takes an interface that is not there"


def visit(
    answers: Connection,
    given: tuple[Any, ...],
    environ: dict[str, str],
    options: dict[str, Any],
    constants: dict[str, float],
    scenario: str,
) -> None:
    """Join a world according to `given`, and send ("joined", facts, said) or ("error", text, said)."""
    from samebits.cluster import collectives, connecting, env, rendezvous, store, world
    from samebits.errors import SamebitsError

    for name, value in constants.items():
        for module in (store, rendezvous, connecting):
            if hasattr(module, name):
                setattr(module, name, value)
    _prepare(scenario)
    said: list[str] = []
    start = time.monotonic()
    try:
        here = env.read_assignment(environ, *given)
        assert here is not None
        with world.join(here, report=said.append, **({"device": "cpu"} | options)) as joined:
            if scenario == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            if scenario == FAILS:
                raise ValueError("made to fail")
            if scenario == SKIPS_BARRIER and joined.rank == 1:
                time.sleep(3)
            elif scenario == SKIPS_BARRIER:
                collectives.barrier(joined, 1.0)
            facts = _facts(joined) if scenario not in (LEAVES, LEAVES_LATE) else {}
        answers.send(("joined", facts | {"seconds": time.monotonic() - start}, said))
    except (SamebitsError, ValueError, RuntimeError) as error:
        answers.send(("error", f"{error}\n[{type(error).__name__}, {time.monotonic() - start:.1f} s]", said))


def _prepare(scenario: str) -> None:
    from samebits.cluster import connecting, stacks

    signals = {DIES_EARLY: signal.SIGKILL, DIES_ELSEWHERE: signal.SIGKILL, STOPS_EARLY: signal.SIGSTOP}

    def connect(start: Any, rank: int, infos: Any, store: Any, *_: Any, **__: Any) -> None:
        while not store.store.check([f"connect/alive/{info.rank}" for info in infos if info.rank != rank]):
            time.sleep(0.01)
        os.kill(os.getpid(), signals[scenario])

    if scenario in signals:
        connecting.connect = connect  # type: ignore[assignment]
    if scenario == LEAVES_LATE:
        call = connecting.call_with_timeout

        def slow(*given: Any) -> None:
            call(*given)
            time.sleep(LATE_S)

        connecting.call_with_timeout = slow
    if scenario == HURRIES:
        connecting.time_left = lambda *_: 3.0
    if scenario == WRONG_INTERFACE:
        os.environ["GLOO_SOCKET_IFNAME"] = "none0"
    if scenario == DIES_ELSEWHERE:
        stacks.namespace = lambda: "of another host"


def _facts(joined: Any) -> dict[str, Any]:
    import torch

    from samebits.cluster import collectives

    mine = torch.full((2, 3, 2, 2), float(joined.rank), device=joined.device).to(memory_format=torch.channels_last)
    count = torch.tensor(joined.rank, device=joined.device)
    collectives.broadcast_tensors(joined, [mine, count])
    for _ in range(5):
        collectives.barrier(joined, 10.0)
    return {
        "rank": joined.rank,
        "size": joined.size,
        "local_rank": joined.local_rank,
        "num_hosts": joined.num_hosts,
        "machines": joined.machines,
        "backend": joined.backend,
        "device": str(joined.device),
        "gathered": collectives.gather_object(joined, f"from {joined.rank}"),
        "everybody": collectives.all_gather_object(joined, joined.rank),
        "broadcast": collectives.broadcast_object(joined, joined.rank + 7),
        "tensors": (mine.sum().item(), mine.is_contiguous(memory_format=torch.channels_last), count.item()),
    }
