"""A program that attacks a run at random through the ports that it finds; all of it follows from a seed.

deeds   what is done to a port: connections, garbage, and changes of keys in a store
attack  finds the ports of a run and does deeds to them for a while, in a process of its own
"""

import contextlib
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import hostile
import psutil
from torch.distributed import TCPStore

# What torch's store asks its clients: a byte for the kind of question, then lengths of 8 bytes and texts.
STORE_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)
NUM_QUERIES = 20
# How long an attack may take on a machine that is busy.
MOST_S = 60.0
BANNERS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2p1\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)
NUMBERS = (b"", b"x", b"-1", b"0", b"1000000", b"9" * 18, b"9" * 40, b"-" + b"9" * 18, b"1.5", b"\xff\xfe")
# What processes leave in their stores, by the end of its name. `{}` is a rank.
NAMES = (
    "info/{}", "first", "infos", "fault", "joined", "acknowledged", "left", "arrivals", "generations", "generation",
    "connect/alive/{}", "connect/acknowledged", "connect/done/{}", "connect/count", "connect/verdict", "watch/{}",
    "watch/verdict", "barrier/{}", "barrier/count",
    "state/{}", "view/{}", "greeting", "ended", "node/{}", "num_nodes", "record", "owner", "{}",
)  # fmt: skip


@dataclass
class Target:
    """What a stranger knows of a run.

    Attributes:
        pid: The first process; those below it belong to the run too.
        ports: Where it is known to listen.
        run_id: As users can guess it.
        key: The run's key, for a program that has it but is broken; empty: it does not know it, or there is none.
        canary: A file that appears where code of the stranger's was run.
        can_stop: Whether processes may be suspended too.
        seen: Values that were in stores, to be written again.
    """

    pid: int
    ports: list[int]
    run_id: str
    canary: Path
    key: str = ""
    can_stop: bool = False
    seen: dict[str, list[bytes]] = field(default_factory=dict)


def listening(target: Target) -> list[int]:
    """The ports that a run listens on now."""
    found = set(target.ports)
    with contextlib.suppress(psutil.Error):
        for places in hostile.listening(target.pid).values():
            found.update(port for _, port in places)
    return sorted(found)


def store_of(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)


def keys_of(store: TCPStore, target: Target, rng: random.Random) -> list[str]:
    """Keys that are there, and keys that may come."""
    there = list(store.list_keys())
    prefixes = {name[: -len(end)] for name in there for end in ("first", "joined", "infos") if name.endswith(end)}
    prefixes |= {f"samebits/{target.run_id}/1/", f"samebits/{target.run_id}/", "samebits/", "signed/", "world/"}
    made_up = [f"{rng.choice(sorted(prefixes))}{rng.choice(NAMES).format(rng.randrange(-1, 6))}" for _ in range(6)]
    return [*rng.sample(there, min(len(there), 12)), *made_up]


def remember(store: TCPStore, target: Target, rng: random.Random) -> None:
    for name in rng.sample(keys := list(store.list_keys()), min(len(keys), 20)):
        if store.check([name]):
            kept = target.seen.setdefault(name, [])
            kept.append(store.get(name))
            del kept[:-20]


def content(rng: random.Random, target: Target) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(hostile.garbage(target.canary))
    if kind == 1 and target.seen:
        return rng.choice(target.seen[rng.choice(sorted(target.seen))])
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.randbytes(rng.randrange(200))
    return hostile.forged(rng)


def set_keys(port: int, target: Target, rng: random.Random) -> None:
    """Write garbage, other keys' values and old values into keys."""
    store = store_of(port)
    remember(store, target, rng)
    for name in keys_of(store, target, rng):
        store.set(name, content(rng, target))  # type: ignore[arg-type]  # bytes are taken too


def delete_keys(port: int, target: Target, rng: random.Random) -> None:
    store = store_of(port)
    for name in keys_of(store, target, rng):
        if rng.random() < 0.5:
            store.delete_key(name)


def append_keys(port: int, target: Target, rng: random.Random) -> None:
    store = store_of(port)
    for name in keys_of(store, target, rng):
        store.append(name, rng.choice(("", "x", "[", "0" * 5000)))


def swap_keys(port: int, target: Target, rng: random.Random) -> None:
    store = store_of(port)
    names = [name for name in store.list_keys() if store.check([name])]
    if len(names) > 1:
        one, two = rng.sample(names, 2)
        first, second = store.get(one), store.get(two)
        store.set(one, second)  # type: ignore[arg-type]  # bytes are taken too
        store.set(two, first)  # type: ignore[arg-type]  # bytes are taken too


def replay_keys(port: int, target: Target, rng: random.Random) -> None:
    """Write values that were there before, also those of earlier runs, where they were."""
    store = store_of(port)
    remember(store, target, rng)
    for name in rng.sample(sorted(target.seen), min(len(target.seen), 10)):
        store.set(name, rng.choice(target.seen[name]))  # type: ignore[arg-type]  # bytes are taken too


def count_keys(port: int, target: Target, rng: random.Random) -> None:
    """Spoil counters."""
    store = store_of(port)
    for name in keys_of(store, target, rng):
        if rng.random() < 0.5:
            store.set(name, rng.choice(NUMBERS))  # type: ignore[arg-type]  # bytes are taken too
        else:
            with contextlib.suppress(RuntimeError):
                store = store_of(port)
                store.add(name, rng.choice((1, -1, 5, 2**40, -(2**40), 2**62)))


def huge_value(port: int, target: Target, rng: random.Random) -> None:
    store = store_of(port)
    name = rng.choice(keys_of(store, target, rng))
    store.set(name, bytes(rng.choice((1 << 20, 20 << 20, 200 << 20))))  # type: ignore[arg-type]  # bytes are taken too


def wait_on_keys(port: int, target: Target, rng: random.Random) -> None:
    def wait(name: str) -> None:
        with contextlib.suppress(RuntimeError):
            store_of(port).wait([name], timedelta(seconds=2))

    for number in range(20):
        threading.Thread(target=wait, args=(f"never/{number}",), daemon=True).start()


def take_first(port: int, target: Target, rng: random.Random) -> None:
    """Leave a value in each key before the run does."""
    store = store_of(port)
    for prefix in (f"samebits/{target.run_id}/1/", f"samebits/{target.run_id}/", f"samebits/{target.run_id}/1/signed/"):
        for name in NAMES:
            store.compare_set(f"{prefix}{name.format(rng.randrange(4))}", "", content(rng, target))  # type: ignore[arg-type]  # bytes are taken too


_kept: list[socket.socket] = []


def idle(port: int, target: Target, rng: random.Random) -> None:
    _kept.extend(hostile.idle(port, rng.choice((10, 100, 300, 2000))))


def come_and_go(port: int, target: Target, rng: random.Random) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port), timeout=2) as one:
            if rng.random() < 0.5:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset


def slow_loris(port: int, target: Target, rng: random.Random) -> None:
    """Send a question so slowly that it has no end."""
    words = STORE_MAGIC + bytes([rng.randrange(NUM_QUERIES)]) + struct.pack("<Q", rng.choice((3, 1 << 40, 2**64 - 1)))
    one = socket.create_connection(("127.0.0.1", port), timeout=2)
    _kept.append(one)
    for byte in words:
        one.send(bytes([byte]))
        time.sleep(0.05)


def speak_otherwise(port: int, target: Target, rng: random.Random) -> None:
    one = socket.create_connection(("127.0.0.1", port), timeout=2)
    _kept.append(one)
    one.sendall(rng.choice((*BANNERS, rng.randbytes(rng.randrange(1, 5000)))))


def garble(port: int, target: Target, rng: random.Random) -> None:
    """Questions to a store with wrong lengths and numbers."""
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", port), timeout=2) as one:
            length = rng.choice((0, 1, 7, 1 << 31, 1 << 40, 2**63, 2**64 - 1))
            body = bytes([rng.randrange(NUM_QUERIES)]) + struct.pack("<Q", length) + rng.randbytes(rng.randrange(40))
            one.sendall((STORE_MAGIC if rng.random() < 0.8 else b"") + body)


def suspend(port: int, target: Target, rng: random.Random) -> None:
    """A node or a process that stands still for a moment, as where its machine swaps."""
    if not target.can_stop:
        return
    with contextlib.suppress(psutil.Error):
        victim = rng.choice([psutil.Process(target.pid), *psutil.Process(target.pid).children(recursive=True)])
        victim.send_signal(signal.SIGSTOP)
        try:
            time.sleep(rng.choice((0.2, 1.0, 4.0)))
        finally:
            victim.send_signal(signal.SIGCONT)


Deed = Callable[[int, Target, random.Random], None]
DEEDS: dict[str, Deed] = {
    deed.__name__: deed
    for deed in (
        set_keys, delete_keys, append_keys, swap_keys, replay_keys, count_keys, huge_value, wait_on_keys, take_first,
        idle, come_and_go, slow_loris, speak_otherwise, garble, suspend,
    )
}  # fmt: skip


AT_ANY_PORT = {deed.__name__ for deed in (idle, come_and_go, slow_loris, speak_otherwise, garble, suspend)}


def is_store(port: int) -> bool:
    with contextlib.suppress(RuntimeError):
        return bool(TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False))
    return False


def attack(seed: int, target: Target, names: list[str], start_s: float, num_deeds: int, seen: Path) -> None:
    """Do deeds to all ports of a run. The values that were seen are kept for later runs."""
    rng = random.Random(seed)
    with open(os.devnull, "r+b") as nowhere:  # torch prints a stack trace for each connection that fails
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with contextlib.suppress(OSError, ValueError):
        target.seen = {
            name: [bytes.fromhex(each) for each in kept] for name, kept in json.loads(seen.read_text()).items()
        }
    while not listening(target) and psutil.pid_exists(target.pid):
        time.sleep(0.005)
    time.sleep(start_s)
    end = time.monotonic() + MOST_S
    done: Counter[str] = Counter()
    tried: dict[int, bool] = {}
    while done.total() < num_deeds and time.monotonic() < end and psutil.pid_exists(target.pid):
        ports = listening(target)
        if not ports:
            time.sleep(0.005)
            continue
        name, port = rng.choice(names), rng.choice(ports)
        if name not in AT_ANY_PORT:
            for each in set(ports) - tried.keys():
                tried[each] = is_store(each)
            stores = [each for each in ports if tried[each]]
            if not stores:
                tried.clear()
                continue
            port = rng.choice(stores)
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            DEEDS[name](port, target, rng)
            done[name] += 1
        time.sleep(rng.choice((0.0, 0.01, 0.1, 0.5)))
    small = {name: [each.hex() for each in kept if len(each) < 5000][-5:] for name, kept in target.seen.items()}
    seen.write_text(json.dumps(dict(list(small.items())[-200:])))
    (target.canary.parent / f"done-{target.pid}.json").write_text(json.dumps(done))
    os._exit(0)
