"""Settings that contradict a run's statement. Loads no torch: `samebits compare` only reads."""

import json
from pathlib import Path
from typing import Any

from samebits.errors import CheckpointError, ConfigError
from samebits.provenance.run_files import RunFiles


def altered_settings(files: RunFiles, now: dict[str, Any] | None = None) -> list[str]:
    """Return a line such as "config.yaml: seed is 1, recorded 0" for each setting that is not the statement's.

    Args:
        now: The settings that determine the result, as the recipe resolves them, by dotted name; None: those in
            `config.yaml`, which has all of them, so that no recipe is imported.
    """
    recorded = files.record.settings
    if now is None:
        try:
            values = files.settings
        except ConfigError as error:
            return [f"config.yaml: {error.what}"]
        now = {name: values[name] for name in recorded if name in values}
        now["recipe"] = Path(str(values.get("recipe"))).name
    found = json.loads(json.dumps(now, default=str))  # lists for tuples, as in the statement
    return [
        f"config.yaml: {name} is {found.get(name)}, recorded {recorded.get(name)}"
        for name in sorted(recorded.keys() | found.keys())
        if found.get(name) != recorded.get(name)
    ]


def altered_in(run: Path) -> list[str]:
    """Compare `config.yaml` with the statement, as `altered_settings` does; nothing if there is no statement."""
    files = RunFiles(run)
    try:
        return altered_settings(files) if files.has_statement else []
    except CheckpointError as error:
        return [error.line]
