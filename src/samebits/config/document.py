"""Settings as YAML: a document with the line of each key, a layer with the place of each key, and how YAML is written.

Scalars follow YAML 1.2: `1e-3` is a number, `no` and `on` are text, `010` is ten. Duplicate keys, custom tags,
recursive aliases and values that do not match their tag are refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from samebits.errors import ConfigError, cannot_read
from samebits.plain_file import read_plain, short_path

KeyPath = tuple[str, ...]

_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TEXT = "tag:yaml.org,2002:str"
_KINDS = {_NULL: "null", _BOOL: "true or false", _INT: "a whole number", _FLOAT: "a number"}
_MAX_DIGITS = 4300  # limit of Python's int()
_MAX_BYTES = 1 << 20
_MAX_VALUES = 50_000  # a few hundred bytes of aliases can stand for any number of values
_MAX_DEPTH = 100  # of lists and maps: at the limits of Python and pydantic, the error would have no line number

_NEWLINE = re.compile(r"\r\n|\r|\n")
_HAS_KEY = re.compile(r":(?:\s|$)|^\s*(?:#|-|$)")
_NO_COLON = "could not find expected ':'"
_SECOND_KEY = "mapping values are not allowed here"
# Part of PyYAML's message -> the problem and the fix. The first match is used.
_READABLE_ERRORS = {
    "'\\t' that cannot start": (
        "a tab (→) stands where YAML allows only spaces",
        "Replace the tab with spaces.",
    ),
    "that cannot start any token": (
        "a value cannot begin with this character",
        "Put quotes around the value.",
    ),
    _NO_COLON: ("a key needs a colon and a space after it", "Write it as key: value."),
    _SECOND_KEY: (
        "a key is not allowed here",
        "Indent the line like its neighbors, or put quotes around a value that has a colon in it.",
    ),
    "unexpected end of stream": ("the quote that begins here is not closed", "Close the quote."),
    "but got '<stream end>'": ("the bracket that begins here is not closed", "Close the bracket."),
    "but found '<stream end>'": (
        "the text ends where a value should follow",
        "Add the value, or close the bracket.",
    ),
    "expected <block end>": (
        "the line is indented like none above it",
        "Indent it like its neighbors.",
    ),
    "found another document": (
        "a second document begins here, and a file holds one",
        "Remove the line.",
    ),
    "special characters": ("the line has a control character", "Remove the character."),
}

# tag -> (regular expression, first characters). The first match decides: every int also matches the float.
_SCALARS = {
    _NULL: (r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    _BOOL: (r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    _INT: (r"[-+]?[0-9]+", list("-+0123456789")),
    _FLOAT: (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces the rules of YAML 1.1
    _depth = _num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # the stubs of PyYAML have no type
            raise yaml.MarkedYAMLError(problem=_too_deep(), problem_mark=mark)
        self._num_nodes += 1
        if self._num_nodes > _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES:,} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes each string that YAML 1.1 or 1.2 would parse as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Without quotes, some line breaks (U+0085) would be read back as a space.
        return self.represent_scalar(_TEXT, data, style=None if data.isprintable() else '"')


for _tag, (_pattern, _first) in _SCALARS.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), _first)
_Dumper.add_representer(str, _Dumper.represent_str)


@dataclass(frozen=True)
class Layer:
    """Settings from one source."""

    values: dict[str, Any]  #: Nested plain values.
    #: Path of a key -> where it was given, such as "my.yaml:12".
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    #: Whether the layer is a preset. Settings that differ from the presets are shown as changed.
    is_preset: bool = False
    source: str | None = (
        None  #: The recipe, preset or file as the user typed it, for `samebits config SOURCE`.
    )


def read(path: Path, name: str, max_bytes: int = _MAX_BYTES) -> Layer:
    """Read a YAML file that contains a mapping or nothing; `name` is the file's name in errors.

    Raises:
        ConfigError: The file cannot be read, or is not such YAML.
    """
    try:
        text = read_plain(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not text in UTF-8",
            given=f"byte {error.start} of the file",
            fix="Save the file as UTF-8.",
        ) from error
    except OSError as error:
        raise cannot_read(ConfigError, name, error, "Name a readable YAML file.") from error
    return parse(text, name)


def parse(text: str, name: str) -> Layer:
    """Parse YAML that contains a mapping or nothing; `name` is the file's name in errors.

    Raises:
        ConfigError: The text is not YAML, is not a mapping, or has a key twice.
    """
    lines: dict[KeyPath, int] = {}
    values = _parsed(text, name, lines)
    if values is None:
        return Layer({})
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name} holds no settings",
            given=_shorten(text),
            allowed="lines such as epochs: 3",
            fix="Write each setting as key: value.",
        )
    return Layer(values, {keys: f"{name}:{line}" for keys, line in lines.items()})


def read_layer(path: Path, *, is_preset: bool = False) -> Layer:
    """Read a YAML file as a layer. Raises ConfigError if the file cannot be read, or is not a YAML mapping."""
    return replace(read(path, short_path(path)), is_preset=is_preset)


def mapping_layer(values: Mapping[str, Any], origin: str, *, is_preset: bool = False) -> Layer:
    """Make a layer of nested settings that were given in Python; what differs from a preset is shown as changed."""
    return Layer(dict(values), dict.fromkeys(every_key(values), origin), is_preset)


def every_key(values: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of each key of nested values."""
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from every_key(value, (*above, key))


def parse_value(text: str) -> Any:
    """Parse one YAML value: a scalar, a [list] or a {map}. Raises ConfigError if the text is not YAML."""
    return _parsed(text, "the value", {})


def to_yaml(values: Mapping[str, Any]) -> str:
    """Write a mapping of plain values as YAML, in the order of its keys. `parse` returns the same values."""
    # `default_flow_style=None`: a list or map of scalars stays on one line.
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=100,
    )


def _parsed(text: str, name: str, lines: dict[KeyPath, int]) -> Any:
    """Return the value in a YAML text; `lines` receives the line of each key."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _not_yaml(error, text, name) from error
    left = iter(range(_MAX_VALUES))  # an item for each value that may still come

    def value_of(node: yaml.Node, path: KeyPath, above: tuple[int, ...]) -> Any:
        """Return the value of a node within the nodes `above`."""
        where = f"{name}:{node.start_mark.line + 1}"
        if next(left, None) is None:
            raise ConfigError(
                f"{name} stands for more than {_MAX_VALUES:,} values",
                cause="aliases (*name) that repeat each other",
                fix="Write the values out, or write fewer of them.",
            )
        if id(node) in above:
            raise ConfigError(
                "a YAML alias stands within itself",
                given=where,
                fix="Write the value out in place of the alias.",
            )
        if len(above) >= _MAX_DEPTH:  # by aliases
            raise ConfigError(
                _too_deep(), given=where, fix="Use fewer lists or maps within each other."
            )
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            values: dict[str, Any] = {}
            for key_node, value_node in node.value:
                line = key_node.start_mark.line + 1
                key = key_of(key_node, f"{name}:{line}")
                here = (*path, key)
                if key in values:
                    raise ConfigError(
                        f"{'.'.join(here)} is given twice",
                        given=f"{name}:{line}, and before on line {lines[here]}",
                        fix="Remove one of the two lines.",
                    )
                lines[here] = line
                values[key] = value_of(value_node, here, above)
            return values
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [
                value_of(item, (*path, str(index)), above) for index, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.ScalarNode) and node.tag in (*_SCALARS, _TEXT):
            return _scalar(node.tag, node.value, where)
        raise ConfigError(
            f"the YAML tag {node.tag} is not a kind of setting", given=where, fix="Remove the tag."
        )

    def key_of(node: yaml.Node, where: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(
                "a key must be a word", given=where, fix="Write the setting as key: value."
            )
        return str(_scalar(_TEXT, node.value, where))

    return None if root is None else value_of(root, (), ())


def _not_yaml(error: yaml.YAMLError, text: str, name: str) -> ConfigError:
    """Translate PyYAML's error: a readable problem, and the line to change."""
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    mark = getattr(error, "problem_mark", None)
    context = getattr(error, "context_mark", None)
    index = getattr(error, "position", 0) if mark is None else mark.index
    if not isinstance(error, yaml.MarkedYAMLError | yaml.reader.ReaderError):
        return ConfigError(f"{name} is not YAML", cause=problem, fix="Write fewer values.")
    line = 1 + len(_NEWLINE.findall(text[:index]))
    before = 0
    if context is not None:
        before = 1 + len(_NEWLINE.findall(text[: context.index]))
    lines = _NEWLINE.split(text)
    # The parser reports the line at which it fails: for a missing colon the next line, for an open quote the last line.
    if problem == _SECOND_KEY and line > 1 and not _HAS_KEY.search(lines[line - 2]):
        problem = _NO_COLON
        line = line - 1
    elif before and (problem == _NO_COLON or not text[index:].strip("\0 \t\r\n")):
        line = before
    cause, fix = next(
        (readable for part, readable in _READABLE_ERRORS.items() if part in problem),
        (problem, "Correct this line, or put quotes around its value."),
    )
    if before < line and "flow" in str(getattr(error, "context", "")) and cause == problem:
        cause += f"; perhaps the bracket on line {before} is not closed"
        fix = f"Close the bracket on line {before}, or correct this line."
    shown = _shorten(lines[line - 1].replace("\t", "→"))
    return ConfigError(f"{name} is not YAML", given=f"{name}:{line}: {shown}", cause=cause, fix=fix)


def _scalar(tag: str, text: str, where: str) -> Any:
    if tag == _TEXT:
        if not is_unicode(text):
            raise ConfigError(
                f"{_shorten(ascii(text))} has half a character",
                given=where,
                fix="Write the character whole.",
            )
        return text
    if not re.fullmatch(_SCALARS[tag][0], text):
        raise ConfigError(
            f"{_shorten(ascii(text))} is not {_KINDS[tag]}",
            given=where,
            fix="Correct the value, or remove its tag.",
        )
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        if len(text) > _MAX_DIGITS:
            raise ConfigError(
                f"{_shorten(text)} is a number of {len(text):,} digits",
                given=where,
                allowed=f"at most {_MAX_DIGITS:,} digits",
                fix="Write a shorter number.",
            )
        return int(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogates (`"\\ud800"`), which also stand for bytes that are not UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _too_deep() -> str:
    return f"more than {_MAX_DEPTH} lists or maps within each other"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
