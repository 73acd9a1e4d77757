"""Versions and settings that all launchers of a run must share. Nothing here imports torch."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from samebits.config.given import flat
from samebits.config.marks import Mark
from samebits.config.schema import marks_of
from samebits.version import __version__


def shared_settings(settings: Mapping[str, Any], recipe: str) -> dict[str, str]:
    """Collect versions, recipe and settings, by name."""
    found = {"samebits": __version__, "torch": version("torch")}
    if recipe.endswith(".py"):
        with suppress(OSError):  # loading the recipe reports a file that cannot be read
            # The content and not the path: checkouts of two machines may lie in different folders.
            found["recipe file, SHA-256"] = hashlib.sha256(Path(recipe).expanduser().read_bytes()).hexdigest()[:16]
    values = flat(settings)
    return found | {
        f"setting {name}": json.dumps(values[name]) for name in values if Mark.MACHINE not in marks_of(name)
    }
