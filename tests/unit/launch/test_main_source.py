"""The text of a notebook's function contains what it uses, and nothing else."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import ConfigError
from samebits.launch.main_source import check_function, is_plain, module_text


class Notebook:
    """Runs cells as a kernel does: in one namespace, with their text in linecache and in `In`."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__", "In": [""]}

    def run(self, cell: str) -> None:
        file = f"<cell {id(self)} {len(self.names['In'])}>"
        linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
        self.names["In"].append(cell)
        exec(compile(cell, file, "exec", dont_inherit=True), self.names)

    def text(self, name: str = "f") -> str:
        return module_text(self.names[name])

    def call(self, *args: Any, name: str = "f") -> Any:
        """What another process gets: the text in an empty module."""
        there: dict[str, Any] = {"__name__": "cells"}
        exec(self.text(name), there)
        return there[name](*args)


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


def test_a_function_brings_functions_classes_imports_and_values_of_other_cells(notebook: Notebook) -> None:
    notebook.run(
        "import math\nimport os.path as paths\nfrom collections import Counter as Bag\nfrom pathlib import Path"
    )
    notebook.run("SCALE = 2.5\nNAMES = ['a', 'b']\nROOT = Path('data')\nunused = object()")
    notebook.run(
        "class Base:\n    def area(self):\n        return math.pi * SCALE\n\nclass Round(Base):\n    kind: str = 'o'"
    )
    notebook.run("def double(x):\n    return 2 * x")
    notebook.run(
        "def f(x):\n    return double(x), Round().area(), Bag(NAMES)['a'], paths.join('a', 'b'), str(ROOT / 'c')"
    )
    assert notebook.call(3) == (6, pytest.approx(7.853981633974483), 1, "a/b", "data/c")
    assert "unused" not in notebook.text()


def test_a_local_name_is_not_taken_from_the_notebook(notebook: Notebook) -> None:
    notebook.run("model = object()")
    notebook.run("def f():\n    model = 3\n    return [model for _ in range(2)]")
    assert notebook.call() == [3, 3]


def test_functions_that_call_each_other_are_both_sent(notebook: Notebook) -> None:
    notebook.run("def even(n):\n    return n == 0 or odd(n - 1)\n\ndef odd(n):\n    return n != 0 and even(n - 1)")
    assert notebook.call(4, name="even") is True


def test_decorators_defaults_and_nested_functions_are_sent(notebook: Notebook) -> None:
    notebook.run("import functools\nSTEP = 2\ndef twice(g):\n    return functools.wraps(g)(lambda x: g(g(x)))")
    notebook.run("def add(x, by=STEP):\n    def inner():\n        return x + by\n    return inner()")
    notebook.run("def f(x):\n    @twice\n    def more(y):\n        return add(y)\n    return more(x)")
    assert notebook.call(1) == 5


def test_the_newest_definition_counts(notebook: Notebook) -> None:
    notebook.run("class A:\n    value = 1")
    notebook.run("def f():\n    return A.value")
    notebook.run("class A:\n    value = 2")
    notebook.names["In"].append("%%bash\necho not python")
    assert notebook.call() == 2


def test_a_submodule_that_is_used_through_its_package_is_imported(notebook: Notebook) -> None:
    notebook.run("import xml.dom.minidom")
    notebook.run("def f():\n    return xml.dom.minidom.parseString('<a/>').documentElement.tagName")
    assert "import xml.dom.minidom" in notebook.text()
    assert notebook.call() == "a"


def test_an_object_of_another_cell_is_named(notebook: Notebook) -> None:
    notebook.run("class Model: ...\nmodel = Model()")
    notebook.run("def helper():\n    return model")
    notebook.run("def f():\n    return helper()")
    with pytest.raises(ConfigError, match="helper uses model, a Model that other processes do not have") as caught:
        notebook.text()
    assert "Make model inside helper" in caught.value.slots["fix"]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("f = lambda: 1", "is a lambda"),
        ("class A:\n    def g(self): ...\nf = A.g", "inside another function or a class"),
        ("def outer():\n    def inner(): ...\n    return inner\nf = outer()", "inside another function or a class"),
        ("f = 3", "is a int"),
    ],
)
def test_a_function_that_cannot_be_named_is_refused(notebook: Notebook, cell: str, says: str) -> None:
    notebook.run(cell)
    with pytest.raises(ConfigError, match=says):
        check_function(notebook.names["f"], "the function")


def test_plain_values_have_a_text_with_the_same_meaning() -> None:
    assert is_plain({"a": [1, 2.5, None, True, ("x",)]})
    assert not any(map(is_plain, (float("nan"), {1, 2}, b"x", Path("x"), [object()], {(object(),): 1})))
