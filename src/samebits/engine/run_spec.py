"""The specification of a run, resolved once by the launcher and passed to every process."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.config.schema import RunConfig


@dataclass(frozen=True)
class RunSpec:
    """The specification of a run.

    The launcher reads the user's files once. Workers and restarted workers receive the result as JSON, so editing a
    YAML file while a run waits, trains or restarts changes nothing.
    """

    name: str  #: Name of the recipe, preset or file, for the header of the run.
    config: RunConfig  #: The resolved settings; `config.recipe` names the recipe.
    diff: dict[str, Any]  #: Nested plain values: the settings that differ from the preset.
    #: The run folder; None: rank 0 chooses a new one after the ranks have joined.
    folder: Path | None
    resume: str  #: "never", "auto", or the folder of a checkpoint.
    is_restart: bool  #: Whether this world replaces one that lost a process.
    started_at: float  #: Unix time at which the command started, in seconds.
    stop_after: int | None = (
        None  #: Number of steps after which training stops and is saved; None: at its end.
    )

    @property
    def run_folder(self) -> Path:
        """The run folder, which is known once the ranks have joined."""
        assert self.folder is not None
        return self.folder

    def to_json(self) -> str:
        """Encode the specification; `from_json` reads it."""
        return json.dumps(
            {**vars(self), "config": self.config.model_dump(mode="json")}, default=str
        )  # the folder

    @classmethod
    def from_json(cls, text: str, config_class: type[RunConfig]) -> "RunSpec":
        """Decode what `to_json` wrote. `config_class`: the `Config` of the recipe that `recipe_of` names."""
        plain = json.loads(text)
        # From JSON, since pydantic's strict mode takes a JSON array for a tuple, but refuses a Python list.
        config = config_class.model_validate_json(json.dumps(plain.pop("config")), strict=True)
        folder = plain.pop("folder")
        return cls(config=config, folder=None if folder is None else Path(folder), **plain)


def recipe_of(text: str) -> str:
    """Return the recipe in an encoded specification: a name, or the path of a recipe file."""
    return str(json.loads(text)["config"]["recipe"])
