"""Decides which launchers may join the run that meets at an address.

The launcher that serves the rendezvous publishes a record of its run: run id, run folder and everything that all
launchers must share. Another launcher compares itself with that record before it writes anything. A launcher of
another run, or with other settings, is refused with what differs, and the run that meets there does not notice.
A store without a record belongs to another program, such as torchrun, and is left alone.

    lockstep/owner           record of the run whose launcher serves the store
    lockstep/RUN_ID/record   record of a second run that was given an id of its own (--rdzv-id)
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.cluster.address import port_holder, split_endpoint
from lockstep.cluster.signed import peek
from lockstep.config.process_range import RendezvousConfig
from lockstep.errors import LaunchError, cannot_make
from lockstep.launch.nodes import clocks

# How long the server may take from opening its port to the record.
RECORD_S = 5.0
OWNER = "lockstep/owner"
# How long it may take in all, over a slow link.
LIMIT_S = RECORD_S + clocks.FRESH_S + 5.0
_SHOWN = 5


def admit(store: Store, nodes: RendezvousConfig, serves: bool) -> bool:
    """See that this launcher may join. One that serves the store lets the others see what they have to share with it.

    Args:
        store: At the rendezvous.
        nodes: What this launcher was asked for.
        serves: Whether it serves the store.

    Returns:
        Whether this launcher is the first of its run.

    Raises:
        LaunchError: Another run or program meets there, or the clocks differ.
        CheckpointError: The run folder can't be made.
    """
    try:
        if serves:
            publish(store, nodes)
            clocks.publish(store, nodes)
            return True
        is_first = check(store, nodes)
        clocks.check(store, nodes)
        return is_first
    except dist.DistError as error:
        raise LaunchError(
            f"node {socket.gethostname()} lost the rendezvous at {nodes.endpoint} while it joined",
            given=str(error).splitlines()[0][:200],
            cause="the launcher that serves it has just ended; its own output says why",
            fix="start the same command on all machines again",
        ) from None


def publish(store: Store, nodes: RendezvousConfig) -> None:
    """On the launcher that serves the store: let the others see which run meets here.

    Raises:
        CheckpointError: The run folder can't be made.
    """
    if nodes.folder is not None:
        # The others recognise a folder on a shared disk by its inode, wherever the disk is mounted.
        try:
            nodes.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_make(nodes.folder, error) from None
    store.set(OWNER, json.dumps(_record(nodes)))


def check(store: Store, nodes: RendezvousConfig) -> bool:
    """On any other launcher: see that the run that meets here is this one.

    Returns:
        Whether this launcher is the first of a run with an id of its own.

    Raises:
        LaunchError: It is another run, has other settings, or is not a run of Lockstep.
    """
    owner, mine, is_first = _owner(store, nodes), _record(nodes), False
    if owner["run"] != nodes.run_id and nodes.has_own_id:
        # Two runs share the store on purpose. The first launcher of this run leaves its record.
        text = store.compare_set(f"lockstep/{nodes.run_id}/record", "", json.dumps(mine))
        is_first = text == json.dumps(mine).encode()
        owner = _read(text) or owner
    differing = compare(owner, mine, nodes.has_own_id)
    if differing:
        raise LaunchError(
            f"another run meets at {nodes.endpoint}",
            differ="\n".join(differing),
            where=f"started by {owner['user']} on {owner['host']}, pid {owner['pid']}, run folder {owner['folder']}",
            fix="Give this run another port on all its machines; if it is the same run, start it with the "
            "same command everywhere" + ("" if nodes.has_own_id else ", or with the same --rdzv-id"),
        )
    return is_first


def compare(theirs: Mapping[str, Any], mine: Mapping[str, Any], has_own_id: bool) -> Sequence[str]:
    """What differs between two launchers' records, one line each.

    Args:
        theirs: Record of the launcher that is there.
        mine: This launcher's record.
        has_own_id: The user has said by --rdzv-id that both belong to one run, so their folders may differ.
    """
    if theirs["run"] != mine["run"]:
        return [f"run: {theirs['run']} there, {mine['run']} here"]
    lines = []
    if not has_own_id and not _is_same_folder(theirs, mine):
        lines.append(f"run folder: {theirs['folder']} there, {mine['folder']} here")
    there, here = theirs["shared"], mine["shared"]
    names = [name for name in there | here if there.get(name) != here.get(name)]
    lines += [f"{name}: {there.get(name, 'none')} there, {here.get(name, 'none')} here" for name in names]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [_printable(line) for line in lines[:_SHOWN]] + more


def _record(nodes: RendezvousConfig) -> dict[str, Any]:
    user, inode = str(os.getuid()), 0
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    folder = nodes.folder.absolute() if nodes.folder is not None else None
    if folder is not None:
        with suppress(OSError):
            inode = folder.stat().st_ino
    shared = dict(nodes.shared)
    if nodes.rank is None:  # else `node_ranks.claim` compares it
        shared["--nodes"] = str(nodes.size)
    return {
        "run": nodes.run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "folder": str(folder),
        "inode": inode,
        "shared": shared,
    }


def _owner(store: Store, nodes: RendezvousConfig) -> dict[str, Any]:
    end = time.monotonic() + RECORD_S
    while (text := peek(store, OWNER)) is None:
        if time.monotonic() > end:
            holder = port_holder(split_endpoint(nodes.endpoint)[1])
            raise LaunchError(
                f"the store at {nodes.endpoint} does not belong to a run of lockstep train --nodes",
                given=holder or None,
                cause="torchrun or another program meets there",
                fix="choose another port, the same on all machines; or end that program",
            )
        time.sleep(0.02)
    found = _read(text)
    if found is None:
        raise LaunchError(
            f"the record of the run that meets at {nodes.endpoint} is damaged",
            cause="another version of Lockstep, or another program, has written it",
            fix="choose another port, the same on all machines",
        )
    return found


def _read(text: bytes) -> dict[str, Any] | None:
    """A record; None if it is damaged."""
    try:
        found = json.loads(text)
        shared = {str(name): str(value) for name, value in found["shared"].items()}
        named = {name: _printable(str(found[name])) for name in ("run", "host", "pid", "user", "folder")}
        return {**named, "inode": int(found["inode"]), "shared": shared}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _is_same_folder(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    return bool(theirs["folder"] == mine["folder"] or theirs["inode"] == mine["inode"] != 0)


def _printable(text: str) -> str:
    """Text of another machine, without terminal escapes and line breaks."""
    return "".join(char if char.isprintable() else "?" for char in text[:300])
