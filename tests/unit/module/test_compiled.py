"""The compiled model, by torch's fastest backend: what is compiled, how often, and the error if it fails."""

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from samebits.cluster.activity import Activity
from samebits.config.schema import RunConfig
from samebits.errors import ConfigError
from samebits.module import compiled
from samebits.module.compiled import COMPILING, Compiled

CPU = torch.device("cpu")


class Net(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What torch has put into programs so far; nothing is made of them."""
    made: list[Any] = []

    def take(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=take))
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=False):
        yield made
    torch._dynamo.reset()


def test_each_shape_is_compiled_once_however_often_they_take_turns(programs: list[Any]) -> None:
    run = Compiled(Net(), CPU)
    for size in (4, 3, 4, 3, 2, 4, 3, 2):
        assert run(torch.ones(size, 2)).sum() == 4 * size
    assert len(programs) == 3


def test_too_many_shapes_end_the_run_not_the_compilation(programs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_SHAPES", 3)
    run = Compiled(Net(), CPU)
    for size in (2, 3, 4):
        run(torch.ones(size, 2))
    with pytest.raises(ConfigError, match="more than 3 shapes"):
        run(torch.ones(5, 2))
    assert len(programs) == 3


def test_a_machine_without_a_compiler_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none_found)
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        Compiled(nn.Linear(2, 2), CPU)


def test_compiling_is_a_sign_of_life_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BEAT_S", 0.01)
    pulse, seen = Activity(), threading.Event()

    def slow(graph: Any, inputs: Any) -> Any:
        for _ in range(10_000):
            if pulse.doing == COMPILING:
                seen.set()
                break
            threading.Event().wait(0.01)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=slow))
    run = Compiled(Net(), CPU)
    with run.watched(pulse):
        run(torch.ones(4, 2))
    assert seen.is_set()
    assert run.seconds > 0
    beats = pulse.num_beats
    threading.Event().wait(0.1)
    assert pulse.num_beats == beats


def test_compile_and_synchronized_batch_norm_are_refused_together() -> None:
    with pytest.raises(ValueError, match="compile=true cannot be combined with batch_norm=sync"):
        RunConfig(recipe="test", compile=True, batch_norm="sync")
