"""What is written of a run: the record of its steps, `steps.bin`, and its statement, `provenance.json`.

`steps.bin` has 72 bytes per step, linked by a hash chain:

    header    16 bytes of format name, 8 of the first step's number, 32 of the link before it
    record    step, loss, gradient norm, learning rate, digests of the sample ids and of the samples' values, outcome

    link 0    = SHA-256(format name)
    link n+1  = SHA-256(link n + record of step n)

Each value follows from settings, data and code alone, so the last link is equal at any world size and
after any interruption. The link of a position is part of its checkpoint: a resumed run continues the chain, and
notices a file that does not belong to it.

`provenance.json` states how a model was made, as an in-toto statement with a SLSA provenance predicate:

    subject       weights.safetensors, steps.bin, checkpoints          each with its SHA-256
    predicate     settings, code, data, versions, links of the chain   what determined the bits
    root          SHA-256 over the record                              one number that stands for all of it

The root is a commitment: who publishes it cannot change a step, a metric, a checkpoint or a setting afterwards without
changing the root. It is no proof; `samebits verify` replays steps for that. Formats:
https://in-toto.io/Statement/v1 and https://slsa.dev/spec/v1.0/provenance. Loads no torch and no numpy.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from pydantic import Field, TypeAdapter

from samebits.errors import CheckpointError, cannot_read, cannot_write
from samebits.plain_file import (
    MAX_MEMORY_BYTES,
    json_text,
    open_plain,
    parse_json,
    read_plain,
)
from samebits.storage.run_folder import write_atomically
from samebits.version import __version__

if TYPE_CHECKING:
    from samebits.data.keyed import IntArray

STEPS_FILE = "steps.bin"
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
_MAX_STEPS_BYTES = 512 * 1024**2  # 7 million steps
_MAX_STEP = 1 << 53
FIRST_LINK = hashlib.sha256(_FORMAT).digest()


_FIX = "Restore the file, or verify the run without it: samebits verify RUN --from-scratch."


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

    @property
    def has_content(self) -> bool:
        """Whether a record has a digest of its samples' values. Not all do: record.content may change at a resume."""
        return any(content != NO_DIGEST for *_, content, _ in _RECORD.iter_unpack(self.body))

    def head(self, step: int) -> StepLog:
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
        records = _RECORD.iter_unpack(self.body)
        return [step for step, *_, outcome in records if outcome == SKIPPED]

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
    try:
        content = read_plain(path, _MAX_STEPS_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", fix=_FIX) from None
    except OSError as error:
        raise cannot_read(CheckpointError, path, error, _FIX) from None
    name, first, link = _HEADER.unpack_from(content.ljust(_HEADER.size, b"\0"))
    if name != _FORMAT or len(content) < _HEADER.size:
        raise CheckpointError(f"{path} is not a record of steps of this version", fix=_FIX)
    count = (len(content) - _HEADER.size) // _RECORD.size
    body = content[_HEADER.size : _HEADER.size + count * _RECORD.size]
    if first + count > _MAX_STEP:
        raise CheckpointError(f"{path} was altered: it starts at step {first:,}", fix=_FIX)
    for index, (number, *_) in enumerate(_RECORD.iter_unpack(body)):
        if number != first + index:
            raise CheckpointError(
                f"{path} was altered: record {index:,} has the number of step {number:,}", fix=_FIX
            )
    return StepLog(body, link, first)


def write_steps(path: Path, log: StepLog) -> None:
    """Write a whole log, replacing the file. Raises CheckpointError if it cannot be written."""
    write_atomically(path, _HEADER.pack(_FORMAT, log.first_step, log.start_link) + log.body)


def flush_steps(path: Path) -> None:
    """Flush a `steps.bin` to the disk, if there is one. Raises CheckpointError if it cannot be flushed."""
    try:
        opened = open_plain(path, os.O_NOFOLLOW)
    except OSError:
        return  # steps are not recorded
    with opened as file:
        try:
            # It flushes the file's content, whichever process has written it, also by a descriptor for reading.
            os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(path, error) from None


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
                # No link: a stranger's run folder must not lead to another file. Not made again: one that is gone
                # would continue without its header and its steps.
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


# The statement of a complete run.


STATEMENT_FILE = "provenance.json"
BEST_FILE = "checkpoints/best.json"  # the best validation of the evaluations that the statement has
BUILD_TYPE = "urn:samebits:training:1"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
EVAL_BATCH = "eval_batch"
_MAX_STATEMENT_BYTES = 64 * 1024 * 1024


def sha256_of_json(value: object) -> str:
    """Return the SHA-256 of a JSON value: keys sorted, no spaces, floats in their shortest form."""
    return hashlib.sha256(json_text(value, sort_keys=True, separators=(",", ":"))).hexdigest()


@dataclass(frozen=True)
class Evaluation:
    """Step and metrics of one evaluation; a metric that is not finite is None, as in `metrics.jsonl`."""

    step: int
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any]) -> Evaluation:
        """Make an evaluation of numbers, or from JSON, where a whole number may have no decimal point."""
        return cls(step, {name: _as_float(value) for name, value in metrics.items()})


def add_evaluation(before: str, evaluation: Evaluation) -> str:
    """Return the hash of a run's evaluations with one more, 64 hex digits; `before` is "" for the first."""
    return sha256_of_json([before, asdict(evaluation)])


@dataclass(frozen=True)
class RunStatement:
    """The record of a run: what its root stands for."""

    settings: dict[str, Any]  #: The settings that determine the result, by dotted name.
    #: The last link of the step record, 64 hex digits; empty if steps were not recorded.
    chain: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    num_steps: Annotated[int, Field(ge=0, lt=1 << 53)]  #: Number of steps.
    code: list[dict[str, str]]  #: The distinct code of the run's worlds: digests by name.
    #: The distinct environments of the run's worlds: versions and hardware by name.
    environment: list[dict[str, str]]
    data: dict[str, str]  #: Digests of a few samples and of the files' sizes, by name.
    dataset_info_sha256: str  #: Digest of what the recipe read from its data.
    evaluations: list[Evaluation]  #: The evaluations, by step.
    #: Name -> file -> SHA-256, of the checkpoints that were kept.
    checkpoints: dict[Annotated[str, Field(pattern="^step-[0-9]{6,15}$")], dict[str, str]]
    weights_sha256: str  #: Hash of the final weights.

    @property
    def root(self) -> str:
        """The SHA-256 of the record, 64 hex digits."""
        return sha256_of_json(asdict(self))


def distinct(values: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return each different value once, in order."""
    found: list[dict[str, str]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def environments(worlds: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the distinct environments of a run's worlds, with the `eval_batch` of each one if it has changed."""
    parts = [(each.get("environment", {}), each.get(EVAL_BATCH)) for each in worlds]
    has_changed = any(part[1] != parts[0][1] for part in parts)
    return distinct(
        {**found, EVAL_BATCH: str(size)} if has_changed and size is not None else dict(found)
        for found, size in parts
        if isinstance(found, dict)
    )


def make_statement(
    record: RunStatement, files: Mapping[str, str], run: str, started_at: float, finished_at: float
) -> dict[str, Any]:
    """Return the statement; `files`: path in the run folder -> SHA-256 of its content. Times: Unix, seconds."""
    from samebits.provenance.fingerprint import (
        COMPUTING,  # late: it loads torch, which readers do without
    )

    packages = record.environment[-1] if record.environment else {}
    internal = asdict(record)
    settings = internal.pop("settings")
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in files.items()],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": settings,
                "internalParameters": internal,
                "resolvedDependencies": [
                    *_dependencies(record)[0],
                    *(
                        {"uri": _uri(name, value)}
                        for name, value in packages.items()
                        if name in COMPUTING
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:samebits", "version": {"samebits": __version__}},
                "metadata": {
                    "invocationId": run,
                    "startedOn": _time(started_at),
                    "finishedOn": _time(finished_at),
                },
                "byproducts": [{"name": "root", "digest": {"sha256": record.root}}],
            },
        },
    }


def read_statement_and_files(path: Path) -> tuple[RunStatement, dict[str, str]]:
    """Read the record in a `provenance.json`, and the SHA-256 of the files that it names, by path in the run folder.

    Raises:
        CheckpointError: The file is missing, is not a statement of Samebits, or its parts contradict each other.
    """
    try:
        statement = parse_json(read_plain(path, _MAX_STATEMENT_BYTES), MAX_MEMORY_BYTES)
        definition, details = (
            statement["predicate"][name] for name in ("buildDefinition", "runDetails")
        )
        plain = {"settings": definition["externalParameters"], **definition["internalParameters"]}
        if statement["predicateType"] != PREDICATE_TYPE or set(plain) != {
            each.name for each in fields(RunStatement)
        }:
            raise ValueError("it has other entries")
        record = TypeAdapter(RunStatement).validate_python(plain)
        files = {str(each["name"]): str(each["digest"]["sha256"]) for each in statement["subject"]}
        root = details["byproducts"][0]["digest"]["sha256"]
        own_root = record.root
        own_dependencies, own_packages = _dependencies(record)
        packages = [each["uri"] for each in definition["resolvedDependencies"] if "uri" in each]
        dependencies = [each for each in definition["resolvedDependencies"] if "uri" not in each]
        is_consistent = dependencies == own_dependencies and set(packages) <= own_packages
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist", cause="The run is not complete.", fix=_FIX
        ) from None
    except OSError as error:
        raise cannot_read(CheckpointError, path, error, _FIX) from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        cause = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{path} is not a statement of this version of Samebits", cause=cause, fix=_FIX
        ) from None
    if root != own_root:
        raise CheckpointError(
            f"{path} was altered: its root is not that of its record",
            given=f"root {root}",
            allowed=f"root {own_root}",
            fix=_FIX,
        )
    if not is_consistent:
        raise CheckpointError(
            f"{path} was altered: its subjects or dependencies are not those of its record",
            fix=_FIX,
        )
    return record, files


def _as_float(value: Any) -> Any:
    """Return the form that the root depends on."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        return float(value) if isinstance(value, int) else value
    except OverflowError:  # no metric: it was altered
        return value


def _dependencies(record: RunStatement) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the digests of code and data, as dependencies, and the URIs of all packages."""
    code = {name: value for each in record.code for name, value in each.items()}
    parts = {**code, **{f"data: {name}": value for name, value in record.data.items()}}
    packages = record.environment[-1] if record.environment else {}
    digests: list[dict[str, Any]] = [
        {"name": name, "digest": {"sha256First16": value}} for name, value in parts.items()
    ]
    return digests, {_uri(name, version) for name, version in packages.items()}


def _uri(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
