"""Writing of tar shards: a stream of samples becomes files with a sample at each index."""

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from samebits.data.images import MAX_FILE_BYTES
from samebits.data.sources.tar_shards import META, NAME
from samebits.errors import ConfigError, DataError
from samebits.scratch import partial_path, sweep_partials

_KEY = "__key__"


def write_tar_shards(
    samples: Iterable[Mapping[str, Any]],
    folder: str | PathLike[str],
    *,
    max_shard_bytes: int = 1 << 30,
) -> list[str]:
    """Write samples to tar shards that `TarShards` and WebDataset read. To be called once, by one process.

    The shards get their names when all are complete, so an interrupted call leaves none. Equal samples give equal
    files.

    Args:
        samples: Each is a dict of values by extension, such as `{"jpg": content, "cls": 3}`. Values: bytes as they are,
            str as UTF-8, int as digits, NumPy arrays and tensors (`npy`), other values as JSON. `__key__` is the name
            of the sample; if left out, its number.
        folder: Made if missing. It must have no .tar files.
        max_shard_bytes: Size in bytes from which the next shard starts.

    Returns:
        Paths of the shards, in order.

    Raises:
        ConfigError: The folder has shards already, or a sample cannot be written.
        DataError: There are no samples, or the disk is full.
    """
    target = Path(folder).expanduser()
    written: list[tuple[Path, Path]] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        _refuse_shards(target)
        sweep_partials(target)
        numbered = enumerate(samples)
        following = next(numbered, None)
        while following is not None:
            path = target / f"shard-{len(written):06d}.tar"
            written.append((partial_path(path), path))
            following = _write_shard(written[-1][0], following, numbered, max_shard_bytes)
        if not written:
            raise DataError(
                "the stream has no samples",
                fix="Pass an iterable of dicts such as {'jpg': content, 'cls': 3}.",
            )
        # Again: another process may have written shards meanwhile.
        _refuse_shards(target)
        for partial, path in written:
            partial.rename(path)
    except OSError as error:
        raise DataError(
            f"{target} can't be written: {error.strerror or error}",
            fix="Free disk space, or choose another folder.",
        ) from error
    finally:
        for partial, _ in written:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    return [str(path) for _, path in written]


def _refuse_shards(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("*.tar"))
    if names:
        raise ConfigError(
            f"{folder} has tar files already",
            given=", ".join(names[:4]),
            fix="Choose an empty folder, or a new one.",
        )


_Numbered = tuple[int, Mapping[str, Any]]


def _write_shard(
    path: Path, first: _Numbered, others: Iterator[_Numbered], max_bytes: int
) -> _Numbered | None:
    """Write a shard of samples, and return the first sample of the next shard."""
    keys: set[str] = set()
    following: _Numbered | None = first
    with path.open("xb") as file:
        with tarfile.open(
            fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8"
        ) as archive:
            while following is not None and (not keys or file.tell() < max_bytes):
                _add(archive, *following, keys)
                following = next(others, None)
        file.flush()
        # Before the shards get their names: after a crash, none of these may belong to lost content.
        os.fsync(file.fileno())
    return following


def _add(archive: tarfile.TarFile, number: int, sample: Mapping[str, Any], keys: set[str]) -> None:
    values = {
        name: value for name, value in sample.items() if not META.fullmatch(name)
    }  # such as __url__
    key = str(sample.get(_KEY, f"{number:09d}"))
    if not values or key in keys:
        problem = f"has the key {key}, as an earlier one" if values else "has no values"
        raise ConfigError(
            f"sample {number} {problem}",
            fix="Pass dicts of values by extension, with unique __key__.",
        )
    keys.add(key)
    for extension, value in values.items():
        name = f"{key}.{extension}"
        match = NAME.fullmatch(name)
        is_inside = not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))
        if match is None or match[1] != key or extension != extension.lower() or not is_inside:
            raise ConfigError(
                f"sample {number} cannot be named {name}",
                allowed="a __key__ without dots, and extensions in lower case",
                fix="Replace dots in __key__, such as by underscores.",
            )
        content = _encode(number, extension, value)
        # Its defaults for owner and time are constant, so equal samples give equal files.
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        entry.mode = 0o644
        archive.addfile(entry, io.BytesIO(content))


def _encode(number: int, extension: str, value: Any) -> bytes:
    where = f"sample {number}, {extension}"
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().numpy()
    try:
        if isinstance(value, bytes):
            content = value
        elif isinstance(value, str):
            content = value.encode()
        elif isinstance(value, int | np.integer):
            content = b"%d" % value
        elif isinstance(value, np.ndarray):
            file = io.BytesIO()
            np.save(file, value, allow_pickle=False)
            content = file.getvalue()
        else:
            content = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "a value cannot be written to a shard without pickle",
            given=f"a {type(value).__name__}",
            where=where,
            cause=str(error),
            allowed="bytes, str, int, NumPy arrays, tensors and JSON values",
            fix="Convert it to one of these.",
        ) from error
    if isinstance(value, np.ndarray) and extension.rpartition(".")[2] != "npy":
        raise ConfigError(
            "an array is written as .npy",
            where=where,
            fix=f"Name it {extension}.npy, or encode it to bytes.",
        )
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"a value has {len(content):,} bytes",
            where=where,
            allowed=f"up to {MAX_FILE_BYTES:,}",
            fix="Split it.",
        )
    return content
