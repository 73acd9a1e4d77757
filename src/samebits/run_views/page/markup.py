"""HTML elements whose texts are escaped when they are made, so that no name or label can become markup.

A `str` is always text. Only `element` makes `Markup`, and only `Markup` is written as it is.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from samebits.errors import printable

_VOID = frozenset({"meta", "img", "br", "line", "rect", "path", "polyline", "circle"})


class Markup:
    """Escaped HTML.

    Attributes:
        html: The text.
    """

    __slots__ = ("html",)

    def __init__(self, escaped: str) -> None:
        self.html = escaped

    def __str__(self) -> str:
        return self.html


Child = Markup | str | None


def element(tag: str, attributes: Mapping[str, object] | None = None, *children: Child | Iterable[Child]) -> Markup:
    """Return an element.

    Args:
        tag: Its name, which is never taken from data.
        attributes: Values by name; None leaves an attribute out. The names are never taken from data.
        children: Texts, which are escaped, and elements. None is left out.
    """
    # HTML has no form for control characters; changes of the text direction could hide a part of a line.
    names = "".join(
        f' {name}="{escaped(str(value))}"' for name, value in (attributes or {}).items() if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{names}>" if tag in ("meta", "img", "br") else f"<{tag}{names}/>")
    return Markup(f"<{tag}{names}>{joined(children).html}</{tag}>")


def joined(children: Iterable[Child | Iterable[Child]]) -> Markup:
    """Return texts and elements in a row."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child.html)
        elif isinstance(child, str):
            parts.append(escaped(child))
        else:
            parts.append(joined(child).html)
    return Markup("".join(parts))


def escaped(text: str) -> str:
    """Escape a text for an element or a quoted attribute."""
    return html.escape(printable(text), quote=True)


def table(rows: Iterable[tuple[Child, ...]], head: tuple[Child, ...] | None = None, kind: str = "") -> Markup:
    """Return a table whose first column names the rows, in a box that scrolls on narrow screens.

    Args:
        rows: Cells by row.
        head: Cells of the first row.
        kind: Its CSS class.
    """
    body = [
        element("tr", None, element("th", {"scope": "row"}, row[0]), *(element("td", None, c) for c in row[1:]))
        for row in rows
    ]
    top = (
        element("thead", None, element("tr", None, [element("th", {"scope": "col"}, cell) for cell in head]))
        if head
        else None
    )
    whole = element("table", {"class": kind or None}, top, element("tbody", None, body))
    return element("div", {"class": "scroll", "tabindex": "0", "role": "group"}, whole)


def section(title: str, *children: Child | Iterable[Child]) -> Markup | None:
    """Return a section with a heading; None if it has no content."""
    content = joined(children)
    if not content.html:
        return None
    return element("section", None, element("h3", None, title), content)
