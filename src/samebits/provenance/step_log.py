"""The record of a run's steps: `steps.bin`, 72 bytes per step, linked by a hash chain.

    header    16 bytes of format name, 8 of the first step's number, 32 of the link before it
    record    step, loss, gradient norm, learning rate, digests of the sample ids and of the samples' values, outcome

    link 0    = SHA-256(format name)
    link n+1  = SHA-256(link n + record of step n)

Each value follows from settings, data and code alone, so the last link is equal at any world size and
after any interruption. The link of a position is part of its checkpoint: a resumed run continues the chain, and
notices a file that does not belong to it.
"""

import hashlib
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from samebits.data.keyed import IntArray
from samebits.errors import CheckpointError, cannot_read, cannot_write
from samebits.plain_file import read_plain
from samebits.storage.run_folder import write_atomically

FILE_NAME = "steps.bin"
# outcomes of a step
APPLIED = 0
SKIPPED = 1
OVERFLOW = 2
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)
_FORMAT = b"samebits steps 1"
# Little-endian on every machine, since the chain is compared between them.
_HEADER = struct.Struct("<16sQ32s")
_RECORD = struct.Struct("<Qddd16s16sQ")
_MAX_BYTES = 512 * 1024**2  # 7 million steps
_MAX_STEP = 1 << 53
FIRST_LINK = hashlib.sha256(_FORMAT).digest()


@dataclass(frozen=True)
class StepRecord:
    """The record of one step."""

    step: int  #: Number of the step, from 0.
    loss: float  #: Mean over the step's samples.
    norm: float  #: 2-norm of the gradient, before clipping.
    lr: float  #: Learning rate.
    samples: bytes  #: 16 bytes: digest of the step's sample ids, in order.
    content: bytes = (
        NO_DIGEST  #: 16 bytes: digest of the samples' values; zeros unless `record.content` is set.
    )
    outcome: int = (
        APPLIED  #: APPLIED; SKIPPED because loss or gradient was not finite; or OVERFLOW of fp16.
    )

    def to_bytes(self) -> bytes:
        """Encode the record in 72 bytes."""
        # The sign and payload of a NaN depend on the processor.
        loss, norm = (math.nan if math.isnan(value) else value for value in (self.loss, self.norm))
        return _RECORD.pack(
            self.step, loss, norm, self.lr, self.samples, self.content, self.outcome
        )


def extend(link: bytes, record: bytes) -> bytes:
    """Return the link (32 bytes) that follows a link (32 bytes) and an encoded record."""
    return hashlib.sha256(link + record).digest()


def digest_of_samples(indices: IntArray) -> bytes:
    """Return the digest of a step's sample ids, (N,), in the order of its micro-batches."""
    # One byte order and width everywhere: an index array of numpy has those of its machine.
    return hashlib.sha256(indices.astype("<i8", copy=False).tobytes()).digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class StepLog:
    """The content of a `steps.bin`. Records are decoded when they are used."""

    body: bytes = b""  #: The encoded records, with consecutive numbers.
    start_link: bytes = FIRST_LINK  #: The link before the first record, 32 bytes.
    first_step: int = 0  #: Number of the first record; above 0 if earlier records are lost.

    def __len__(self) -> int:
        return len(self.body) // _RECORD.size

    @property
    def stop(self) -> int:
        """The step after the last record."""
        return self.first_step + len(self)

    @property
    def is_whole(self) -> bool:
        """Whether the chain starts at the run's first step."""
        return self.first_step == 0 and self.start_link == FIRST_LINK

    def head(self, step: int) -> "StepLog":
        """Return the records before a step."""
        return StepLog(
            self.body[: max(0, step - self.first_step) * _RECORD.size],
            self.start_link,
            self.first_step,
        )

    def link(self) -> bytes:
        """Return the link (32 bytes) after the last record."""
        link = self.start_link
        for start in range(0, len(self.body), _RECORD.size):
            link = extend(link, self.body[start : start + _RECORD.size])
        return link

    def skipped(self) -> list[int]:
        """Return the numbers of the steps that were skipped because loss or gradient was not finite."""
        columns = np.frombuffer(self.body, dtype="<u8").reshape(len(self), _RECORD.size // 8)
        return [int(step) for step in columns[columns[:, -1] == SKIPPED, 0]]

    def get(self, step: int) -> StepRecord | None:
        """Return the record of a step, if there is one."""
        if not self.first_step <= step < self.stop:
            return None
        return StepRecord(*_RECORD.unpack_from(self.body, (step - self.first_step) * _RECORD.size))


def read_steps(path: Path) -> StepLog:
    """Read a `steps.bin`. A last record that a crash cut off is ignored.

    Raises:
        CheckpointError: The file is missing, or is not a record of steps.
    """
    fix = "Restore the file, or verify the run without it: samebits verify RUN --from-scratch."
    try:
        content = read_plain(path, _MAX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", fix=fix) from None
    except OSError as error:
        raise cannot_read(CheckpointError, path, error, fix) from None
    name, first, link = _HEADER.unpack_from(content.ljust(_HEADER.size, b"\0"))
    if name != _FORMAT or len(content) < _HEADER.size:
        raise CheckpointError(f"{path} is not a record of steps of this version", fix=fix)
    count = (len(content) - _HEADER.size) // _RECORD.size
    body = content[_HEADER.size : _HEADER.size + count * _RECORD.size]
    numbers = np.frombuffer(body, dtype="<u8").reshape(count, _RECORD.size // 8)[:, 0]
    # Unsigned numbers would wrap around, so a first step beyond all runs is refused.
    wrong = np.flatnonzero(numbers != np.uint64(first) + np.arange(count, dtype=np.uint64))
    if first + count > _MAX_STEP:
        raise CheckpointError(f"{path} was altered: it starts at step {first:,}", fix=fix)
    if len(wrong):
        raise CheckpointError(
            f"{path} was altered: record {wrong[0]:,} has the number of step {numbers[wrong[0]]:,}",
            fix=fix,
        )
    return StepLog(body, link, first)


def write_steps(path: Path, log: StepLog) -> None:
    """Write a whole log, replacing the file. Raises CheckpointError if it cannot be written."""
    write_atomically(path, _HEADER.pack(_FORMAT, log.first_step, log.start_link) + log.body)


def flush_steps(path: Path) -> None:
    """Flush a `steps.bin` to the disk, if there is one. Raises CheckpointError if it cannot be flushed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # steps are not recorded
    try:
        # It flushes the file's content, whichever process has written it, also by a descriptor for reading.
        os.fsync(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        os.close(descriptor)


def copy_steps(source: Path, target: Path, step: int, link: bytes) -> bool:
    """Copy the records before a step from another run's folder, so that a run resumed from there has a whole chain.

    They are copied, and True is returned, only if they lead to the link.

    Args:
        source, target: The other run's `steps.bin`, and the file to write.
        step, link: The step that the run resumes at, and the link before it, 32 bytes.

    Raises:
        CheckpointError: The target cannot be written.
    """
    try:
        log = read_steps(source).head(step)
    except CheckpointError:
        return False
    if log.stop != step or log.link() != link:
        return False
    write_steps(target, log)
    return True


class StepWriter:
    """Appends records to `steps.bin`.

    Each record is passed to the operating system at once, so a killed process loses none.

    Args:
        step: Number of the next step. Records from there on will be repeated, and are removed.
        link: The link before that step, 32 bytes. If the file leads to another one, it belongs to another run or was
            altered, and a new file starts here.

    Raises:
        CheckpointError: The file cannot be written.
    """

    def __init__(self, path: Path, step: int, link: bytes) -> None:
        self._path, self.link = path, link  #: The link before the next step, 32 bytes.
        try:
            log = read_steps(path)
        except CheckpointError:
            log = StepLog()
        kept = log.head(step)
        is_continued = kept.stop == step and kept.link() == link
        write_steps(path, kept if is_continued else StepLog(b"", link, step))
        #: Whether all earlier steps are in the file.
        self.is_continued = is_continued and kept.is_whole
        self._file: BinaryIO | None = None

    def append(self, record: StepRecord) -> None:
        """Append the next step's record. Raises CheckpointError if it cannot be written."""
        content = record.to_bytes()
        self.link = extend(self.link, content)
        try:
            if self._file is None:
                # No link: a stranger's run folder must not lead to another file.
                flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = open(os.open(self._path, flags), "ab", buffering=0)  # noqa: SIM115 - closed by `close`
            self._file.write(content)
        except OSError as error:
            raise cannot_write(self._path, error) from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
