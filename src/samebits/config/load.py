"""Settings in layers: a preset, the user's YAML file, the command line. Later layers override earlier ones, by key."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from samebits.config import describe, document
from samebits.config.document import KeyPath
from samebits.config.explain import explain, is_missing
from samebits.config.schema import RunConfig
from samebits.config.sections import Settings
from samebits.errors import ConfigError

C = TypeVar("C", bound=Settings)


@dataclass(frozen=True)
class Layer:
    """Settings from one source."""

    values: Mapping[str, Any]  #: Nested plain values.
    #: Path of a key -> where it was given, such as "my.yaml:12".
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    #: Whether the layer is a preset. Settings that differ from the presets are shown as changed.
    is_preset: bool = False
    source: str | None = None  #: The recipe, preset or file as the user typed it, for `samebits config SOURCE`.


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A validated config."""

    config: C  #: All settings.
    diff: dict[str, Any]  #: The settings that differ from the preset, as nested plain values.

    @property
    def resolved(self) -> dict[str, Any]:
        """Return all settings as nested plain values, for `to_yaml`."""
        return self.config.model_dump(mode="json")


def read_layer(path: Path, *, is_preset: bool = False) -> Layer:
    """Read a YAML file as a layer. Raises ConfigError if the file cannot be read, or is not a YAML mapping."""
    name = short_path(path)
    content = document.read(path, name)
    return Layer(content.values, {keys: f"{name}:{line}" for keys, line in content.lines.items()}, is_preset)


def mapping_layer(values: Mapping[str, Any], origin: str, *, is_preset: bool = False) -> Layer:
    """Make a layer of nested settings that were given in Python; what differs from a preset is shown as changed."""
    return Layer(values, {path: origin for path, _ in _every(values)}, is_preset)


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
    for layer in (*layers, *(override_layer(model, text) for text in overrides)):
        values = _merge(values, layer.values)
        origins.update(layer.origins)
        if layer.is_preset:
            base = _merge(base, layer.values)
    config = None
    try:
        # Strict, so that "3" or true is not a number of epochs. As JSON, because pydantic's strict mode for Python
        # values refuses [0.9, 0.999] for a tuple and "mnist" for a Path.
        config = model.model_validate_json(json.dumps(values), strict=True)
        values = config.model_dump(mode="json")
    except ValidationError as error:
        if not may_lack or not all(is_missing(fault) for fault in error.errors()):
            source = next((layer.source for layer in layers if layer.source is not None), values.get("recipe"))
            raise explain(model, error, values, origins, source) from None
    return config, values, _difference(base, values)


def override_layer(model: type[Settings], text: str) -> Layer:
    """Parse one `section.key=value` of the command line as a layer.

    Raises:
        ConfigError: The text does not have this form, changes the recipe, or is not UTF-8.
    """
    if not document.is_unicode(text):
        raise ConfigError(
            f"{text!a} is not text in UTF-8", given="on the command line", fix="Type the setting in UTF-8."
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
            "the recipe can't be changed by an override", given=origin, fix="Name it first: samebits train RECIPE"
        )
    value: Any = value_text.strip()
    kinds = {setting.path: setting.type.split(" or ") for setting in describe.settings(model)}.get(path, [])
    is_verbatim = ("text" in kinds or "path" in kinds) and value not in ("", "null", "~") and value[0] not in "'\""
    if not is_verbatim:  # a folder may be called 2024 or @home
        try:
            value = document.parse_value(value)
        except ConfigError as error:
            what = f"the value of {key} is not YAML"
            raise error.with_slots(what, given=origin, cause=error.slots.get("cause", error.what)) from error
    nested: Any = value
    for word in reversed(path):
        nested = {word: nested}
    inner = {(*path, *below): origin for below, _ in _every(value)} if isinstance(value, Mapping) else {}
    return Layer(nested, {path: origin, **inner})


def short_path(path: Path) -> str:
    """Return a path relative to the current folder if it is inside, else absolute."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = _merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _every(values: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        yield (*above, key), value
        if isinstance(value, Mapping):
            yield from _every(value, (*above, key))


def leaves(values: Mapping[str, Any], keys: Collection[KeyPath], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each setting in nested values with its path.

    Args:
        values: The nested values. A value may be a mapping itself.
        keys: Paths of all settings, to distinguish a section from a value that is a mapping.
        above: Path of `values` within all settings.
    """
    for key, value in values.items():
        path = (*above, key)
        if isinstance(value, Mapping) and path not in keys:
            yield from leaves(value, keys, path)
        else:
            yield path, value


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
