"""Keys, types, defaults and meanings of all settings, from the JSON Schema of the typed models."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from samebits.config.document import KeyPath


@dataclass(frozen=True)
class Setting:
    """One setting or section."""

    path: KeyPath  #: Its keys, from the root.
    type: str  #: Its type as text: "float > 0", "sgd | adam", "text"; "section" for a section.
    meaning: str  #: Its description.
    is_section: bool  #: Whether it contains settings.

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)


class Row(NamedTuple):
    """One row of the table of settings; a section's row has no default."""

    key: str
    type: str
    default: str
    meaning: str


@cache  # it is asked for each override of a command line
def settings(model: type[BaseModel]) -> tuple[Setting, ...]:
    """Return every setting and section of a model, a section before its settings."""
    return tuple(_settings(_tree(model), ()))


def _settings(section: Mapping[str, Any], above: KeyPath) -> Iterator[Setting]:
    for name, node in section["properties"].items():
        path = (*above, name)
        inner = next((part for part in _parts(node) if "properties" in part), None)
        text = "section" if inner else _type(node)
        yield Setting(path, text, node.get("description", ""), inner is not None)
        if inner:
            yield from _settings(inner, path)


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the default of every setting that has one, as plain values. Every section is included."""
    return _defaults(_tree(model))


def _defaults(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: node["default"] if "default" in node else _defaults(node)
        for name, node in section["properties"].items()
        if "default" in node or "properties" in node
    }


def table(model: type[BaseModel], config: Mapping[str, Any]) -> list[Row]:
    """Return a row for every setting, those of the root before the sections, with the values of `config`."""
    everything = list(settings(model))
    everything.sort(key=lambda setting: len(setting.path) > 1 or setting.is_section)
    return [
        Row(
            setting.key,
            setting.type,
            "" if setting.is_section else show(at(config, setting.path)),
            setting.meaning,
        )
        for setting in everything
    ]


def given(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting in nested values. A value may be a mapping itself."""
    for setting in settings(model):
        value = at(values, setting.path)
        is_inside = setting.is_section and isinstance(value, Mapping)
        if value is not PydanticUndefined and not is_inside:
            yield setting.key, value


def schema(model: type[BaseModel], config: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a YAML file for `model`, for editors.

    All keys but `recipe` may be left out of the file, since its values override a preset's.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_with_defaults(_tree(model), config),
        "title": title,
        "required": ["recipe"],
    }


def _with_defaults(section: Mapping[str, Any], values: Any) -> dict[str, Any]:
    """Return a section of a schema whose defaults are the values of a preset."""
    properties = {}
    for name, node in section["properties"].items():
        value = at(values, (name,))
        if "properties" in node:
            properties[name] = _with_defaults(node, value)
            continue
        properties[name] = {key: entry for key, entry in node.items() if key != "default"}
        if name != "recipe" and value is not PydanticUndefined:
            properties[name]["default"] = value
    kept = {key: entry for key, entry in section.items() if key != "default"}
    return {**kept, "properties": properties}


def at(values: Mapping[str, Any], path: Iterable[str]) -> Any:
    """Return the value at a path, or `PydanticUndefined`."""
    here: Any = values
    for key in path:
        if not isinstance(here, Mapping) or key not in here:
            return PydanticUndefined
        here = here[key]
    return here


def show(value: Any) -> str:
    """Return a plain value as it is written in YAML or on the command line; "" for an undefined one."""
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    return repr(value) if isinstance(value, float) else str(value)


@cache
def _tree(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON Schema, with all definitions in place. It is shared, and must not be changed."""
    document = model.model_json_schema()
    tree: dict[str, Any] = _inlined(document, document.pop("$defs", {}))
    return tree


def _parts(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the members of a union, null last; of any other type, itself."""
    return sorted(
        node.get("anyOf", node.get("oneOf", [node])), key=lambda part: part.get("type") == "null"
    )


_WORDS = {
    "boolean": "true | false",
    "integer": "int",
    "number": "float",
    "string": "text",
    "object": "map",
}


def _type(node: Mapping[str, Any]) -> str:
    parts = _parts(node)
    if len(parts) > 1:
        return " or ".join(_type(part) for part in parts)
    choices = node.get("enum", [node["const"]] if "const" in node else [])
    if choices:
        return " | ".join(map(str, choices))
    kind: str = node.get("type", "any")  # a recipe of the user's may allow any value
    if kind == "array":
        several = node.get("prefixItems", [])
        items = several[0] if several else node.get("items", {})
        return f"list of {f'{len(several)} ' if several else ''}{_type(items)}"
    if node.get("format") == "path":
        return "path"
    return _WORDS.get(kind, kind) + _range(node)


_SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def _range(node: Mapping[str, Any]) -> str:
    limits = {name: _number(node[name]) for name in _SIGNS if name in node}
    if set(limits) == {"minimum", "maximum"}:
        return f" from {limits['minimum']} to {limits['maximum']}"
    text = " and ".join(f"{_SIGNS[name]} {limit}" for name, limit in limits.items())
    return f" {text}" if text else ""


def _number(value: Any) -> str:
    if isinstance(value, int) and value > 2**20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a JSON Schema with every `$ref` replaced by its definition, and without generated titles."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    node = {
        key: value for key, value in node.items() if key != "title" or not isinstance(value, str)
    }
    if "$ref" in node:
        target = definitions[node.pop("$ref").rsplit("/", 1)[-1]]
        node = {**target, **node}
        node.pop("required", None)
        return _inlined(node, definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
