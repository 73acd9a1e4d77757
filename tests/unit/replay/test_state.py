"""What a recipe keeps between calls, and reads beside its arguments, is traced to the user's line."""

import functools
import importlib.util
import itertools
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from samebits.replay import sources
from samebits.replay.cause import loops_over_sets
from samebits.replay.sources import SourceTracer
from samebits.replay.state import CACHE, GENERATOR, STATE, changed, find_cells, line_watch

SOURCE = """
class Reader:
    def __init__(self, rng):
        self.rng, self.count, self.rows = rng, 0, {}

    def draw(self):
        return self.rng.random()

    def tally(self):
        unused = 1
        self.count += 1
        return unused

    def keep(self):
        self.rows[len(self.rows)] = 1
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "reader.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("reader", tmp_path / "reader.py")
    module = sys.modules["reader"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["reader"]


@pytest.mark.parametrize("rng", [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)])
def test_a_generator_that_draws_is_found(module: ModuleType, rng: object) -> None:
    reader = module.Reader(rng)
    [(path, cell)] = changed(lambda: find_cells({"dataset": reader}), reader.draw).items()
    assert (path, cell.kind) == ("dataset.rng", GENERATOR)


def test_a_torch_generator_in_a_closure_is_found() -> None:
    generator = torch.Generator().manual_seed(1)

    def loss() -> torch.Tensor:
        return torch.rand(1, generator=generator)

    [(path, cell)] = changed(lambda: find_cells({"loss": loss}), loss).items()
    assert (path, cell.kind) == ("loss.generator", GENERATOR)


def test_counters_containers_arrays_and_caches_are_found() -> None:
    class Keeper:
        def __init__(self) -> None:
            self.rows, self.array, self.tensor = [1], np.zeros(3), torch.zeros(3)
            self.ids = itertools.count()
            self.double = functools.lru_cache(lambda value: 2 * value)
            self.untouched = {"a": [1, 2]}

        def change(self) -> None:
            self.rows.append(2)
            self.array[0] = 1
            self.tensor = self.tensor + 1
            next(self.ids)
            self.double(1)

    keeper = Keeper()
    cells = changed(lambda: find_cells({"it": keeper}), keeper.change)
    found = {path: cell.kind for path, cell in cells.items()}
    expected = dict.fromkeys(["it.rows", "it.array", "it.tensor", "it.ids"], STATE)
    assert found == {**expected, "it.double": CACHE}


def test_parameters_and_buffers_of_a_module_are_not_listed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    find = lambda: find_cells({"model": model})  # noqa: E731
    assert changed(find, lambda: model(torch.randn(4, 2)).sum().backward()) == {}


def test_the_line_that_changes_a_value_is_named(module: ModuleType, tmp_path: Path) -> None:
    reader = module.Reader(random.Random(1))
    cells = find_cells({"dataset": reader})
    with line_watch(cells) as lines:
        reader.tally()
        reader.draw()
        reader.keep()
    source = SOURCE.splitlines()
    named = {path: source[line - 1].strip() for path, (_, line) in lines.items()}
    assert named == {
        "dataset.count": "self.count += 1",
        "dataset.rng": "return self.rng.random()",
        "dataset.rows": "self.rows[len(self.rows)] = 1",
    }


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: time.time(), sources.CLOCK),
        (lambda: datetime.now(), sources.CLOCK),
        (lambda: os.getpid(), sources.PROCESS),
        (lambda: os.urandom(4), sources.ENTROPY),
        (lambda: secrets.token_hex(2), sources.ENTROPY),
        (lambda: np.random.default_rng(), sources.ENTROPY),
        (lambda: random.Random(), sources.ENTROPY),
        (lambda: torch.Generator().seed(), sources.ENTROPY),
        (lambda: torch.utils.data.get_worker_info(), sources.WORKER),
        (lambda: os.environ.get("LOCAL_RANK"), sources.RANK),
        (lambda: hash("text"), sources.HASH),
    ],
)
def test_a_source_is_traced_to_its_line(call: Callable[[], object], kind: str) -> None:
    tracer = SourceTracer()
    with tracer.during("sample"):
        call()
    found = list(tracer.found)
    assert [(each.kind, each.phase, each.file) for each in found] == [(kind, "sample", __file__)]
    assert found[0].line == call.__code__.co_firstlineno


def test_seeded_draws_and_torchs_own_calls_are_no_sources() -> None:
    tracer = SourceTracer()
    with tracer.during("forward"):
        torch.randn(3)
        np.random.randn(3)
        np.random.default_rng(3).normal()
        random.random()
        torch.nn.Linear(2, 2)(torch.randn(1, 2)).sum().backward()
        os.environ.get("HOME")
    assert list(tracer.found) == []


def test_loops_over_sets_are_found_and_sorted_ones_are_not(tmp_path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(
        "a = list(set(names))\n"
        "b = sorted(set(names))\n"
        "c = [name for name in {'x', 'y'}]\n"
        "for place, name in enumerate(set(names)):\n"
        "    pass\n"
        "d = name in {'x'}\n"
        "e = len(set(names))\n"
        "for name in {**first, **second}:\n"
        "    pass\n"
    )
    assert loops_over_sets(str(path)) == [1, 3, 4]
