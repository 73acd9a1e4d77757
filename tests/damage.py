"""Ways in which a file of a run folder can be damaged, for all readers of such folders."""

import os
from collections.abc import Callable
from pathlib import Path


def _content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes() if path.exists() else b"{}"))


def _other(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(missing_ok=True), make(path))


DAMAGE = {
    "cut": _content(lambda content: content[: len(content) // 2]),
    "empty": _content(lambda content: b""),
    "binary": _content(lambda content: bytes(range(256)) * 4),
    "not UTF-8": _content(lambda content: content.replace(b"e", b"\xff")),
    "a list": _content(lambda content: b"[1, 2, 3]\n"),
    "a number": _content(lambda content: b"7\n"),
    "deep": _content(lambda content: b"[" * 100_000),
    "other values": _content(lambda content: content.replace(b"0", b"null").replace(b'"', b"")),
    "other types": _content(lambda content: b'{"worlds": 3, "metrics": [], "best": 1, "seconds": {"all": "x"}}\n'),
    "huge numbers": _content(lambda content: b'{"kind": "train", "step": 1e400, "steps": ' + b"9" * 4000 + b"}\n"),
    "missing": _other(lambda path: None),
    "a folder": _other(lambda path: path.mkdir()),
    "a pipe": _other(os.mkfifo),
    "endless": _other(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _other(lambda path: path.symlink_to(path.name)),
    "of holes": lambda path: (path.touch(), os.truncate(path, 30 << 30)),
}  # fmt: skip
