"""A program that reaches the port of another user's run, and does what it can there."""

import contextlib
import json
import os
import pickle
import random
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore

from tests.runs import records


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.canary}",))


def garbage(canary: Path) -> list[bytes]:
    """What is written into a key, one after the other."""
    forged = {"by": 0, "culprits": [{"rank": 0}], "what": "x", "slots": {"what": "y"}, "code": 0, "text": "", "rank": 1}
    return [
        b"", b"\xff\x00" * 500, pickle.dumps(Bomb(canary)), json.dumps(forged).encode(),
        b"- " + json.dumps(forged).encode(), b"0" * 64 + b" " + json.dumps(forged).encode(), b"- " + b"[" * 50_000,
        b"- [1, null]", b"x" * 3_000_000,
    ]  # fmt: skip


def forged(rng: random.Random) -> bytes:
    """A message of the right outer form."""
    card: dict[str, Any] = {
        "rank": rng.randrange(-1, 5), "world_size": rng.choice([1, 2, 3, 10**9]),
        "host": rng.choice(["h", socket.gethostname()]),
        "pid": rng.choice([1, -1, 10**30]), "device": "cpu",
        "backend": "auto", "num_gpus": 0, "restart": rng.choice([0, 7]), "nonce": "n", "namespace": "", "network": "",
    }  # fmt: skip
    value: Any = rng.choice(
        [
            card, [card, card], None, True, 5, -1, 10**400, 1e308, "x" * 1000, [], {}, [None], ["h", 1], ["h", "x"],
            {"what": "made up", "facts": {"self": 1}}, {"what": "made up", "facts": {"what": 1}, "num_lost": 1},
            {"by": 0, "culprits": [{"rank": 0}]}, {"code": 0, "text": ""}, {"code": 10**9, "text": "\x1b[31m"},
            {"number": 10**9, "state": {}}, {"beat": 1, "doing": "x"}, [1, [2, [3, {"a": "\ud800"}]]],
        ]
    )  # fmt: skip
    return b"- " + json.dumps(value).encode()


def connect(port: int) -> TCPStore:
    """A client of the run's store."""
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)


def poison(store: TCPStore, keys: list[str], canary: Path, only: int | None = None) -> None:
    """Write garbage into keys."""
    everything = garbage(canary)
    for key in keys:
        for content in everything if only is None else everything[only : only + 1]:
            store.set(key, content)  # type: ignore[arg-type]  # bytes are taken too


def idle(port: int, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    return [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]


def crowd(port: int, count: int, run: subprocess.Popen[str]) -> list[socket.socket]:
    """So many idle connections, and more until the run ends: a file that the run closes leaves room for one."""
    idlers = idle(port, count)
    while run.poll() is None and len(idlers) < 2 * count:
        with contextlib.suppress(OSError):
            idlers += idle(port, 1)
        time.sleep(0.05)
    return idlers


def listening(pid: int) -> dict[int, list[tuple[str, int]]]:
    """Where a process and its children listen, by process, in the order in which it began to."""
    found: dict[int, list[tuple[str, int]]] = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        opened = sorted((each for each in connections if each.status == psutil.CONN_LISTEN), key=lambda each: each.fd)
        places = [(each.laddr.ip, each.laddr.port) for each in opened]
        if places:
            found[process.pid] = places
    return found


def store_port(places: dict[int, list[tuple[str, int]]]) -> int:
    """Where the store is: rank 0 opens it first, and then the ports of gloo, as the other ranks do."""
    return max(places.values(), key=len)[0][1]


def trains(folder: Path, run: subprocess.Popen[str]) -> bool:
    return run.poll() is not None or bool(records(folder / "run", "train"))
