"""What a person asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.schema import RunConfig


@dataclass(frozen=True)
class RunSpec:
    """What a person asked for.

    Attributes:
        name: What they called the recipe, preset or file.
        config: The resolved settings.
        diff: What differs from the preset.
        folder: The run folder.
        resume: "never", "auto", or a checkpoint's folder.
        is_restart: Whether the same request was under way before, and its world was lost.
        started_at: Unix time at which the command began, seconds.
    """

    name: str
    config: RunConfig
    diff: dict[str, Any]
    folder: Path
    resume: str
    is_restart: bool
    started_at: float
