"""Rendezvous of several machines' launchers: one serves a small store at the endpoint, and every launcher joins there.

    open the store ─ admission (same run?) ─ agree on a key

A "node" is torch's word for one launcher with its processes. What the launchers exchange after that is in `board`.
Every store call can block forever on a dead link, so each runs in a thread with a deadline.
"""

import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from samebits.cluster.address import port_holder, split_endpoint, store_address
from samebits.cluster.connecting import first_line
from samebits.cluster.signed import SignedStore, peek
from samebits.cluster.store import open_for_nodes
from samebits.cluster.timeout import as_clock, call_with_timeout, wait_until
from samebits.errors import LaunchError, cannot_make, printable
from samebits.launch.nodes import auth
from samebits.open_files import out_of_files
from samebits.process_range import ProcessRange, RendezvousConfig

# What a launcher that waits for other nodes reports: who has joined or was refused, and why it gives up.


REFUSED = "samebits/refused"
FIX = "Resume the run with --resume auto on all machines."
# first: the first view has not begun; others: nodes of the last view still have processes; turn: others train.
Wait = Literal["first", "others", "turn"]
_MAX_CHARS = (
    600  # of a note, which is not signed: any program that reaches the port may have written it
)


def read_refusal(store: Store) -> str:
    """Return what the last refused launcher reported; an empty text if none was refused."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        if (found := peek(store, REFUSED)) is not None:
            note = json.loads(found[: 8 * _MAX_CHARS])
            text = " ".join(f"{note['host']} was refused: {note['text']}"[:_MAX_CHARS].split())
            return printable(text)
    return ""


def describe_wait(
    nodes: RendezvousConfig, num_ready: int, names: str, wait: Wait, waited_s: float
) -> str:
    """Describe what this launcher waits for; `num_ready` nodes wait, or are in the view that it waits for."""
    size = nodes.size
    endpoint = nodes.endpoint
    shown = f" ({names})" if names else ""
    have = "has" if num_ready == 1 else "have"
    left = f"giving up in {as_clock(nodes.join_timeout_s - waited_s)} (cluster.join_timeout_s)"
    if wait == "others":
        what = f"waiting for the other nodes of the last world{shown}"
        left = f"lost after {nodes.node_timeout_s:g} s without a heartbeat (cluster.node_timeout_s)"
    elif wait == "turn" and num_ready >= size.most:
        what = f"the run at {endpoint} has all of its {num_ready} nodes{shown}"
        left = "waiting until one of them leaves or is lost"
    elif wait == "turn":
        what = f"waiting until the run at {endpoint} has saved and accepts this node{shown}"
    elif num_ready >= size.least:
        what = (
            f"{num_ready} of {size.least} to {size.most} nodes {have} joined at {endpoint}{shown}"
        )
        left = (
            f"starting {nodes.last_call_s:g} s after the first {size.least} (cluster.last_call_s)"
        )
    else:
        what = f"waiting for {size.least} node{'s' * (size.least > 1)} at {endpoint}: {num_ready} {have} joined{shown}"
    return f"{what}, {waited_s:.0f} s\n  {left}"


def describe_world(size: int, num_nodes: int, gone: str, new: str) -> str:
    """Describe a world that follows another one."""
    changes = (f"; lost or left: {gone}" if gone else "") + (f"; new: {new}" if new else "")
    return f"continuing with {count(size, 'process', 'es')} on {count(num_nodes, 'node')}{changes}"


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{plural if number != 1 else ''}"


def too_few_nodes(num_nodes: int, size: ProcessRange, lost: set[int]) -> LaunchError:
    """Return the error of a run that has lost more nodes than it can do without. `size`: how many the run may have."""
    return LaunchError(
        f"{num_nodes} of {size} nodes remain",
        given=f"lost: {', '.join(f'node {node}' for node in sorted(lost))}",
        fix=f"{FIX} With --nodes MIN:MAX, a run continues down to MIN machines.",
    )


def gave_up_waiting(nodes: RendezvousConfig, given: str, cause: str = "") -> LaunchError:
    """Return the error of a run that too few launchers have joined in time; `cause`: why one was refused."""
    return LaunchError(
        f"gave up waiting for {nodes.size.least} nodes at {nodes.endpoint}",
        given=given,
        where=f"after {nodes.join_timeout_s:.0f} s (cluster.join_timeout_s)",
        cause=cause,
        fix="Start the same command on the missing machines.",
    )


# Decide which launchers may join the run at a rendezvous address.
#
# The launcher that serves the rendezvous publishes a record of its run: run id, run folder and all settings that the
# launchers must share. Another launcher compares itself with that record before it writes anything. A launcher of
# another run, or with other settings, is refused with the differences, and the admitted run is not disturbed. A store
# without a record belongs to another program, such as torchrun, and is left unchanged.
#
#     samebits/owner           record of the run whose launcher serves the store
#     samebits/RUN_ID/record   record of a second run with a run id of its own (--rdzv-id)


# How long the server may take from opening its port to writing the record.
RECORD_S = 5.0
OWNER = "samebits/owner"
# How long admission may take in all, over a slow link.
LIMIT_S = RECORD_S + 10.0
_SHOWN = 5


def admit(store: Store, nodes: RendezvousConfig, serves: bool) -> bool:
    """Verify that this launcher may join, and return whether it is the first; the serving one publishes the record.

    Raises:
        LaunchError: The address belongs to another run or program.
        CheckpointError: The run folder cannot be created.
    """
    try:
        if serves:
            publish(store, nodes)
            return True
        return check(store, nodes)
    except dist.DistError as error:
        raise LaunchError(
            f"node {socket.gethostname()} lost the rendezvous at {nodes.endpoint} while it joined",
            given=first_line(error)[:200],
            cause="the launcher that serves it has just ended; its own output gives the reason",
            fix="Start the same command on all machines again.",
        ) from None


def publish(store: Store, nodes: RendezvousConfig) -> None:
    """Publish the record of this run. Only the launcher that serves the store calls this.

    Raises:
        CheckpointError: The run folder cannot be created.
    """
    # Other launchers recognize a folder on a shared disk by its inode, wherever the disk is mounted.
    try:
        nodes.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_make(nodes.folder, error) from None
    store.set(OWNER, json.dumps(describe_run(nodes)))


def check(store: Store, nodes: RendezvousConfig) -> bool:
    """Verify that the run at the address is this one, on all launchers but the serving one; return whether it is new.

    Raises:
        LaunchError: It is another run, has other settings, or is not a run of Samebits.
    """
    owner = _owner(store, nodes)
    mine = describe_run(nodes)
    is_first = False
    if owner["run"] != nodes.run_id and nodes.has_own_id:
        # Two runs share the store intentionally. The first launcher of this run writes its record.
        # Atomic, as two launchers of the second run may come at the same time.
        text = store.compare_set(f"samebits/{nodes.run_id}/record", "", json.dumps(mine))
        is_first = text == json.dumps(mine).encode()
        owner = read_record(text) or owner
    differing = compare(owner, mine, nodes.has_own_id)
    if differing:
        raise LaunchError(
            f"another run uses the rendezvous at {nodes.endpoint}",
            given="\n".join(differing),
            where=f"started by {owner['user']} on {owner['host']}, pid {owner['pid']}, run folder {owner['folder']}",
            fix="Give this run another port on all its machines. If it is the same run, start it with the "
            "same command everywhere"
            + ("." if nodes.has_own_id else ", or with the same --rdzv-id."),
        )
    return is_first


def report_refusal(store: Store, error: BaseException) -> None:
    """Leave a note for the launchers of the run that wait, if this one was refused with a LaunchError.

    A store of another program is left unchanged.
    """
    if isinstance(error, LaunchError) and peek(store, OWNER) is not None:
        given = "; ".join((error.slots.get("given") or error.slots.get("cause", "")).splitlines())
        text = f"{error.what} ({given})" if given else error.what
        note = {"host": socket.gethostname(), "text": text[:_MAX_CHARS]}
        store.set(REFUSED, json.dumps(note))


def compare(theirs: Mapping[str, Any], mine: Mapping[str, Any], has_own_id: bool) -> Sequence[str]:
    """Return how two launchers' records differ, in at most five lines; with `has_own_id`, folders may differ."""
    if theirs["run"] != mine["run"]:
        return [f"run: {theirs['run']} there, {mine['run']} here"]
    lines: list[str] = []
    # Without a shared disk, the same command with a relative path may be typed in different working folders. Whether
    # the launchers belong together is then a question of the key, which `auth.find_key` answers.
    is_same_folder = (
        theirs["folder"] == mine["folder"]
        or theirs["inode"] == mine["inode"] != 0
        or theirs["typed"] == mine["typed"] != ""
    )
    if not has_own_id and not is_same_folder:
        lines.append(f"run folder: {theirs['folder']} there, {mine['folder']} here")
    there = theirs["shared"]
    here = mine["shared"]
    names = [name for name in there | here if there.get(name) != here.get(name)]
    lines += [
        f"{name}: {there.get(name, 'none')} there, {here.get(name, 'none')} here" for name in names
    ]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [_printable(line) for line in lines[:_SHOWN]] + more


def describe_run(nodes: RendezvousConfig) -> dict[str, Any]:
    """Return the record of this launcher's run."""
    user = str(os.getuid())
    # KeyError: a container may run under a user id without a name.
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    return {
        "run": nodes.run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "folder": str(nodes.folder.absolute()),
        "typed": str(nodes.folder),
        "inode": _inode(nodes.folder),
        "shared": {**nodes.shared, "--nodes": str(nodes.size)},
    }


def _inode(folder: Path) -> int:
    with suppress(OSError):
        return folder.stat().st_ino
    return 0


def _owner(store: Store, nodes: RendezvousConfig) -> dict[str, Any]:
    end = time.monotonic() + RECORD_S
    # `peek`, since `get` would wait in native code until the store's own timeout.
    while (text := peek(store, OWNER)) is None:
        if time.monotonic() > end:
            holder = port_holder(split_endpoint(nodes.endpoint)[1])
            raise LaunchError(
                f"the store at {nodes.endpoint} does not belong to a run of samebits train --nodes",
                given=holder or None,
                cause="torchrun or another program serves it",
                fix="Choose another port, the same on all machines, or end that program.",
            )
        time.sleep(0.02)
    found = read_record(text)
    if found is None:
        raise LaunchError(
            f"the record of the run at {nodes.endpoint} is damaged",
            cause="another version of Samebits, or another program, has written it",
            fix="Choose another port, the same on all machines.",
        )
    return found


def read_record(text: str | bytes) -> dict[str, Any] | None:
    """Parse a record; None if it is damaged."""
    try:
        found = json.loads(text)
        shared = {str(name): str(value) for name, value in found["shared"].items()}
        named = {
            name: _printable(str(found[name])) for name in ("run", "host", "pid", "user", "folder")
        }
        typed = str(found.get("typed", ""))
        return {**named, "typed": typed, "inode": int(found["inode"]), "shared": shared}
    # Anything may be in the store of another program. RecursionError: deeply nested JSON.
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _printable(text: str) -> str:
    """Return text of another machine without terminal escapes and line breaks, at most 300 characters."""
    # Escapes in another machine's text could rewrite this terminal.
    return "".join(char if char.isprintable() else "?" for char in text[:300])


T = TypeVar("T")
# Deadline of a short call. Over a link that was cut, there is never an answer.
ANSWER_S = 5.0
# How long the node that serves the store waits for the others to read how the run ended.
LINGER_S = 8.0
# How long another machine's folder may take to appear on a network disk, seconds.
VISIBLE_S = 5.0


class NodeRendezvous:
    """The launchers' store, which this launcher has joined or serves.

    Args:
        check: Called often during a wait; raises to end it.
        report: Called with a text every few seconds while the store cannot be reached.

    Attributes:
        nodes: Number of nodes, endpoint and timeouts.
        serves: Whether this launcher serves the store.
        key: Secret of the run.
        store: The run's part of the store.

    Raises:
        LaunchError: The store cannot be served or reached, or this launcher may not join.
    """

    def __init__(
        self, nodes: RendezvousConfig, check: Callable[[], None], report: Callable[[str], None]
    ) -> None:
        self.nodes = nodes
        self._check = check
        self._store, self.serves = self.wait(
            lambda: open_for_nodes(nodes, report), nodes.join_timeout_s + ANSWER_S
        )
        self._key_file: auth.KeyFile | None = None
        self._makes_folder = self.serves and not nodes.folder.exists()
        try:
            is_first = self.wait(lambda: admit(self._store, nodes, self.serves), LIMIT_S)
            self._is_first = is_first
            # A launcher that is there answers within moments, or is lost.
            self._store.set_timeout(timedelta(seconds=max(10.0, nodes.node_timeout_s)))
            run = PrefixStore(f"samebits/{nodes.run_id}", self._store)
            self.key = self._agree_on_key(run, is_first)
            self.store = SignedStore(run, auth.nodes_seal(self.key, nodes))
        except BaseException as error:
            refusal = error
            self.query(lambda: report_refusal(self._store, refusal))
            self._clean_up()
            raise

    def query(self, call: Callable[[], T], limit_s: float = ANSWER_S) -> T | None:
        """Return the result of a short call; None if the store does not answer in time."""
        try:
            return call_with_timeout(call, limit_s)
        except (dist.DistError, TimeoutError):
            return None

    def wait(self, call: Callable[[], T], limit_s: float) -> T:
        """Return the result of a call that may take so many seconds; a stop signal ends the wait.

        Raises:
            LaunchError: No answer within the deadline.
        """
        try:
            return call_with_timeout(call, limit_s, lambda waited_s: self._check())
        except TimeoutError:
            raise self.lost_store(f"no answer for {limit_s:.0f} s") from None

    def is_served(self) -> bool:
        """Return whether a program listens at the endpoint, or the network to it is only down."""
        host, port = split_endpoint(self.nodes.endpoint)
        try:
            # Short, as processes that have ended wait meanwhile.
            socket.create_connection((store_address(host, port), port), 0.2).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True

    def lost_store(self, reason: str) -> LaunchError:
        """Return the error for a store that does not answer any more."""
        return LaunchError(
            f"node {socket.gethostname()} has lost the rendezvous at {self.nodes.endpoint}: {reason}",
            cause=out_of_files() or "that machine or the network to it is down",
            fix="Once it is back, start the same command on all machines, with --resume auto.",
        )

    def _agree_on_key(self, run: Store, is_first: bool) -> str:
        def agree() -> str:
            if not is_first:
                return auth.find_key(run, self.nodes)
            key, self._key_file = auth.exchange_key(run, self.nodes)
            return key

        return self.wait(agree, auth.GREETING_S + ANSWER_S)

    def check_folder(self) -> None:
        """Check that the run folder is on a disk that all machines share: any of them may have rank 0 one day.

        Raises:
            LaunchError: It is another folder than the first launcher's.
        """
        folder = self.nodes.folder
        if self._is_first:
            folder.mkdir(parents=True, exist_ok=True)
            self.wait(lambda: self.store.put("folder", _inode(folder)), ANSWER_S)
            return
        first = self.wait(lambda: self.store.wait_for("folder"), ANSWER_S)

        def is_same() -> bool:
            self._check()
            return bool(_inode(folder) == first)

        if not wait_until(is_same, VISIBLE_S, 0.1):
            raise LaunchError(
                "cluster.recovery=in_step with --nodes needs a run folder on a disk that all machines share",
                given=f"{folder} is not the folder that the first machine uses",
                fix="Set --run-dir to a shared disk, or cluster.recovery=restart.",
            )

    def refusal(self) -> str:
        """Return what the last refused launcher reported; empty if none was refused."""
        return self.query(lambda: read_refusal(self._store)) or ""

    def end(self, code: int, text: str, has_been_read: Callable[[], bool] = lambda: True) -> None:
        """End the run on all nodes; the first to call this sets the result. The server waits until it is read."""

        self.query(lambda: self.store.put_first("ended", {"code": code, "text": text}))
        if self.serves:
            self.query(lambda: wait_until(has_been_read, LINGER_S, 0.05), LINGER_S)
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the key file, and the run folder if `admission.publish` created it and it is still empty."""
        if self._key_file is not None:
            self._key_file.remove()
        if self._makes_folder:
            with suppress(OSError):
                self.nodes.folder.rmdir()
