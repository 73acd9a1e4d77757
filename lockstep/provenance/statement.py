"""`provenance.json`: how a model was made, as an in-toto statement with a SLSA provenance predicate.

    subject       weights.safetensors, steps.bin, checkpoints          each with its SHA-256
    predicate     settings, code, data, versions, links of the chain   what determined the bits
    root          SHA-256 over the record                              one number that stands for all of it

The root is a commitment: who publishes it cannot change a step, a metric, a checkpoint or a setting afterwards without
changing the root. It is no proof; `lockstep verify` replays steps for that.

Formats: https://in-toto.io/Statement/v1 and https://slsa.dev/spec/v1.0/provenance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.config.plain_file import MAX_MEMORY_BYTES, parse_json, read_plain
from lockstep.config.schema import RunConfig
from lockstep.errors import CheckpointError
from lockstep.provenance.environment import COMPUTING
from lockstep.provenance.same_run import result_settings
from lockstep.version import __version__

FILE_NAME = "provenance.json"
BUILD_TYPE = "urn:lockstep:training:1"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
_MAX_BYTES = 64 * 1024 * 1024
_NAMES = {
    "settings", "chain", "num_steps", "code", "environment", "data", "dataset_info_sha256", "evaluations",
    "checkpoints", "weights_sha256",
}  # fmt: skip


def sha256_of_json(value: object) -> str:
    """Return the SHA-256 of a JSON value: keys sorted, no spaces, floats in their shortest form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make_record(
    config: RunConfig,
    chain: str,
    num_steps: int,
    worlds: Sequence[Mapping[str, Any]],
    data: Mapping[str, str],
    dataset_info_sha256: str,
    evaluations: Sequence[Mapping[str, Any]],
    checkpoints: Mapping[str, Mapping[str, str]],
    weights_sha256: str,
) -> dict[str, Any]:
    """Return the record of a run: what its root stands for.

    Args:
        config: The settings.
        chain: The last link of the step record; empty if steps were not recorded.
        num_steps: Number of steps.
        worlds: The run's worlds, each with its code and environment; sizes and first steps do not count, since they
            change no bit.
        data: Digests of samples, by name.
        dataset_info_sha256: Digest of what the recipe learned from its data.
        evaluations: Step and metrics of each evaluation.
        checkpoints: Name -> file -> SHA-256, of the checkpoints that were kept.
        weights_sha256: Hash of the final weights.
    """
    return {
        "settings": result_settings(config),
        "chain": chain,
        "num_steps": num_steps,
        "code": _distinct(world.get("code", {}) for world in worlds),
        "environment": _distinct(world.get("environment", {}) for world in worlds),
        "data": dict(data),
        "dataset_info_sha256": dataset_info_sha256,
        "evaluations": list(evaluations),
        "checkpoints": dict(checkpoints),
        "weights_sha256": weights_sha256,
    }


def _distinct(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def make_statement(
    record: Mapping[str, Any], files: Mapping[str, str], run: str, started_at: float, finished_at: float
) -> dict[str, Any]:
    """Return the statement.

    Args:
        record: See `make_record`.
        files: Path in the run folder -> SHA-256 of its content.
        run: Name of the run.
        started_at: Unix time, seconds.
        finished_at: Unix time, seconds.
    """
    packages = record["environment"][-1] if record["environment"] else {}
    code = {name: value for each in record["code"] for name, value in each.items()}
    parts = {**code, **{f"data: {name}": value for name, value in record["data"].items()}}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in files.items()],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": record["settings"],
                "internalParameters": {name: value for name, value in record.items() if name != "settings"},
                "resolvedDependencies": [
                    *({"name": name, "digest": {"sha256First16": value}} for name, value in parts.items()),
                    *({"uri": f"pkg:pypi/{name}@{value}"} for name, value in packages.items() if name in COMPUTING),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:lockstep", "version": {"lockstep": __version__}},
                "metadata": {"invocationId": run, "startedOn": _time(started_at), "finishedOn": _time(finished_at)},
                "byproducts": [{"name": "root", "digest": {"sha256": sha256_of_json(record)}}],
            },
        },
    }


def read_statement(path: Path) -> tuple[str, dict[str, Any]]:
    """Read the root and the record in a `provenance.json`.

    Raises:
        CheckpointError: The file is missing, is not a statement of Lockstep, or its root is not that of its record.
    """
    fix = "Restore the file, or verify the run without it: lockstep verify RUN --from-scratch."
    try:
        statement = parse_json(read_plain(path, _MAX_BYTES), MAX_MEMORY_BYTES)
        definition, details = (statement["predicate"][name] for name in ("buildDefinition", "runDetails"))
        record = {"settings": definition["externalParameters"], **definition["internalParameters"]}
        root = details["byproducts"][0]["digest"]["sha256"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", cause="The run is not complete.", fix=fix) from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}", fix=fix) from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise CheckpointError(f"{path} is not a statement of Lockstep", fix=fix) from None
    if statement.get("predicateType") != PREDICATE_TYPE or set(record) != _NAMES:
        raise CheckpointError(f"{path} is not a statement of this version of Lockstep", fix=fix)
    if root != sha256_of_json(record):
        raise CheckpointError(
            f"{path} was altered: its root is not that of its record",
            given=f"root {root}",
            allowed=f"root {sha256_of_json(record)}",
            fix=fix,
        )
    return root, record


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
