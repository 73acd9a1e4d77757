"""Turn pydantic's validation errors into one `ConfigError` that the user can act on."""

import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from samebits.config import describe
from samebits.config.describe import Setting
from samebits.config.document import KeyPath
from samebits.errors import ConfigError

_WIDTH = 68  # of a slot's text: 80 columns less the slot's name
# A validator's message may end in this and an imperative sentence, which becomes the slot `fix`.
FIX = "; fix: "

# Names that other tools give to a setting. Such a name, or one with a typing error in it, leads to the setting.
_ELSEWHERE = {
    "activation_checkpointing": "gradient_checkpointing",
    "batch_norm": "sync_bn sync_batchnorm",
    "checkpoint.every": "save_every",
    "data.root": "dataset",
    "epochs": "max_epochs num_epochs",
    "eval_batch": "val_batch_size",
    "eval_every": "val_every",
    "global_batch": "batch_size train_batch_size",
    "loss": "criterion",
    "micro_batch": "accumulate per_device_batch_size",
    "model.name": "arch backbone",
    "model.weights": "pretrained",
    "optim.betas": "beta1",
    "optim.clip_norm": "clip_grad grad_clip gradient_clip_val max_grad_norm",
    "optim.ema": "ema_decay",
    "optim.lr": "learning_rate",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler scheduler",
    "optim.warmup_epochs": "warmup",
    "optim.weight_decay": "decay wd",
    "precision": "amp dtype",
    "seed": "random_seed",
    "watch.nonfinite": "nonfinite",
}
_ALIASES = {alias: setting for setting, aliases in _ELSEWHERE.items() for alias in aliases.split()}


def explain(
    model: type[BaseModel],
    error: ValidationError,
    values: Mapping[str, Any],
    origins: Mapping[KeyPath, str],
    source: str | None = None,
) -> ConfigError:
    """Return the first problem in full, and the others in one line each; `origins`: where each key was given."""
    reader = _Reader(model, values, origins)
    # Unknown keys first: one of them often is why another key is missing.
    faults = sorted(
        error.errors(include_url=False), key=lambda fault: (fault["type"] != "extra_forbidden", is_missing(fault))
    )
    problems: dict[str, dict[str, Any]] = {}
    for fault in faults:
        what, slots = reader.problem(fault)
        problems.setdefault(what, slots)
    (what, slots), *others = problems.items()
    also = [wrapped(f"also: {other}") for other, _ in others[:5]]
    given = "\n".join(filter(None, [slots.get("given"), *also]))
    everything = f"For all settings: samebits config {source}" if source else None
    fix = "\n".join(filter(None, [slots.get("fix") or "Correct its name, or remove it.", everything]))
    return ConfigError(what, given=given, allowed=slots.get("allowed"), fix=fix)


def is_missing(fault: ErrorDetails) -> bool:
    """Return whether a setting was not given. Pydantic also reports "missing" for an item of a too short list."""
    return fault["type"] == "missing" and all(isinstance(key, str) for key in fault["loc"])


class _Reader:
    """Explains one of pydantic's errors at a time."""

    def __init__(self, model: type[BaseModel], values: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> None:
        self.settings = {setting.path: setting for setting in describe.settings(model)}
        self.defaults = describe.defaults(model)
        self.values = values
        self.origins = origins

    def problem(self, fault: ErrorDetails) -> tuple[str, dict[str, Any]]:
        """Return the problem in one line, and its slots."""
        location = tuple(str(key) for key in fault["loc"])
        if fault["type"] == "extra_forbidden":
            return self._unknown(location)
        path = location
        while path and path not in self.settings:  # pydantic may extend the location into a list or a union
            path = path[:-1]
        if is_missing(fault):
            setting = self.settings[path]
            return f"{setting.key} is missing", {
                "allowed": wrapped(f"{setting.type}: {setting.meaning}"),
                "fix": f"Add {setting.key}=VALUE to the command, or set it in a YAML file.",
            }
        if fault["type"] == "missing":
            location = path  # its value is the list
        message = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else ""
        if path not in self.settings:  # of the settings as a whole
            return self._clash(path, message or fault["msg"])
        if message and self.settings[path].is_section:
            return self._clash(path, message)
        return self._wrong(path, location, fault["input"], message)

    def _unknown(self, path: KeyPath) -> tuple[str, dict[str, Any]]:
        value = describe.at(self.values, path)
        if "." in path[-1]:
            section, _, name = path[-1].rpartition(".")
            example = f"{section.replace('.', ': {')}: {{{name}: {describe.show(value)}}}" + "}" * section.count(".")
            return f"{path[-1]} is written with a dot", {
                "given": self._origin(path),
                "fix": f"In a file:  {example}\nOn the command line:  {path[-1]}={describe.show(value)}",
            }
        if not isinstance(value, Mapping):
            return f"{'.'.join(path)} is not a setting", {
                "given": self._origin(path),
                "fix": self._use_nearest(path, sections=False),
            }
        # A whole section: its name may be wrong, or its position.
        inside = next(iter(value), None)
        near = self._use_nearest(path, sections=True)
        if not near and inside is not None:
            near = self._use_nearest((*path, inside), sections=False)
        return f"{'.'.join(path)} is not a section of the settings", {"given": self._origin(path), "fix": near}

    def _clash(self, section: KeyPath, message: str) -> tuple[str, dict[str, Any]]:
        """Explain settings that contradict each other. The message names them."""
        message, _, fix = message.partition(FIX)
        names = set(re.findall(r"[a-z_0-9]+", message))
        named = [
            path
            for path, setting in self.settings.items()
            if path[:-1] == section and path[-1] in names and not setting.is_section
        ]
        given = []
        for path in named:
            origin = self._origin(path) or "(default)"
            value = f"{'.'.join(path)}={describe.show(describe.at(self.values, path))}"
            has_value = origin.replace(" ", "").endswith(value.replace(" ", ""))
            given.append(origin if has_value else f"{origin}  {value.replace('=', ': ', 1)}")
        problem = f"{'.'.join(section)}: {message}" if section else message
        return problem, {"given": "\n".join(given), "fix": wrapped(fix) or "Change one of these settings."}

    def _wrong(self, path: KeyPath, location: KeyPath, value: Any, message: str) -> tuple[str, dict[str, Any]]:
        setting = self.settings[path]
        inside = "".join(f"[{key}]" for key in location[len(path) :] if key.isdecimal())
        message, _, fix = message.partition(FIX)
        allowed = message.removeprefix("must be ") or setting.type
        if setting.is_section:
            keys = [other[-1] for other in self.settings if other[:-1] == path]
            allowed = f"a section with {', '.join(keys)}"
        text = f'"{value}"' if isinstance(value, str) else describe.show(value)
        return f"{setting.key}{inside} can't be {text if len(text) <= 40 else text[:39] + '…'}", {
            "given": self._origin(path),
            "allowed": f"{wrapped(allowed)}\n{wrapped(setting.meaning)}".rstrip(),
            "fix": fix or self._better_value(setting, value),
        }

    def _better_value(self, setting: Setting, value: Any) -> str:
        """Return a sentence with a value that is allowed: the nearest of several names, or the default."""
        if setting.is_section:
            return f"Set a key of the section, such as {setting.key}.KEY=VALUE."
        near = difflib.get_close_matches(str(value), setting.type.split(" | "), n=1) if isinstance(value, str) else []
        if near:
            return f"Use {setting.key}={near[0]}."
        default = describe.show(describe.at(self.defaults, setting.path))
        return f"Use an allowed value, such as {setting.key}={default}." if default else f"Set {setting.key}."

    def _origin(self, path: KeyPath) -> str | None:
        """Return where a key was given, else where the first key inside it was."""
        inside = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        return self.origins.get(path) or next(inside, None)

    def _use_nearest(self, path: KeyPath, *, sections: bool) -> str | None:
        """Name the setting that was probably meant, with its type, value and meaning."""
        candidates = [setting for setting in self.settings.values() if setting.is_section == sections]
        is_known_alias = path[-1] in _ALIASES and not any(setting.path[-1] == path[-1] for setting in candidates)
        setting = self._by_alias(path, sections=sections) if is_known_alias else None
        setting = setting or _closest(path, candidates) or self._by_alias(path, sections=sections)
        if setting is None:
            return None
        if setting.is_section:
            return wrapped(f"Use {setting.key} (section): {setting.meaning}")
        value = describe.at(self.values, setting.path)
        now = "" if value is PydanticUndefined else f", now {describe.show(value)}"
        return wrapped(f"Use {setting.key} ({setting.type}{now}): {setting.meaning}")

    def _by_alias(self, path: KeyPath, *, sections: bool) -> Setting | None:
        """Return the setting to which other tools give this name."""
        near = difflib.get_close_matches(path[-1], _ALIASES, n=1, cutoff=0.8)
        setting = self.settings.get(tuple(_ALIASES[near[0]].split("."))) if near else None
        return setting if setting is not None and setting.is_section == sections else None


def _closest(path: KeyPath, candidates: Sequence[Setting]) -> Setting | None:
    """Return the candidate with the same last key, else with the most similar path, else with the most similar key."""
    same = [setting for setting in candidates if setting.path[-1] == path[-1]]
    if same:
        return max(same, key=lambda setting: difflib.SequenceMatcher(None, ".".join(path), setting.key).ratio())
    for cutoff, key in ((0.7, ".".join(path)), (0.6, path[-1])):
        names = {(setting.key if cutoff == 0.7 else setting.path[-1]): setting for setting in reversed(candidates)}
        near = difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
        if near:
            return names[near[0]]
    return None


def wrapped(text: str) -> str:
    """Break a slot's text into lines, so that the whole error fits into 80 columns."""
    return "\n".join(textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))
