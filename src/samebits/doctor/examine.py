"""Run the checks of `samebits doctor`: of this machine, and in a world of all processes and the network."""

import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samebits.bench.bench import joined
from samebits.cluster import collectives
from samebits.cluster.address import interface_towards, link_speed
from samebits.cluster.env import RankAssignment
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.world import World, layout_text
from samebits.config.given import flat
from samebits.config.schema import Mark, RunConfig, marks_of
from samebits.data.keyed import keys
from samebits.data.samples import SampleSource, digest_of
from samebits.doctor import machine
from samebits.doctor.check_result import CheckResult, merged, table, verdict_line
from samebits.engine.build import build_parts, dataset_info_for, open_data
from samebits.provenance.fingerprint import PACKAGE, code_digests, cpu_name, device_name, version_of
from samebits.recipes.catalog import find
from samebits.report.console import Console
from samebits.report.format import counted
from samebits.version import __version__

# Check the network between the processes of a world: every pair, the all-reduce, and the speed of both.


SIZES = (1024, 64 * 1024, 1024**2, 16 * 1024**2, 64 * 1024**2)
# Larger sizes are skipped after an all-reduce that takes longer than this, seconds.
LONG_S = 1.0
PING_BYTES = 64
PINGS = 5


def examine_links(world: World, timeout_s: float = 30.0) -> list[CheckResult]:
    """Test every pair of processes, then the all-reduce. Returns the same list on every rank."""
    own = (
        os.environ.get("GLOO_SOCKET_IFNAME")
        or interface_towards(world.assignment.init)
        or "chosen by the system"
    )
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
        text = (
            f"{len(broken)} of {num_pairs} cannot connect: ranks {one} ({hosts[one]}) and {other}"
        )
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
    times = []
    wrong = []
    for num_bytes in SIZES:
        seconds, is_right = _sum(world, num_bytes)
        times.append(seconds)
        if not is_right:
            wrong.append(num_bytes)
        if seconds > LONG_S:
            break
    if wrong:
        fix = "Do not train on this network: it or a driver damages data. Try NCCL_P2P_DISABLE=1, or other hardware."
        return [
            CheckResult(
                "all-reduce", f"WRONG sums at {', '.join(map(_size, wrong))}", "problem", fix
            )
        ]
    # The bus bandwidth: an all-reduce moves 2 (W-1)/W of its bytes over the link of each process.
    speed = 8 * num_bytes * 2 * (world.size - 1) / world.size / seconds
    text = (
        f"correct; {1e3 * times[0]:,.2f} ms at {_size(SIZES[0])}, "
        f"{_rate(speed)} at {_size(num_bytes)}"
    )
    # Rank 0's value: all ranks have to return the same list.
    link = collectives.broadcast_object(
        world, link_speed(world.assignment.init) if world.num_hosts > 1 else None
    )
    if link is None:
        return [CheckResult("all-reduce", text)]
    text += f"; the link's nominal speed is {_rate(link)}"
    if speed < link / 2:
        fix = "Check that no other traffic uses the link, and that the interface above is the intended one."
        return [CheckResult("all-reduce", text, "warning", fix)]
    return [CheckResult("all-reduce", text)]


def _sum(world: World, num_bytes: int) -> tuple[float, bool]:
    """Measure the all-reduce of so many bytes; return the time of the slowest rank, and whether all sums are right."""
    times = []
    is_right = True
    for _ in range(4):
        values = _numbers(world.rank, num_bytes // 4, world.device)
        collectives.barrier(world, 60)
        started = time.perf_counter()
        dist.all_reduce(values)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - started)
        expected = (
            world.size * _numbers(0, len(values), world.device) + world.size * (world.size - 1) / 2
        )
        is_right = is_right and torch.equal(values, expected)
    # Without the first one, which may set up connections and memory.
    gathered = collectives.all_gather_object(world, (statistics.median(times[1:]), is_right))
    return max(seconds for seconds, _ in gathered), all(right for _, right in gathered)


def _numbers(rank: int, count: int, device: torch.device) -> Tensor:
    """Return (count,) integers plus the rank, as float32: their sum has no rounding error in any order."""
    return (torch.arange(count, device=device) % 251 + rank).float()


def _size(num_bytes: int) -> str:
    return f"{num_bytes // 1024**2} MB" if num_bytes >= 1024**2 else f"{num_bytes // 1024} KB"


def _rate(bits_per_s: float) -> str:
    return (
        f"{bits_per_s / 1e9:.1f} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.0f} Mbit/s"
    )


# Compare software, hardware, settings and data over all ranks, and name the ranks that differ.


PACKAGES = ("torch", "torchvision", "numpy", "pillow", "safetensors")
# Largest difference of clocks without a warning. It does not affect training, but makes logs hard to compare.
CLOCK_S = 2.0
FIXES = {
    "code": "Install the same samebits on all machines.",
    "settings": "Give all ranks the same command.",
    "data": "Compare the data folders, or copy one over the other.",
    "processor": "Use machines of one kind, or set kernels=portable.",
    "device": "Use machines of one kind.",
}


def summary(world: World, config: RunConfig | None, data: Sequence[SampleSource]) -> dict[str, str]:
    """Describe this rank's software, hardware, settings and data by name, to be compared over the ranks.

    Args:
        world, config: The world and the settings; None if `doctor` runs without a recipe.
        data: The datasets, training set first; empty without a recipe.
    """
    found = {
        "samebits": __version__,
        "code": code_digests("")[PACKAGE],
        "python": platform.python_version(),
        **{name: version_of(name) or "not installed" for name in PACKAGES},
        "processor": cpu_name(),
        "device": device_name(world.device),
    }
    if config is not None:
        every = flat(config.model_dump(mode="json"))
        settings = {
            name: value for name, value in every.items() if Mark.MACHINE not in marks_of(name)
        }
        found["settings"] = hashlib.sha256(
            json.dumps(settings, sort_keys=True).encode()
        ).hexdigest()[:12]
    if data:
        found["data"] = ", ".join(fingerprint(samples) for samples in data)
    return found


def compare_ranks(world: World, own: Mapping[str, str]) -> list[CheckResult]:
    """Compare the summaries of all ranks. Returns the same list on every rank."""
    gathered = collectives.all_gather_object(world, (world.host, dict(own)))
    hosts = [host for host, _ in gathered]
    names = dict.fromkeys(name for _, texts in gathered for name in texts)
    findings = [
        compared(name, [texts.get(name, "none") for _, texts in gathered], hosts) for name in names
    ]
    # So that all ranks take the time at nearly the same moment.
    collectives.barrier(world, 60)
    times = collectives.all_gather_object(world, time.time())
    apart = max(times) - min(times)
    clocks = CheckResult("clocks", f"at most {apart:.2f} s apart")
    if apart > CLOCK_S:
        text = f"{clocks.value}: rank {times.index(max(times))} is ahead"
        clocks = CheckResult("clocks", text, "warning", "Set the time: timedatectl set-ntp true")
    return [*findings, clocks]


def compared(name: str, values: Sequence[str], hosts: Sequence[str]) -> CheckResult:
    """Compare one value over all ranks, and name the ranks that differ from the most common value.

    Args:
        name: Name of the value, such as "torch".
    """
    (usual, _), *others = Counter(values).most_common()
    if not others:
        return CheckResult(name, f"{usual} on all {len(values)}")
    odd = [rank for rank, value in enumerate(values) if value != usual]
    shown = [f"{values[rank]} on rank {rank} ({hosts[rank]})" for rank in odd[:4]]
    more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    same = [rank for rank, value in enumerate(values) if value == usual]
    text = f"{usual} on {ranks_text(same)}; {', '.join(shown)}{more}"
    fix = (
        FIXES.get(name)
        or f"pip install {name}=={usual} on {', '.join(sorted({hosts[rank] for rank in odd}))}"
    )
    if name == "python":
        fix = f"Use Python {usual} on all machines."
    return CheckResult(
        name,
        text,
        "warning" if name in ("processor", "device", "python", "pillow") else "problem",
        fix,
    )


def fingerprint(samples: SampleSource) -> str:
    """Return the number of samples, and a hash of the first, the middle and the last as training reads them."""
    count = len(samples)
    if count == 0:
        return "0 samples"
    indices = np.unique(np.array([0, count // 2, count - 1]))
    batch = samples.batch(indices, keys(0, 0, indices))
    return f"{count:,} samples {digest_of(batch).hex()[:12]}"


# Run the checks of `samebits doctor`: of this machine, and in a world of all processes and the network.


# Exit code if training cannot work.
PROBLEM = 1


def examine(
    source: str | None,
    overrides: list[str],
    run_dir: Path,
    as_json: bool,
    assignment: RankAssignment | None = None,
) -> int:
    """Run the checks of one process. Rank 0 prints the results.

    Args:
        source: The recipe whose settings and data are compared over the ranks. None: neither is compared.
        run_dir, as_json: Folder of the runs, whose disk is checked; whether to print JSON.
        assignment: Rank of this process and its world. None: read from the environment.

    Returns:
        The exit code: 0, or 1 if there is a problem. The same on every rank.
    """
    found = find(source) if source is not None else None
    config = found.load(overrides).config if found is not None else RunConfig(recipe="none")
    with joined(config, assignment) as world:
        data: list[SampleSource] = []
        if found is not None:
            info = dataset_info_for(found, config, world, None)
            parts = build_parts(config, partial(found.build, config, info))
            data = [open_data(config, parts, train=is_train) for is_train in (True, False)]
        results = _examine(world, config if found is not None else None, data, run_dir)
        if world.is_main and as_json:
            print(
                json.dumps(
                    {"world_size": world.size, "findings": [result.to_json() for result in results]}
                )
            )
        elif world.is_main:
            hosts = f" on {world.num_hosts} hosts" if world.num_hosts > 1 else f" on {world.host}"
            console = Console(sys.stdout, strict=True)
            console.say(f"doctor: {counted(world.size, 'process')}{hosts} ({world.backend})")
            console.draw(table(results))
            console.say(verdict_line(results))
    return PROBLEM if any(result.verdict == "problem" for result in results) else 0


def _examine(
    world: World, config: RunConfig | None, data: list[SampleSource], run_dir: Path
) -> list[CheckResult]:
    # One rank per machine checks the machine: two would slow down each other's disk writes.
    own = machine.whole(run_dir) if world.local_rank == 0 else []
    if world.size == 1:
        samples = [CheckResult("data", fingerprint(each)) for each in data]
        return [*own, *samples]
    gathered = collectives.all_gather_object(
        world, (world.host, [result.to_json() for result in own])
    )
    by_host = [
        (host, [CheckResult(**found) for found in results]) for host, results in gathered if results
    ]
    machines = merged([results for _, results in by_host], [host for host, _ in by_host])
    compared = compare_ranks(world, summary(world, config, data))
    # A check that is also compared over the ranks has only the row of the comparison.
    names = {result.check for result in compared}
    return [
        *(each for each in machines if each.check not in names),
        *compared,
        *examine_links(world),
    ]
