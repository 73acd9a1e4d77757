"""Latency and bandwidth of a link: given as "100Gbit,5us", or measured by the messages that the exchange sends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.errors import ConfigError
from samebits.parallel.exchange.tree_all_reduce import Message, post

SMALL_VALUES = 16
LARGE_BYTES = 4 * 1024 * 1024
NUM_MESSAGES = 16  # under way at the same time, as between the ranks of a larger world
MIN_REPEATS, MAX_REPEATS, ENOUGH_S = 6, 60, 1.0  # TCP takes some messages to find the speed of a slow link
_GIVEN = re.compile(r"(\d+(?:\.\d+)?)([KMGT])bit,(\d+(?:\.\d+)?)(us|ms)")
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "us": 1e-6, "ms": 1e-3}


@dataclass(frozen=True)
class Link:
    """What a message takes between two processes.

    Attributes:
        bits_per_s: Bandwidth in each direction, while both directions are used.
        latency_s: Time of a small message in one direction, to a process that waits for it.
    """

    bits_per_s: float
    latency_s: float

    def __str__(self) -> str:
        """Return the form that `parse_link` reads."""
        unit = next((unit for unit in "TGM" if self.bits_per_s >= _UNITS[unit]), "K")
        latency = f"{1e3 * self.latency_s:.4g}ms" if self.latency_s >= 1e-3 else f"{1e6 * self.latency_s:.4g}us"
        return f"{self.bits_per_s / _UNITS[unit]:.4g}{unit}bit,{latency}"

    def seconds(self, num_bytes: float) -> float:
        """Return how long the link is busy with so many bytes in one direction."""
        return 8 * num_bytes / self.bits_per_s


def parse_link(text: str, option: str) -> Link:
    """Read a link such as 100Gbit,5us.

    Args:
        text: Bandwidth and latency in one direction.
        option: Its name, for the error.

    Raises:
        ConfigError: The text has another form.
    """
    match = _GIVEN.fullmatch(text.replace(" ", ""))
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            f"{option} is {text!r}",
            allowed="bandwidth and latency in one direction, such as 100Gbit,5us or 100Mbit,10ms",
            fix=f"Set {option} to such a pair. samebits doctor measures it between machines.",
        )
    return Link(float(match[1]) * _UNITS[match[2]], float(match[3]) * _UNITS[match[4]])


def measure_link(world: World, *, every_pair: bool = False) -> Link:
    """Measure the link between the first and the last rank. All ranks call it, and receive the same result.

    Args:
        world: Two ranks or more. The first and the last one are on two hosts, if there are several.
        every_pair: Measure between other ranks at the same time, and return the medians.
    """

    def measure(peer: int) -> tuple[float, ...]:
        latency_s = median(_ping_s(world, peer) for _ in range(15)) / 2
        return _bits_per_s(world, peer, latency_s), latency_s

    return Link(*_medians(world, measure, every_pair))


def measure_message_s(world: World, *, every_pair: bool = False) -> float:
    """Measure how long two processes work on a small message in each direction, of several that are under way.

    All ranks call it, and receive the same result.

    Args:
        world: Two ranks or more. The first and the last one exchange messages.
        every_pair: Measure between other ranks at the same time, and return the median.
    """

    def measure(peer: int) -> tuple[float, ...]:
        return (median(_message_s(world, peer) for _ in range(15)),)

    (message_s,) = _medians(world, measure, every_pair)
    return message_s


def _medians(world: World, measure: Callable[[int], tuple[float, ...]], every_pair: bool) -> list[float]:
    mine, peer = None, world.size - 1 - world.rank
    collectives.barrier(world, 60)
    if peer != world.rank and (every_pair or 0 in (peer, world.rank)):
        mine = measure(peer)
    measured = [each for each in collectives.all_gather_object(world, mine) if each]
    return [median(each) for each in zip(*measured, strict=True)]


def _message_s(world: World, peer: int) -> float:
    """Return the seconds of a small message in each direction, of several that are under way."""
    sent, received = (torch.zeros(NUM_MESSAGES, SMALL_VALUES, device=world.device) for _ in range(2))
    _ping_s(world, peer)  # both begin at the same time
    began = time.perf_counter()
    messages = [Message(received[tag], peer, tag, is_receive=True) for tag in range(NUM_MESSAGES)]
    messages += [Message(sent[tag], peer, tag, is_receive=False) for tag in range(NUM_MESSAGES)]
    _finish(world, messages)
    return (time.perf_counter() - began) / NUM_MESSAGES


def _ping_s(world: World, peer: int) -> float:
    """Return the seconds of a small message and its answer."""
    values = torch.zeros(SMALL_VALUES, device=world.device)
    answer = torch.zeros_like(values)
    began = time.perf_counter()
    sent, received = Message(values, peer, 1, is_receive=False), Message(answer, peer, 1, is_receive=True)
    for message in (sent, received) if world.rank < peer else (received, sent):
        _finish(world, [message])
    return time.perf_counter() - began


def _bits_per_s(world: World, peer: int, latency_s: float) -> float:
    """Return the bandwidth of each direction while both are used."""
    times: list[float] = []
    mine, other = (torch.zeros(LARGE_BYTES // 4, device=world.device) for _ in range(2))
    while len(times) < MIN_REPEATS or (sum(times) < ENOUGH_S and len(times) < MAX_REPEATS):
        _ping_s(world, peer)  # both begin at the same time
        began = time.perf_counter()
        _finish(world, [Message(other, peer, 1, is_receive=True), Message(mine, peer, 1, is_receive=False)])
        # Both go by the clock of one rank, so that they send as many messages.
        took = torch.tensor([time.perf_counter() - began], device=world.device)
        _finish(world, [Message(took, peer, 1, is_receive=world.rank > peer)])
        times.append(took.item())
    # A receive is announced to its sender first: one latency for the announcement, one for the message.
    seconds = median(times[len(times) // 2 :])
    return 8 * LARGE_BYTES / max(seconds - 2 * latency_s, seconds / 2)


def _finish(world: World, messages: list[Message]) -> None:
    for work in post(world, messages):
        work.wait()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
