"""Settings that have been renamed.

A former name given by the user raises an error with the present name. The `config.yaml` in a run folder of an earlier
version is not changed: its keys are renamed when it is read, so that the run still resumes and evaluates.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from samebits.config.document import KeyPath
from samebits.config.schema import RENAMED, RunConfig


def renamed_settings(model: type[BaseModel]) -> dict[KeyPath, KeyPath]:
    """Return the present path of each former path, for the shared settings and the recipe's own."""
    shared = RENAMED if issubclass(model, RunConfig) else {}
    table = {**shared, **getattr(model, "RENAMED", {})}
    return {tuple(old.split(".")): tuple(new.split(".")) for old, new in table.items()}


def with_present_names(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with each former name replaced by the present one.

    A value under the present name wins over one under a former name.
    """
    changed = deepcopy(dict(values))
    for old, new in renamed_settings(model).items():
        value = _take(changed, old)
        if value is not PydanticUndefined:
            _put(changed, new, value)
    return changed


def _take(values: dict[str, Any], path: KeyPath) -> Any:
    for key in path[:-1]:
        inner = values.get(key)
        if not isinstance(inner, dict):
            return PydanticUndefined
        values = inner
    return values.pop(path[-1], PydanticUndefined)


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):  # damaged: the check of the settings reports it
            return
        values = inner
    values.setdefault(path[-1], value)
