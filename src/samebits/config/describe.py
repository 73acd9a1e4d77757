"""Keys, types, defaults and meanings of all settings, from the typed models."""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

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


def settings(model: type[BaseModel], above: KeyPath = ()) -> Iterator[Setting]:
    """Yield every setting and section of a model, a section before its settings."""
    for name, field in model.model_fields.items():
        path = (*above, name)
        section = _section(field.annotation)
        text = "section" if section else _type(field.annotation, field.metadata)
        yield Setting(path, text, field.description or "", section is not None)
        if section:
            yield from settings(section, path)


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the default of every setting that has one, as plain values. Every section is included."""
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if not field.is_required():
            make: Any = field.default_factory
            values[name] = to_jsonable_python(make() if make else field.default)
        elif section:
            values[name] = defaults(section)
    return values


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


def schema(model: type[BaseModel], config: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a YAML file for `model`, for editors.

    All keys but `recipe` may be left out of the file, since its values override a preset's.
    """
    document = model.model_json_schema()
    definitions = document.pop("$defs", {})
    tree = _inlined(document, definitions)
    for setting in settings(model):
        keys = [word for key in setting.path for word in ("properties", key)]
        node = at(tree, keys)
        value = at(config, setting.path)
        if node is PydanticUndefined:  # within a section that may be null
            continue
        node.pop("default", None)
        if (
            not setting.is_section
            and setting.path != ("recipe",)
            and value is not PydanticUndefined
        ):
            node["default"] = value
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **tree,
        "title": title,
        "required": ["recipe"],
    }


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


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; of any other annotation, itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in _parts(member))
    return (annotation,)


def _section(annotation: Any) -> type[BaseModel] | None:
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


_WORDS = {
    bool: "true | false",
    int: "int",
    float: "float",
    str: "text",
    Path: "path",
    type(None): "null",
}


def _type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    metadata = list(metadata)
    if hasattr(annotation, "__metadata__"):  # Annotated[X, ...]
        inner, *more = get_args(annotation)
        return _type(inner, [*_flat(more), *metadata])
    parts = _parts(annotation)
    if len(parts) > 1:
        null_last = sorted(parts, key=lambda part: part is type(None))
        return " or ".join(
            _type(part, metadata if part is not type(None) else ()) for part in null_last
        )
    origin = get_origin(annotation)
    inside = get_args(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in inside)
    if origin in (list, tuple) and inside:
        many = origin is list or Ellipsis in inside
        return f"list of {'' if many else f'{len(inside)} '}{_type(inside[0])}"
    if origin is dict:
        return "map"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation))) + _range(
        metadata
    )


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _range(metadata: Iterable[Any]) -> str:
    limits: dict[str, Any] = {}
    for item in metadata:
        for name in ("gt", "ge", "lt", "le"):
            if getattr(item, name, None) is not None:
                limits[name] = getattr(item, name)
    if set(limits) == {"ge", "le"}:
        return f" from {_number(limits['ge'])} to {_number(limits['le'])}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    text = " and ".join(
        f"{sign} {_number(limits[name])}" for name, sign in signs.items() if name in limits
    )
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
