"""The reference page of the Python API, in plain Markdown, from signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import samebits

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):$")
LISTS = ("Args", "Attributes", "Raises")
WIDTH = 100


class _Text:
    """An annotation or default that is written as it is in the source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def api_page() -> str:
    """Return what `samebits.__all__` names, from the docstrings."""
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in sorted(samebits.__all__, key=str.lower):
        thing = getattr(samebits, name)
        if inspect.isclass(thing):
            groups["Errors" if issubclass(thing, BaseException) else "Classes"].append(name)
        elif callable(thing):
            groups["Functions"].append(name)
    blocks = [
        "# Python API\n",
        "Everything that `import samebits` offers. Other modules are not public and may change in any version.\n",
        "```python\nimport samebits\n\n"
        'run = samebits.train("digits", {"epochs": 3}, procs=2)\n'
        "print(run.metrics, run.weights_sha256)\n```\n",
    ]
    for title, names in groups.items():
        blocks.append(f"## {title}\n")
        for name in names:
            blocks += _entry(name, title)
    return "\n".join(blocks)


def _entry(name: str, title: str) -> Iterator[str]:
    thing = getattr(samebits, name)
    if inspect.ismodule(thing):  # samebits.launch is a package too
        thing = getattr(importlib.import_module(f"{thing.__name__}.subcommand"), name)
    yield f"### {name}\n"
    if title == "Errors":
        yield f"Base: `{thing.__base__.__name__}`.\n"
    elif not hasattr(thing, "model_fields") and not getattr(thing, "_is_protocol", False):
        # Settings have pages of their own, and a protocol is not called.
        yield f"```py\n{_signature(name, thing)}\n```\n"
    yield docstring_to_markdown((inspect.getdoc(thing) or "") + _attributes(thing))
    if inspect.isclass(thing):
        yield from _members(thing)


def _attributes(thing: Any) -> str:
    """Return the section `Attributes` of the fields of a data class, from the comments `#:` behind or above them."""
    entries, above = [], ""
    for line in inspect.getsource(thing).splitlines() if dataclasses.is_dataclass(thing) else []:
        field = re.match(r"    (\w+): [^#]*(?:#: (.*))?$", line)
        if field and (field[2] or above):
            entries.append(f"    {field[1]}: {field[2] or above}")
        above = f"{above} {line[7:]}".strip() if line.startswith("    #: ") else ""
    return "\n".join(["\n\nAttributes:", *entries]) if entries else ""


def _members(cls: type) -> Iterator[str]:
    """Yield the public methods and properties that a class defines itself, one item of a list each."""
    items = []
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        if name.startswith("_") or not inspect.isfunction(function) or not inspect.getdoc(function):
            continue
        is_value = not inspect.isfunction(member) and not isinstance(member, (classmethod, staticmethod))
        call = name if is_value else _signature(name, function, is_method=not isinstance(member, staticmethod), width=0)
        text = docstring_to_markdown(inspect.getdoc(function) or "").strip()
        items.append(f"- `{call}`: {text}".replace("\n", "\n  ").replace("\n  \n", "\n\n"))
    if items:
        yield "**Methods and properties**\n"
        yield "\n".join(items) + "\n"


def _signature(name: str, thing: Any, *, is_method: bool = False, width: int = WIDTH) -> str:
    """Return a call with annotations as in the source; with a parameter a line where it is wider than `width`.

    Args:
        name: The name to call.
        thing: The function or class.
        is_method: Leave out the first parameter.
        width: Columns of a line. 0: always one line.
    """
    signature = inspect.signature(thing)
    written = _annotations(thing)
    parameters = [_plain(parameter, written) for parameter in signature.parameters.values()][is_method:]
    has_no_result = inspect.isclass(thing) or signature.return_annotation is signature.empty
    returns = signature.empty if has_no_result else _Text(written["return"])
    line = f"{name}{signature.replace(parameters=parameters, return_annotation=returns)}"
    if not width or len(line) <= width:
        return line
    inner = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    tail = "" if returns is signature.empty else f" -> {returns!r}"
    return "\n".join([f"{name}(", *(f"    {part}," for part in _split(inner[1:-1])), f"){tail}"])


def _plain(parameter: inspect.Parameter, written: Mapping[str, str]) -> inspect.Parameter:
    """Return a parameter whose annotation and default print as in the source."""
    if parameter.annotation is not parameter.empty:
        parameter = parameter.replace(annotation=_Text(written[parameter.name]))
    default = parameter.default
    if default is not parameter.empty and repr(default).startswith("<"):  # a factory or a function
        parameter = parameter.replace(default=_Text("..."))
    return parameter


def _annotations(thing: Any) -> dict[str, str]:
    """Return annotations as in the source, by name: those of a function, or of a class's fields and `__init__`."""
    if not inspect.isclass(thing):
        function = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
        assert isinstance(function, ast.FunctionDef)
        given = function.args
        starred = [each for each in (given.vararg, given.kwarg) if each]
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]
        found = {each.arg: _source(each.annotation) for each in arguments if each.annotation}
        return found | ({"return": _source(function.returns)} if function.returns else {})
    found = {}
    for base in reversed([each for each in thing.__mro__ if each.__module__.startswith("samebits.")]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        fields = [node for node in body.body if isinstance(node, ast.AnnAssign)]
        found |= {ast.unparse(node.target): _source(node.annotation) for node in fields}
        if inspect.isfunction(vars(base).get("__init__")) and not dataclasses.is_dataclass(base):
            found |= _annotations(vars(base)["__init__"])
    return found


def _source(annotation: ast.expr) -> str:
    """Return an annotation as text, without the quotes of one that names its own class."""
    is_quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return str(annotation.value) if is_quoted else ast.unparse(annotation)  # type: ignore[attr-defined]


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a list of parameters, without cutting inside of brackets or strings."""
    depth, part, quote = 0, "", ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += (sign in "([{") - (sign in ")]}") if not quote else 0
        if sign == "," and not depth and not quote:
            yield part.strip()
            part = ""
        else:
            part += sign
    yield part.strip()


def docstring_to_markdown(text: str) -> str:
    """Return a docstring of Google's form as Markdown: `Args` and the like become lists."""
    blocks: list[str] = []
    section, lines = "", []
    for line in text.splitlines():
        match = SECTION.match(line)
        if match is None and not (section and line and line[0] != " "):
            lines.append(line)
            continue
        blocks += _section(section, inspect.cleandoc("\n".join(["", *lines])))
        section, lines = (match.group(1), []) if match else ("", [line])
    return "\n".join([*blocks, *_section(section, inspect.cleandoc("\n".join(["", *lines])))])


def _section(name: str, body: str) -> Iterator[str]:
    if not body:
        return
    if name:
        yield f"**{name}**\n"
    if name not in LISTS:
        yield f"{_escaped(re.sub(r'::$', ':', body, flags=re.MULTILINE))}\n"
        return
    items = re.sub(r"\n +", " ", body).splitlines()  # continuation lines are indented
    yield "\n".join(re.sub(r"^(\*{0,2}[\w.]+): ", r"- `\1`: ", _escaped(item)) for item in items if item) + "\n"


def _escaped(text: str) -> str:
    """Return text in which angle brackets outside of code are not taken for HTML."""
    parts = re.split(r"(`[^`]*`|^    .*$)", text, flags=re.MULTILINE)
    parts[::2] = [part.replace("<", "\\<") for part in parts[::2]]
    return "".join(parts)
