"""What it takes until the ranks of a large gloo world are connected: all at the start, or two at their first message.

    python -m benchmarks.connect                          # 16 to 256 ranks, 2 minutes
    python -m benchmarks.connect --ranks 64 128

The ranks are forks of one process, so 256 of them fit into 8 GB. They start one process group and pass one barrier. All
share this machine's cores, so seconds are upper limits; CPU times are what counts on a cluster, where each rank has a
core, and the store is one thread of rank 0. torch's store looks up the name of each client: where the name server does
not answer, seconds measure its timeouts.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from samebits.open_files import raise_open_files

LIMIT_S = 300.0
LAZY = "TORCH_GLOO_LAZY_INIT"  # torch's variable


class Cost(NamedTuple):
    """Until all ranks have passed a barrier.

    Attributes:
        seconds: On the clock.
        store_s: CPU time of the store, seconds.
        rank_s: CPU time of a rank, seconds, on average.
        sockets: Open sockets of rank 0.
    """

    seconds: float
    store_s: float
    rank_s: float
    sockets: int


def rank_work(rank: int, size: int, port: int, ready: int, report: int) -> None:
    os.read(ready, 1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    dist.barrier()
    if rank == 0:
        links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        os.write(report, str(sum(link.startswith("socket:") for link in links)).encode())
    # A rank that ends earlier breaks the connections of the others.
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.2)


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(size: int) -> Cost:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (ready, start), (answer, report) = os.pipe(), os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_work(rank, size, store.port, ready, report)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    os.close(report)
    began, store_s, ranks_s = time.perf_counter(), time.process_time(), children_s()
    os.write(start, b"x" * size)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert not any(codes), "a rank failed; its output is above"
    seconds, store_s, ranks_s = time.perf_counter() - began, time.process_time() - store_s, children_s() - ranks_s
    return Cost(seconds, store_s, ranks_s / size, int(os.read(answer, 16)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    arguments = parser.parse_args()
    raise_open_files()
    torch.set_num_threads(1)
    print("| ranks | connected | seconds | store's CPU s | a rank's CPU ms | sockets of rank 0 |")
    print("|---|---|---|---|---|---|")
    for size in arguments.ranks:
        for value, name in ("0", "at the start"), ("1", "at the first message"):
            os.environ[LAZY] = value
            cost = measure(size)
            print(
                f"| {size} | {name} | {cost.seconds:.2f} | {cost.store_s:.2f} | {cost.rank_s * 1e3:.0f} "
                f"| {cost.sockets} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
