"""Records of trials: the first difference in the order in which a run computes, and the verdict."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from samebits.config.schema import RunConfig
from samebits.errors import ConfigError
from samebits.replay.compare import (
    EVALUATION,
    FORWARD,
    GRADIENTS,
    LOSS,
    SAMPLES,
    START,
    ModuleRecorder,
    digest_of,
    first_difference,
    merge_ranks,
)
from samebits.replay.judge import Outcome, judge
from samebits.replay.trial import Trial, small_sizes, steps_to_run


def record() -> dict[str, Any]:
    leaf = {
        "samples": {"7": "s"},
        "modules": [("input", "", "i"), ("input", "conv", "i"), ("output", "conv", "c"), ("output", "", "o")],
        "loss": {"cross_entropy": "l"},
    }
    step = {
        "micro-batches": {"0": leaf, "1": copy.deepcopy(leaf)},
        "gradients": {"conv.weight": "g"}, "buffers": {}, "weights": {"conv.weight": "w"}, "optimizer": {},
    }  # fmt: skip
    steps = {"0": step, "1": copy.deepcopy(step)}
    return {"start": {"initial weights": {"conv.weight": "w"}}, "steps": steps, "evaluation": {"top1": "0.5"}}


@pytest.mark.parametrize(
    ("path", "stage", "step", "name"),
    [
        (("start", "initial weights", "conv.weight"), START, None, "initial weights conv.weight"),
        (("steps", "1", "micro-batches", "1", "samples", "7"), SAMPLES, 1, "7"),
        (("steps", "0", "micro-batches", "1", "modules", 2), FORWARD, 0, "conv"),
        (("steps", "0", "micro-batches", "0", "loss", "cross_entropy"), LOSS, 0, "cross_entropy"),
        (("steps", "1", "gradients", "conv.weight"), GRADIENTS, 1, "conv.weight"),
        (("evaluation", "top1"), EVALUATION, None, "top1"),
    ],
)
def test_a_difference_is_named(path: tuple[Any, ...], stage: str, step: int | None, name: str) -> None:
    one, other = record(), record()
    place = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = ("output", "conv", "another") if stage == FORWARD else "another"
    found = first_difference(one, other)
    assert (found.stage, found.step, found.name) == (stage, step, name)
    assert first_difference(one, record()) is None


def test_the_ranks_of_a_world_are_merged_and_compared() -> None:
    ranks = [record(), record()]
    for rank, each in enumerate(ranks):
        for step in each["steps"].values():
            del step["micro-batches"][str(1 - rank)]
    merged, difference = merge_ranks(ranks)
    assert difference is None
    assert first_difference(record(), merged) is None
    ranks[1]["steps"]["1"]["weights"]["conv.weight"] = "another"
    _, difference = merge_ranks(ranks)
    assert (difference.stage, difference.step, difference.name) == ("weights", 1, "conv.weight")


def test_modules_are_recorded_in_the_order_of_computation() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    recorder = ModuleRecorder(model)
    events = recorder.start()
    model(torch.ones(1, 2))
    recorder.stop()
    model(torch.ones(1, 2))
    assert [event[:2] for event in events] == [
        ("input", ""), ("input", "0"), ("output", "0"), ("input", "1"), ("output", "1"), ("output", ""),
    ]  # fmt: skip


def test_a_digest_changes_with_any_bit_type_and_shape_and_not_with_strides() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)
    other = tensor.clone()
    other[1, 2, 3] = torch.nextafter(other[1, 2, 3], torch.tensor(100.0))
    values = [tensor, other, tensor.to(torch.float64), tensor.view(6, 4), {"x": tensor, "y": 1}, {"x": tensor, "y": 2}]
    assert len({digest_of(value) for value in values}) == len(values)
    transposed = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    assert digest_of(transposed) == digest_of(tensor)


def test_steps_reach_over_the_end_of_an_epoch() -> None:
    assert steps_to_run(4) == [0, 1, 2, 3, 4, 5]
    assert steps_to_run(72) == [0, 1, 2, 71, 72, 73]


@pytest.mark.parametrize("num_samples", [21, 41, 81, 241, 1681])
def test_no_step_has_a_single_sample(num_samples: int) -> None:
    sizes = dict(setting.split("=") for setting in small_sizes(RunConfig(recipe="x"), num_samples))
    assert num_samples % int(sizes["global_batch"]) != 1


def test_a_recipe_that_fails_in_one_process_is_reported_as_that_and_not_as_a_difference() -> None:
    error = ConfigError("the recipe raised TypeError: batch() got an unexpected argument", fix="Correct the recipe.")
    outcomes = [Outcome(Trial("1 process"), None, error), Outcome(Trial("2 processes", procs=2), None, error)]
    with pytest.raises(ConfigError, match="the recipe raised TypeError"):
        judge({"checks": {}, "state": [], "sources": []}, outcomes)
