"""Settings in layers: a preset, the user's YAML file, the command line. Later layers override earlier ones, by key."""

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from samebits.config import describe, document
from samebits.config.describe import Setting
from samebits.config.document import KeyPath, Layer, every_key
from samebits.config.schema import RunConfig, Settings
from samebits.errors import ConfigError, wrapped

# Settings that earlier versions had. Run folders of those versions are still read.


#: The value of each that had no effect, by dotted name: it is ignored, and any other value is an error.
REMOVED: Mapping[str, object] = {
    "cluster.load_balancing": False,
    "compress": "none",
    "data.cache": None,
    "data.cache_gb": 10.0,
    "data.encoding": "utf-8",
    "data.on_error": "stop",
    "decode.beam_width": 1,
    "mode": "exact",
    "parallel": "ddp",
    "report.peak_tflops": None,
    "watch.recheck": None,
}
# No value of these changed a result: files may have any, but who types one expects an effect.
_NOT_OF_RESULTS = ("parallel",)


def without_removed(
    settings: Mapping[str, Any],
    own: Collection[str] = (),
    above: str = "",
    *,
    is_typed: bool = False,
) -> dict[str, Any]:
    """Return settings, nested or by dotted name, without those that were removed and had no effect.

    Args:
        own: Dotted names of settings that a recipe has now, as `names_of` returns them.
        above: The dotted name of the section that `settings` are in, with a dot at its end.
        is_typed: Whether some are of the command line.
    """
    return {
        key: without_removed(value, own, f"{above}{key}.", is_typed=is_typed)
        if isinstance(value, Mapping)
        else value
        for key, value in settings.items()
        if f"{above}{key}" in own or not _is_without_effect(f"{above}{key}", value, is_typed)
    }


def names_of(model: type[BaseModel]) -> set[str]:
    """Return the dotted name of each setting and section of a model."""
    return {setting.key for setting in describe.settings(model)}


def _is_without_effect(name: str, value: object, is_typed: bool) -> bool:
    is_free = name in _NOT_OF_RESULTS and not is_typed
    return name in REMOVED and (is_free or value == REMOVED[name])


# Turn pydantic's validation errors into one `ConfigError` that the user can act on.


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
        error.errors(include_url=False),
        key=lambda fault: (fault["type"] != "extra_forbidden", is_missing(fault)),
    )
    problems: dict[str, dict[str, Any]] = {}
    for fault in faults:
        what, slots = reader.problem(fault)
        problems.setdefault(what, slots)
    (what, slots), *others = problems.items()
    also = [wrapped(f"also: {other}") for other, _ in others[:5]]
    given = "\n".join(filter(None, [slots.get("given"), *also]))
    everything = f"For all settings: samebits config {source}" if source else None
    fix = "\n".join(
        filter(None, [slots.get("fix") or "Correct its name, or remove it.", everything])
    )
    return ConfigError(what, given=given, allowed=slots.get("allowed"), fix=fix)


def is_missing(fault: ErrorDetails) -> bool:
    """Return whether a setting was not given. Pydantic also reports "missing" for an item of a too short list."""
    return fault["type"] == "missing" and all(isinstance(key, str) for key in fault["loc"])


def setting_called(model: type[BaseModel], name: str) -> str | None:
    """Return the dotted name of a setting with this last name, here or in other tools; None if there is none."""
    keys = [setting.key for setting in describe.settings(model) if not setting.is_section]
    alias = _ALIASES.get(name)
    return next((key for key in keys if key == alias or key.rpartition(".")[2] == name), None)


class _Reader:
    """Explains one of pydantic's errors at a time."""

    def __init__(
        self, model: type[BaseModel], values: Mapping[str, Any], origins: Mapping[KeyPath, str]
    ) -> None:
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
        while (
            path and path not in self.settings
        ):  # pydantic may extend the location into a list or a union
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
            example = (
                f"{section.replace('.', ': {')}: {{{name}: {describe.show(value)}}}"
                + "}" * section.count(".")
            )
            return f"{path[-1]} is written with a dot", {
                "given": self._origin(path),
                "fix": f"In a file:  {example}\nOn the command line:  {path[-1]}={describe.show(value)}",
            }
        if (name := ".".join(path)) in REMOVED:
            return f"{name}={describe.show(value)} was removed from Samebits", {
                "given": self._origin(path),
                "allowed": f"{describe.show(REMOVED[name])}, its former default, which has no effect",
                "fix": "Remove it. For a run that was trained with it, use the version of Samebits that trained it.",
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
        return f"{'.'.join(path)} is not a section of the settings", {
            "given": self._origin(path),
            "fix": near,
        }

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
        return problem, {
            "given": "\n".join(given),
            "fix": wrapped(fix) or "Change one of these settings.",
        }

    def _wrong(
        self, path: KeyPath, location: KeyPath, value: Any, message: str
    ) -> tuple[str, dict[str, Any]]:
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
        near = (
            difflib.get_close_matches(value.lower(), setting.type.split(" | "), n=1)
            if isinstance(value, str)
            else []
        )
        if near:
            return f"Use {setting.key}={near[0]}."
        default = describe.show(describe.at(self.defaults, setting.path))
        return (
            f"Use an allowed value, such as {setting.key}={default}."
            if default
            else f"Set {setting.key}."
        )

    def _origin(self, path: KeyPath) -> str | None:
        """Return where a key was given, else where the first key inside it was."""
        inside = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        return self.origins.get(path) or next(inside, None)

    def _use_nearest(self, path: KeyPath, *, sections: bool) -> str | None:
        """Name the setting that was probably meant, with its type, value and meaning."""
        candidates = [
            setting for setting in self.settings.values() if setting.is_section == sections
        ]
        is_known_alias = path[-1] in _ALIASES and not any(
            setting.path[-1] == path[-1] for setting in candidates
        )
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
    by_key = {setting.key: setting for setting in same or candidates}
    cutoff = 0.0 if same else 0.7
    if near := difflib.get_close_matches(".".join(path), by_key, n=1, cutoff=cutoff):
        return by_key[near[0]]
    by_name = {setting.path[-1]: setting for setting in reversed(candidates)}
    near = difflib.get_close_matches(path[-1], by_name, n=1)
    return by_name[near[0]] if near else None


C = TypeVar("C", bound=Settings)


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A validated config."""

    config: C  #: All settings.
    diff: dict[str, Any]  #: The settings that differ from the preset, as nested plain values.


def load(model: type[C], layers: Sequence[Layer], overrides: Sequence[str] = ()) -> Loaded[C]:
    """Merge the layers and the overrides, where later ones win, and validate the result.

    Args:
        model, layers: The recipe's `Config`, and presets before other layers.
        overrides: `section.key=value`, with the value as YAML.

    Raises:
        ConfigError: A key is unknown, a setting is missing, or a value is not allowed. The error names the origin, the
            allowed values and the nearest setting.
    """
    config, _, diff = _resolve(model, layers, overrides, may_lack=False)
    assert config is not None
    return Loaded(config, diff)


def preview(
    model: type[RunConfig], layers: Sequence[Layer], overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge and validate settings for display; return all values, and those that differ from the preset.

    Unlike `load`, missing settings are left out.

    Raises:
        ConfigError: As for `load`, except for a missing setting.
    """
    _, values, diff = _resolve(model, layers, overrides, may_lack=True)
    return values, diff


def _resolve(
    model: type[C], layers: Sequence[Layer], overrides: Sequence[str], *, may_lack: bool
) -> tuple[C | None, dict[str, Any], dict[str, Any]]:
    """Merge and validate settings; return the config, all values, and those that differ from the preset.

    The config is None if `may_lack` and some are missing.
    """
    values = base = describe.defaults(model)
    origins: dict[KeyPath, str] = {}
    own = names_of(model)
    typed = [override_layer(model, text) for text in overrides]
    for number, layer in enumerate([*layers, *typed]):
        given = without_removed(layer.values, own, is_typed=number >= len(layers))
        values = _merge(values, given)
        origins.update(layer.origins)
        if layer.is_preset:
            base = _merge(base, given)
    config = None
    try:
        # Strict, so that "3" or true is not a number of epochs. As JSON, because pydantic's strict mode for Python
        # values refuses [0.9, 0.999] for a tuple and "mnist" for a Path.
        config = model.model_validate_json(json.dumps(values), strict=True)
        values = config.model_dump(mode="json")
    except ValidationError as error:
        if not may_lack or not all(is_missing(fault) for fault in error.errors()):
            source = next(
                (layer.source for layer in layers if layer.source is not None), values.get("recipe")
            )
            raise explain(model, error, values, origins, source) from None
    return config, values, _difference(base, values)


def override_layer(model: type[Settings], text: str) -> Layer:
    """Parse one `section.key=value` of the command line as a layer.

    Raises:
        ConfigError: The text does not have this form, changes the recipe, or is not UTF-8.
    """
    if not document.is_unicode(text):
        raise ConfigError(
            f"{text!a} is not text in UTF-8",
            given="on the command line",
            fix="Type the setting in UTF-8.",
        )
    origin = f"on the command line: {text}"
    key, equals, value_text = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or any(" " in word for word in path):
        raise ConfigError(
            f"{text} is not of the form key=value",
            given=origin,
            allowed="such as optim.lr=0.1 epochs=3",
            fix="Write the setting as KEY=VALUE, without spaces around the =.",
        )
    if path == ("recipe",):
        raise ConfigError(
            "the recipe can't be changed by an override",
            given=origin,
            fix="Name it first: samebits train RECIPE",
        )
    value: Any = value_text.strip()
    kinds = {setting.path: setting.type.split(" or ") for setting in describe.settings(model)}.get(
        path, []
    )
    is_verbatim = (
        ("text" in kinds or "path" in kinds)
        and value not in ("", "null", "~")
        and value[0] not in "'\""
    )
    if not is_verbatim:  # a folder may be called 2024 or @home
        try:
            value = document.parse_value(value)
        except ConfigError as error:
            what = f"the value of {key} is not YAML"
            raise error.with_slots(
                what, given=origin, cause=error.slots.get("cause", error.what)
            ) from error
    nested: Any = value
    for word in reversed(path):
        nested = {word: nested}
    inner = (
        {(*path, *below): origin for below in every_key(value)}
        if isinstance(value, Mapping)
        else {}
    )
    return Layer(nested, {path: origin, **inner})


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = _merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _difference(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are missing in `base` or differ from it."""
    different: dict[str, Any] = {}
    for key, value in values.items():
        # Not None, which is a value of settings: null.
        old = base.get(key, PydanticUndefined)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            inner = _difference(old, value)
            if inner:
                different[key] = inner
        elif value != old:
            different[key] = value
    return different
