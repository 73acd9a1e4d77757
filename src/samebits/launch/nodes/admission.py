"""Decide which launchers may join the run at a rendezvous address.

The launcher that serves the rendezvous publishes a record of its run: run id, run folder and all settings that the
launchers must share. Another launcher compares itself with that record before it writes anything. A launcher of
another run, or with other settings, is refused with the differences, and the admitted run is not disturbed. A store
without a record belongs to another program, such as torchrun, and is left unchanged.

    samebits/owner           record of the run whose launcher serves the store
    samebits/RUN_ID/record   record of a second run with a run id of its own (--rdzv-id)
"""

import getpass
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from samebits.cluster.address import port_holder, split_endpoint
from samebits.cluster.signed import peek
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError, cannot_make
from samebits.launch.nodes import waiting

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
            given=str(error).splitlines()[0][:200],
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
    owner, mine, is_first = _owner(store, nodes), describe_run(nodes), False
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
            "same command everywhere" + ("." if nodes.has_own_id else ", or with the same --rdzv-id."),
        )
    return is_first


def report_refusal(store: Store, note: str) -> None:
    """Report to the launchers of the run that this one was refused; a store of another program is left unchanged."""
    if note and peek(store, OWNER) is not None:
        store.set(waiting.REFUSED, note)


def compare(theirs: Mapping[str, Any], mine: Mapping[str, Any], has_own_id: bool) -> Sequence[str]:
    """Return how two launchers' records differ, in at most five lines; with `has_own_id`, folders may differ."""
    if theirs["run"] != mine["run"]:
        return [f"run: {theirs['run']} there, {mine['run']} here"]
    lines: list[str] = []
    if not has_own_id and not _is_same_folder(theirs, mine):
        lines.append(f"run folder: {theirs['folder']} there, {mine['folder']} here")
    there, here = theirs["shared"], mine["shared"]
    names = [name for name in there | here if there.get(name) != here.get(name)]
    lines += [f"{name}: {there.get(name, 'none')} there, {here.get(name, 'none')} here" for name in names]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [_printable(line) for line in lines[:_SHOWN]] + more


def describe_run(nodes: RendezvousConfig) -> dict[str, Any]:
    """Return the record of this launcher's run."""
    user, inode = str(os.getuid()), 0
    # KeyError: a container may run under a user id without a name.
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    with suppress(OSError):
        inode = nodes.folder.stat().st_ino
    shared = dict(nodes.shared)
    if nodes.rank is None:  # otherwise `rank_claims.claim` compares it
        shared["--nodes"] = str(nodes.size)
    return {
        "run": nodes.run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "folder": str(nodes.folder.absolute()),
        "typed": str(nodes.folder),
        "inode": inode,
        "shared": shared,
    }


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
        named = {name: _printable(str(found[name])) for name in ("run", "host", "pid", "user", "folder")}
        typed = str(found.get("typed", ""))
        return {**named, "typed": typed, "inode": int(found["inode"]), "shared": shared}
    # Anything may be in the store of another program. RecursionError: deeply nested JSON.
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _is_same_folder(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    # Without a shared disk, the same command with a relative path may be typed in different working folders. Whether
    # the launchers belong together is then a question of the key, which `auth.find_key` answers.
    return bool(
        theirs["folder"] == mine["folder"]
        or theirs["inode"] == mine["inode"] != 0
        or theirs["typed"] == mine["typed"] != ""
    )


def _printable(text: str) -> str:
    """Return text of another machine without terminal escapes and line breaks, at most 300 characters."""
    # Escapes in another machine's text could rewrite this terminal.
    return "".join(char if char.isprintable() else "?" for char in text[:300])
