"""Every private name of another package that the package uses is listed with its reason, and its owner still has it."""

import re
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.house.private_names import defines, used

TABLE = "tests/house/private_names.toml"
LIST: dict[str, dict[str, list[str]]] = tomllib.loads((Path(__file__).parent / "private_names.toml").read_text())
TRIED = LIST.pop("tried")
OWNERS = [(owner, name) for owner, names in LIST.items() for name in names]
# Looked up in their sources, since importing them takes seconds.
OPTIONAL = ("accelerate", "lightning", "torchmetrics", "transformers")


def problems(files: dict[str, set[str]], owners: dict[str, dict[str, list[str]]]) -> list[str]:
    """Compare the uses of private names with the list."""
    folders: dict[str, set[str]] = {}
    for names in owners.values():
        for name, (where, _) in names.items():
            folders.setdefault(name, set()).update(where.split())
    found = []
    for name, places in files.items():
        for place in sorted(places):
            if place.removeprefix("src/samebits/").partition("/")[0] not in folders.get(name, ()):
                found.append(f"{place} uses {name} of another package. Find a public way, or list it in {TABLE}")
    for name, where in folders.items():
        seen = {place.removeprefix("src/samebits/").partition("/")[0] for place in files.get(name, ())}
        found += [f"{name} is not used in {folder} any more: remove it from {TABLE}" for folder in sorted(where - seen)]
    return found


@pytest.mark.check
def test_private_names_of_other_packages_are_listed(repo: Path) -> None:
    found = problems(used(repo), LIST)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("owner", "name"), OWNERS, ids=lambda each: each)
def test_the_owner_still_has_the_name(owner: str, name: str) -> None:
    package = owner.partition(":")[0].partition(".")[0]
    if package in OPTIONAL and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    version = getattr(sys.modules.get(package), "__version__", "")
    assert _has(owner, name), f"{package} {version} has no {owner} {name}: {LIST[owner][name][1]}"


def _has(owner: str, name: str) -> bool:
    module, _, inner = owner.partition(":")
    if defines(module, inner, name):
        return True
    if module.startswith(OPTIONAL):
        return False
    found: Any = import_module(module) if module != "torch.ops.aten" else import_module("torch").ops.aten
    for part in filter(None, inner.split(".")):
        found = getattr(found, part)
    return hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None)


@pytest.mark.check
def test_the_pinned_versions_were_tried(repo: Path) -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (repo / "constraints.txt").read_text(), re.MULTILINE))
    for package, versions in TRIED.items():
        if package != "python":
            assert pins[package] == versions[-1], f"try the private names with {package} {pins[package]}, see {TABLE}"


@pytest.mark.check
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo\n", "_RoleInstanceInfo"),
        ("import torch._dynamo.config\n", "_dynamo"),
        ("def f(a):\n    return a.inner._keep_alive_timer\n", "_keep_alive_timer"),
        ("x = getattr(a, '_pc', None)\n", "_pc"),
        ("class A:\n    def f(self): return self._unknown\n", "_unknown"),
        ("from torch import nn\nclass A(nn.Linear):\n    def _apply(self): ...\n", "_apply"),
        ("from torch import nn\nclass A(nn.Linear):\n    def f(self): self._buffers = {}\n", "_buffers"),
        ("X = find('core.optimizer', '_MockOptimizer')\n", "_MockOptimizer"),
        # A private name of our own is no matter.
        ("class A:\n    def __init__(self): self._x = 1\n    def f(self, other): return other._x\n", None),
        ("class A:\n    def _f(self): ...\nclass B(A):\n    def g(self): return super()._f()\n", None),
        ("import os\nos._exit(1)\n", None),
        ("from samebits.data.order import _First\n", None),
    ],
)
def test_a_private_name_of_another_package_is_noticed(tmp_path: Path, text: str, name: str | None) -> None:
    (tmp_path / "src/samebits").mkdir(parents=True)
    (tmp_path / "src/samebits/x.py").write_text(text)
    assert set(used(tmp_path)) == ({name} if name else set())


@pytest.mark.check
def test_names_that_are_not_listed_not_used_or_gone_are_reported() -> None:
    found = problems({"_a": {"src/samebits/data/x.py"}}, {"torch": {"_a": ["launch", "why"]}})
    assert found == [
        f"src/samebits/data/x.py uses _a of another package. Find a public way, or list it in {TABLE}",
        f"_a is not used in launch any more: remove it from {TABLE}",
    ]
    assert not _has("torch.nn:Module", "_no_such_name")
    assert not _has("torch", "_no_such_name")
