"""Cache of the indexes of tar shards: one small file for each shard, made once on each machine.

An index counts only for the size and modification time that its shard had. The user may delete the folder at any time.
"""

import contextlib
import hashlib
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from samebits.config.plain_file import read_plain
from samebits.data.sources.local_files import Stamp
from samebits.data.sources.tar_index import ShardIndex, build_index
from samebits.errors import DataError
from samebits.scratch import check_own_folder, locked, partial_path, sweep_partials

LOGGER = logging.getLogger("samebits")

_VERSION = "1"
_MAX_INDEX_BYTES = 1 << 30
_DIGEST_BYTES = 16


class IndexCache:
    """A folder of indexes, used by any number of processes of one user.

    Args:
        folder: The folder, made if missing; None: `samebits/tar-index` in `$XDG_CACHE_HOME` (`~/.cache`). If that one
            cannot be used, each process makes the indexes for itself.

    Raises:
        DataError: The folder that the user gave cannot be used, or other users can write to it.
    """

    def __init__(self, folder: Path | None) -> None:
        home = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification: a relative path here is to be ignored.
        base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
        self._folder: Path | None = (folder or base / "samebits" / "tar-index").expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_own_folder(self._folder)
            sweep_partials(self._folder)
        except OSError as error:
            if folder is not None:
                raise DataError(
                    f"the folder {folder} can't be used for indexes: {error.strerror or error}",
                    fix="Set index_dir to a folder of your own.",
                ) from error
            LOGGER.warning("indexes of tar shards are not kept: %s: %s", self._folder, error.strerror or error)
            self._folder = None

    def index(self, path: str) -> ShardIndex:
        """Return the index of a shard, from the folder or made now. Of several processes, one makes it.

        Raises:
            DataError: See `build_index`.
        """
        if self._folder is None:
            return build_index(path)
        name = hashlib.blake2b(os.fsencode(os.path.abspath(path)), digest_size=16).hexdigest()
        file = self._folder / f"{name}.safetensors"
        found = _load(file, path)
        if found is not None:
            return found
        with locked(self._folder / "lock"):
            # Looked for again under the lock: another process may have made it meanwhile.
            found = _load(file, path)
            if found is None:
                found = build_index(path)
                _save(file, path, found)
        return found


def _description(path: str, stamp: Stamp) -> dict[str, Any]:
    return {"version": _VERSION, "path": os.path.abspath(path), **asdict(stamp)}


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _save(file: Path, path: str, index: ShardIndex) -> None:
    arrays = {name: value for name, value in vars(index).items() if isinstance(value, np.ndarray)}
    about = {**_description(path, index.stamp), "extensions": index.extensions}
    content = safetensors.numpy.save(arrays, {"index": json.dumps(about)})
    partial = partial_path(file)
    try:
        with partial.open("xb") as stream:
            # The digest replaces an fsync: an index that a crash has damaged is made again.
            stream.write(content + _digest(content))
        partial.replace(file)
    except OSError as error:
        LOGGER.warning("the index of %s is not kept: %s", path, error.strerror or error)
        with contextlib.suppress(OSError):
            partial.unlink()


def _load(file: Path, path: str) -> ShardIndex | None:
    """Return the stored index of a shard; None if there is none for its present size and modification time."""
    try:
        content, shard = read_plain(file, _MAX_INDEX_BYTES), os.stat(path)
    except OSError:
        return None
    content, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if _digest(content) != digest:
        return None  # the machine crashed while the file was written
    # The metadata is in the header, which safetensors' reader for NumPy leaves out.
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"]["index"])
    extensions, stamp = tuple(about.pop("extensions")), Stamp(shard.st_size, shard.st_mtime_ns)
    if about != _description(path, stamp):
        return None
    return ShardIndex(stamp=stamp, extensions=extensions, **safetensors.numpy.load(content))
