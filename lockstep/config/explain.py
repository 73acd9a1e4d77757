"""From pydantic's list of faults to one text that a person can act on."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from lockstep.config import describe
from lockstep.config.describe import Setting
from lockstep.config.document import KeyPath
from lockstep.config.renamed import renamed_settings
from lockstep.errors import ConfigError

_WIDTH = 68  # of a fact: 80 columns less the fact's name


def explain(
    model: type[BaseModel],
    error: ValidationError,
    values: Mapping[str, Any],
    origins: Mapping[KeyPath, str],
    source: str | None = None,
) -> ConfigError:
    """The first fault in full, the others in one line each.

    Args:
        model: The settings' model.
        error: What pydantic found.
        values: The merged values that were checked.
        origins: Where each key was given.
        source: What `lockstep config` shows these settings for.
    """
    reader = _Reader(model, values, origins)
    # Wrong keys first: one of them often is why another key is missing.
    faults = sorted(
        error.errors(include_url=False), key=lambda fault: (fault["type"] != "extra_forbidden", is_missing(fault))
    )
    problems: dict[str, dict[str, Any]] = {}
    for fault in faults:
        what, slots = reader.problem(fault)
        problems.setdefault(what, slots)
    (what, slots), *others = problems.items()
    slots["also"] = "\n".join(wrapped(other) for other, _ in others[:5])
    return ConfigError(what, **slots, all=f"lockstep config {source}" if source else None)


def is_missing(fault: ErrorDetails) -> bool:
    """Whether a setting was not given; pydantic says "missing" also of an item of a list that is too short."""
    return fault["type"] == "missing" and all(isinstance(word, str) for word in fault["loc"])


class _Reader:
    """Explains one fault at a time."""

    def __init__(self, model: type[BaseModel], values: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> None:
        self.settings = {setting.path: setting for setting in describe.settings(model)}
        self.renamed = renamed_settings(model)
        self.values = values
        self.origins = origins

    def problem(self, fault: ErrorDetails) -> tuple[str, dict[str, Any]]:
        """One line that says what is wrong, and the slots about it."""
        place = tuple(str(word) for word in fault["loc"])
        if fault["type"] == "extra_forbidden":
            return self._unknown(place)
        path = self._known(place)
        if is_missing(fault):
            return self._missing(path)
        if fault["type"] == "missing":
            place = path  # its value is the list
        message = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else ""
        if path not in self.settings:  # of the settings as a whole
            return self._clash(path, message or fault["msg"])
        if message and self.settings[path].is_section:
            return self._clash(path, message)
        return self._wrong(path, place, fault["input"], message)

    def _known(self, place: KeyPath) -> KeyPath:
        """The setting that a place is in: pydantic's place may go on into a list or a union."""
        while place and place not in self.settings:
            place = place[:-1]
        return place

    def _unknown(self, path: KeyPath) -> tuple[str, dict[str, Any]]:
        value = describe.at(self.values, path)
        for old, new in self.renamed.items():
            if old[: len(path)] == path and describe.at(self.values, old) is not PydanticUndefined:
                problem = f"{'.'.join(old)} was renamed to {'.'.join(new)}"
                return problem, {"given": self._origin(old), "fix": f"Use {'.'.join(new)}."}
        if "." in path[-1]:
            section, _, name = path[-1].rpartition(".")
            example = f"{section.replace('.', ': {')}: {{{name}: {describe.show(value)}}}" + "}" * section.count(".")
            return f"{path[-1]} is written with a dot", {
                "given": self._origin(path),
                "fix": f"in a file:  {example}\non the command line:  {path[-1]}={describe.show(value)}",
            }
        if not isinstance(value, Mapping):
            return f"{'.'.join(path)} is not a setting", {
                "given": self._origin(path),
                "nearest": self._nearest(path, sections=False),
            }
        # A whole section: perhaps its name is wrong, perhaps where it stands.
        inside = next(iter(value), None)
        near = self._nearest(path, sections=True)
        if not near and inside is not None:
            near = self._nearest((*path, inside), sections=False)
        return f"{'.'.join(path)} is not a section of the settings", {"given": self._origin(path), "nearest": near}

    def _missing(self, path: KeyPath) -> tuple[str, dict[str, Any]]:
        setting = self.settings[path]
        return f"{setting.key} is missing", {
            "needs": wrapped(f"{setting.type}: {setting.meaning}"),
            "fix": f"add {setting.key}=VALUE to the command, or set it in a YAML file",
        }

    def _clash(self, section: KeyPath, message: str) -> tuple[str, dict[str, Any]]:
        """Settings of one section that don't fit together; the message names them."""
        words = set(re.findall(r"[a-z_0-9]+", message))
        named = [
            path
            for path, setting in self.settings.items()
            if path[:-1] == section and path[-1] in words and not setting.is_section
        ]
        given = []
        for path in named:
            origin = self._origin(path) or "(default)"
            value = f"{'.'.join(path)}={describe.show(describe.at(self.values, path))}"
            is_told = origin.replace(" ", "").endswith(value.replace(" ", ""))
            given.append(origin if is_told else f"{origin}  {value.replace('=', ': ', 1)}")
        return f"{'.'.join(section)}: {message}" if section else message, {"given": "\n".join(given)}

    def _wrong(self, path: KeyPath, place: KeyPath, value: Any, message: str) -> tuple[str, dict[str, Any]]:
        setting = self.settings[path]
        inside = "".join(f"[{word}]" for word in place[len(path) :] if word.isdecimal())
        allowed = message.removeprefix("must be ") or setting.type
        if setting.is_section:
            keys = [other[-1] for other in self.settings if other[:-1] == path]
            allowed = wrapped(f"a section with {', '.join(keys)}")
        return f"{setting.key}{inside} can't be {_quoted(value)}", {
            "given": self._origin(path),
            "allowed": allowed,
            "meaning": wrapped(setting.meaning),
        }

    def _origin(self, path: KeyPath) -> str | None:
        """Where a key was given, else the first key in it."""
        inside = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        return self.origins.get(path) or next(inside, None)

    def _nearest(self, path: KeyPath, *, sections: bool) -> str | None:
        """The setting that was perhaps meant, with its type, value and meaning."""
        candidates = [setting for setting in self.settings.values() if setting.is_section == sections]
        setting = _closest(path, candidates)
        if setting is None:
            return None
        if setting.is_section:
            return wrapped(f"{setting.key} (section): {setting.meaning}")
        value = describe.at(self.values, setting.path)
        now = "" if value is PydanticUndefined else f", now {describe.show(value)}"
        return wrapped(f"{setting.key} ({setting.type}{now}): {setting.meaning}")


def _closest(path: KeyPath, candidates: Sequence[Setting]) -> Setting | None:
    """The candidate of the same last word, else of the most similar key, else of the most similar last word."""
    same = [setting for setting in candidates if setting.path[-1] == path[-1]]
    if same:
        return max(same, key=lambda setting: _alike(".".join(path), setting.key))
    for cutoff, key in ((0.7, ".".join(path)), (0.6, path[-1])):
        names = {(setting.key if cutoff == 0.7 else setting.path[-1]): setting for setting in reversed(candidates)}
        near = difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
        if near:
            return names[near[0]]
    return None


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _quoted(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else describe.show(value)
    return text if len(text) <= 40 else text[:39] + "…"


def wrapped(text: str) -> str:
    """A fact's text in lines that leave the whole within 80 columns."""
    return "\n".join(textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))
