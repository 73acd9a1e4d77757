"""Settings that contradict a run's statement. Loads no torch: `samebits compare` only reads."""

import json
import os
from pathlib import Path
from typing import Any

from samebits.config.given import flat
from samebits.errors import CheckpointError, ConfigError
from samebits.provenance.same_run import settings_of
from samebits.provenance.statement import FILE_NAME, RunRecord, read_statement
from samebits.storage.run_folder import RunFolder


def altered_settings(run: Path, record: RunRecord, now: dict[str, Any] | None = None) -> list[str]:
    """Return a line such as "config.yaml: seed is 1, recorded 0" for each setting that is not the statement's.

    Args:
        now: The settings that determine the result, as the recipe resolves them, by dotted name; None: those in
            `config.yaml`, which has all of them, so that no recipe is imported.
    """
    if now is None:
        try:
            values = flat(settings_of(RunFolder(run)))
        except ConfigError as error:
            return [f"config.yaml: {error.what}"]
        now = {name: values[name] for name in record.settings if name in values}
        now["recipe"] = Path(str(values.get("recipe"))).name
    found = json.loads(json.dumps(now, default=str))  # lists for tuples, as in the statement
    return [
        f"config.yaml: {name} is {found.get(name)}, recorded {record.settings.get(name)}"
        for name in sorted(record.settings.keys() | found.keys())
        if found.get(name) != record.settings.get(name)
    ]


def altered_in(run: Path) -> list[str]:
    """Compare `config.yaml` with the statement, as `altered_settings` does; nothing if there is no statement."""
    if not os.path.lexists(run / FILE_NAME):
        return []
    try:
        return altered_settings(run, read_statement(run / FILE_NAME))
    except CheckpointError as error:
        return [error.line]
