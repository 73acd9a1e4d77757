"""What a recipe reads beside its arguments is traced to the user's line."""

import os
import random
import secrets
import time
from collections.abc import Callable
from datetime import datetime

import numpy as np
import pytest
import torch

from samebits.check import sources
from samebits.check.causes import loops_over_sets
from samebits.check.sources import SourceTracer


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
    )
    assert loops_over_sets(str(path)) == (1, 3, 4)
