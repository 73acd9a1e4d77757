"""Looks at a file of torch.save before torch reads it: what it would unpack to, and that its pickle ends.

`torch.load(weights_only=True)` runs no code of the file. It has no limits though: parts of a zip can be packed a
thousandfold, and a pickle of a few hundred bytes can hold a tuple that stands for more values than there are atoms,
which is gone through whenever it is hashed or shown.
"""

from __future__ import annotations

import pickletools
import stat
import zipfile
from pathlib import Path
from typing import IO, Any

# Weights hardly get smaller by packing; torch itself does not pack them.
_MAX_RATIO = 20
_MAX_EXTRA_BYTES = 64 * 1024 * 1024
_MAX_PICKLE_BYTES = 256 * 1024 * 1024
_MAX_UNFOLDED = 1_000_000  # values within one tuple, each counted as often as it is there
_MAX_OLD_PICKLES = 5  # the form before torch 1.6: magic number, version, system, content, names of storages
# Opcodes whose result is gone through whole when it is hashed; lists and dicts can't be hashed.
_HASHED_WHOLE = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE")


def check_torch_file(path: Path) -> None:
    """See that a file of torch.save can be read with memory and time of the order of its size.

    Raises:
        ValueError: It can't.
        OSError: It can't be read.
        Exception: What the readers of zip and pickle raise of a damaged file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            for _ in range(_MAX_OLD_PICKLES):
                _check_pickle(file)
            return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        total = sum(member.file_size for member in members)
        if total > _MAX_RATIO * status.st_size + _MAX_EXTRA_BYTES:
            raise ValueError(f"its {status.st_size:,} bytes would unpack to {total:,}")
        for member in members:
            if member.filename.endswith(".pkl"):
                if member.file_size > _MAX_PICKLE_BYTES:
                    raise ValueError(f"{member.filename} would unpack to {member.file_size:,} bytes")
                with archive.open(member) as pickled:
                    _check_pickle(pickled)


def _check_pickle(file: IO[bytes]) -> None:
    """Follow a pickle's stack with, in place of each value, how many values it stands for when it is gone through."""
    stack: list[int | None] = []  # None: a mark
    memo: dict[int, int] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(argument)] = stack[-1] or 0
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(argument)])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name not in ("PROTO", "FRAME", "STOP"):
            taken = _take(stack, opcode)
            if "mark" in {each.name for each in opcode.stack_after}:
                stack.append(None)
            elif opcode.stack_after:
                stack.append(1 + sum(taken) if name in _HASHED_WHOLE else 1)
        if stack and (stack[-1] or 0) > _MAX_UNFOLDED:
            raise ValueError("its pickle holds a tuple that stands for too many values")


def _take(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Take what an opcode takes from the stack."""
    taken: list[int] = []
    for each in reversed(opcode.stack_before):
        if each.name == "stackslice":
            continue
        if each.name == "mark":
            while (value := stack.pop()) is not None:
                taken.append(value)
        else:
            taken.append(stack.pop() or 0)
    return taken
