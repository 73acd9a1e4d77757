"""Check the network between the processes of a world: every pair, the all-reduce, and the speed of both."""

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.cluster import collectives
from samebits.cluster.address import interface_towards, link_speed
from samebits.cluster.world import World, layout_text
from samebits.doctor.check_result import CheckResult

SIZES = (1024, 64 * 1024, 1024**2, 16 * 1024**2, 64 * 1024**2)
# Larger sizes are skipped after an all-reduce that takes longer than this, seconds.
LONG_S = 1.0
PING_BYTES = 64
PINGS = 5


@dataclass(frozen=True)
class AllReduce:
    """Measurement of the all-reduce at one size."""

    num_bytes: int  #: Size of the buffer, bytes.
    seconds: float  #: Median time of the slowest rank.
    is_right: bool  #: Whether the sum was correct on every rank.

    def bits_per_s(self, world_size: int) -> float:
        """Return the bus bandwidth: an all-reduce moves 2 (W-1)/W of its bytes over the link of each process."""
        return 8 * self.num_bytes * 2 * (world_size - 1) / world_size / self.seconds


def examine(world: World, timeout_s: float = 30.0) -> list[CheckResult]:
    """Test every pair of processes, then the all-reduce. Returns the same list on every rank."""
    own = os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(world.assignment.init) or "chosen by the system"
    hosts_of: dict[str, list[str]] = {}
    for host, name in collectives.all_gather_object(world, (world.host, own)):
        hosts_of.setdefault(name, []).append(host)
    texts = [f"{name} on {', '.join(dict.fromkeys(hosts))}" for name, hosts in hosts_of.items()]
    interface = CheckResult("interface", own if len(hosts_of) == 1 else "; ".join(texts))
    pairs = [interface, *_pairs(world, timeout_s)]
    if any(result.verdict == "problem" for result in pairs):
        return pairs
    return [*pairs, CheckResult("gradients", layout_text(world.machines)), *_all_reduce(world)]


def rounds(world_size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of ranks: each pair occurs once, and each rank once per round (the circle method)."""
    ranks = list(range(world_size + world_size % 2))
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < world_size]
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]


def _pairs(world: World, timeout_s: float) -> list[CheckResult]:
    mine: dict[tuple[int, int], float | str] = {}
    for pairs in rounds(world.size):
        for pair in pairs:
            if world.rank in pair:
                mine[pair] = _ping(world, pair, timeout_s)
        # A ping of the next round would otherwise wait for a peer that is still busy with this one.
        collectives.barrier(world, 2 * timeout_s)
    every = collectives.all_gather_object(world, (world.host, mine))
    hosts = [host for host, _ in every]
    seconds: dict[tuple[int, int], float] = {}
    broken: dict[tuple[int, int], str] = {}
    for _, seen in every:
        for pair, value in seen.items():
            if isinstance(value, str):
                broken[pair] = value
            else:
                seconds[pair] = max(value, seconds.get(pair, 0.0))
    if broken:
        (one, other), reason = min(broken.items())
        num_pairs = len(seconds.keys() | broken.keys())
        text = f"{len(broken)} of {num_pairs} cannot connect: ranks {one} ({hosts[one]}) and {other}"
        fix = "Open the firewall between them, or choose the interface: GLOO_SOCKET_IFNAME=NAME (see: ip address)."
        return [CheckResult("every pair", f"{text} ({hosts[other]}): {reason}", "problem", fix)]
    slowest = max(seconds, key=lambda pair: seconds[pair])
    text = f"{len(seconds)} connect; {1e6 * statistics.median(seconds.values()):,.0f} us round trip"
    if len(seconds) > 1:
        text += f", ranks {slowest[0]} and {slowest[1]} {1e6 * seconds[slowest]:,.0f} us"
    return [CheckResult("every pair", text)]


def _ping(world: World, pair: tuple[int, int], timeout_s: float) -> float | str:
    """Return the round-trip time in seconds, or the reason of a failure."""
    peer = pair[1] if world.rank == pair[0] else pair[0]
    out = torch.zeros(PING_BYTES, dtype=torch.uint8, device=world.device)
    back = torch.empty_like(out)
    times = []
    try:
        for _ in range(PINGS):
            started = time.perf_counter()
            # One rank sends first and the other receives first: two that send could block each other.
            first, second = (out, back) if world.rank == pair[0] else (back, out)
            for tensor in (first, second):
                work = dist.isend(tensor, peer) if tensor is out else dist.irecv(tensor, peer)
                assert work is not None
                work.wait(timedelta(seconds=timeout_s))
            # With NCCL, wait() returns before the GPU has sent.
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - started)
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]
    return statistics.median(times)


def _all_reduce(world: World) -> list[CheckResult]:
    results = []
    for num_bytes in SIZES:
        results.append(_sum(world, num_bytes))
        if results[-1].seconds > LONG_S:
            break
    wrong = [result.num_bytes for result in results if not result.is_right]
    if wrong:
        fix = "Do not train on this network: it or a driver damages data. Try NCCL_P2P_DISABLE=1, or other hardware."
        return [CheckResult("all-reduce", f"WRONG sums at {', '.join(map(_size, wrong))}", "problem", fix)]
    last = results[-1]
    speed = last.bits_per_s(world.size)
    text = (
        f"correct; {1e3 * results[0].seconds:,.2f} ms at {_size(SIZES[0])}, {_rate(speed)} at {_size(last.num_bytes)}"
    )
    # Rank 0's value: all ranks have to return the same list.
    link = collectives.broadcast_object(world, link_speed(world.assignment.init) if world.num_hosts > 1 else None)
    if link is None:
        return [CheckResult("all-reduce", text)]
    text += f"; the link's nominal speed is {_rate(link)}"
    if speed < link / 2:
        fix = "Check that no other traffic uses the link, and that the interface above is the intended one."
        return [CheckResult("all-reduce", text, "warning", fix)]
    return [CheckResult("all-reduce", text)]


def _sum(world: World, num_bytes: int) -> AllReduce:
    times, is_right = [], True
    for _ in range(4):
        values = _numbers(world.rank, num_bytes // 4, world.device)
        collectives.barrier(world, 60)
        started = time.perf_counter()
        dist.all_reduce(values)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - started)
        expected = world.size * _numbers(0, len(values), world.device) + world.size * (world.size - 1) / 2
        is_right = is_right and torch.equal(values, expected)
    # Without the first one, which may set up connections and memory.
    gathered = collectives.all_gather_object(world, (statistics.median(times[1:]), is_right))
    return AllReduce(num_bytes, max(seconds for seconds, _ in gathered), all(right for _, right in gathered))


def _numbers(rank: int, count: int, device: torch.device) -> Tensor:
    """Return (count,) integers plus the rank, as float32: their sum has no rounding error in any order."""
    return (torch.arange(count, device=device) % 251 + rank).float()


def _size(num_bytes: int) -> str:
    return f"{num_bytes // 1024**2} MB" if num_bytes >= 1024**2 else f"{num_bytes // 1024} KB"


def _rate(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:.1f} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.0f} Mbit/s"
