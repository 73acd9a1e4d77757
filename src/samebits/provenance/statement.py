"""`provenance.json`: how a model was made, as an in-toto statement with a SLSA provenance predicate.

    subject       weights.safetensors, steps.bin, checkpoints          each with its SHA-256
    predicate     settings, code, data, versions, links of the chain   what determined the bits
    root          SHA-256 over the record                              one number that stands for all of it

The root is a commitment: who publishes it cannot change a step, a metric, a checkpoint or a setting afterwards without
changing the root. It is no proof; `samebits verify` replays steps for that.

Formats: https://in-toto.io/Statement/v1 and https://slsa.dev/spec/v1.0/provenance.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from samebits.errors import CheckpointError, cannot_read
from samebits.plain_file import MAX_MEMORY_BYTES, json_text, parse_json, read_plain
from samebits.version import __version__

FILE_NAME = "provenance.json"
BEST_FILE = "checkpoints/best.json"  # the best validation of the evaluations that the statement has
BUILD_TYPE = "urn:samebits:training:1"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
EVAL_BATCH = "eval_batch"
_MAX_BYTES = 64 * 1024 * 1024


def sha256_of_json(value: object) -> str:
    """Return the SHA-256 of a JSON value: keys sorted, no spaces, floats in their shortest form."""
    return hashlib.sha256(json_text(value, sort_keys=True, separators=(",", ":"))).hexdigest()


@dataclass(frozen=True)
class Evaluation:
    """Step and metrics of one evaluation; a metric that is not finite is None, as in `metrics.jsonl`."""

    step: int
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any]) -> "Evaluation":
        """Make an evaluation from JSON, where a whole number may have no decimal point: the root depends on it."""
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
    fix = "Restore the file, or verify the run without it: samebits verify RUN --from-scratch."
    try:
        statement = parse_json(read_plain(path, _MAX_BYTES), MAX_MEMORY_BYTES)
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
            f"{path} does not exist", cause="The run is not complete.", fix=fix
        ) from None
    except OSError as error:
        raise cannot_read(CheckpointError, path, error, fix) from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        cause = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{path} is not a statement of this version of Samebits", cause=cause, fix=fix
        ) from None
    if root != own_root:
        raise CheckpointError(
            f"{path} was altered: its root is not that of its record",
            given=f"root {root}",
            allowed=f"root {own_root}",
            fix=fix,
        )
    if not is_consistent:
        raise CheckpointError(
            f"{path} was altered: its subjects or dependencies are not those of its record", fix=fix
        )
    return record, files


def _as_float(value: Any) -> Any:
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
