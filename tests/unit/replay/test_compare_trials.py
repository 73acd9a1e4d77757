"""Records of trials: the first difference in the order in which a run computes, and the verdict."""

import copy
import json

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
    difference_of_pass,
    first_difference,
    merge_ranks,
)
from samebits.replay.judge import Outcome, judge
from samebits.replay.trace import OPERATIONS, Call, MicroTrace, Recorder, StepTrace, Trace, digest, returned
from samebits.replay.trial import Trial, small_sizes, steps_to_run


def record() -> Trace:
    calls = [Call("", "Net", None, "i", "o"), Call("conv", "Conv2d", 0, "i", "c")]
    leaf = MicroTrace({"7": "s"}, calls, loss={"cross_entropy": "l"})
    step = StepTrace(
        {"0": leaf, "1": copy.deepcopy(leaf)}, gradients={"conv.weight": "g"}, weights={"conv.weight": "w"}
    )
    steps = {"0": step, "1": copy.deepcopy(step)}
    return Trace({"initial weights": {"conv.weight": "w"}}, steps, {"top1": "0.5"})


@pytest.mark.parametrize(
    ("path", "stage", "step", "name"),
    [
        ("start['initial weights']['conv.weight']", START, None, "initial weights conv.weight"),
        ("steps['1'].micro_batches['1'].samples['7']", SAMPLES, 1, "7"),
        ("steps['0'].micro_batches['1'].calls[1].output", FORWARD, 0, "conv"),
        ("steps['0'].micro_batches['1'].calls[1].inputs", FORWARD, 0, "conv"),
        ("steps['0'].micro_batches['0'].loss['cross_entropy']", LOSS, 0, "cross_entropy"),
        ("steps['1'].gradients['conv.weight']", GRADIENTS, 1, "conv.weight"),
        ("evaluation['top1']", EVALUATION, None, "top1"),
    ],
)
def test_a_difference_is_named(path: str, stage: str, step: int | None, name: str) -> None:
    one, other = record(), record()
    exec(f"other.{path} = 'another'", {"other": other})
    found = first_difference(one, other)
    assert (found.stage, found.step, found.name) == (stage, step, name)
    assert first_difference(one, record()) is None


def test_other_modules_with_equal_values_are_no_difference_and_others_are_named_in_both() -> None:
    one = record().steps["0"].micro_batches["0"]
    wrapped = copy.deepcopy(one)
    wrapped.calls[1].name = "conv.0"
    wrapped.calls.insert(1, Call("conv", "Sequential", 0, "i", "c"))
    wrapped.calls[2].parent = 1
    assert difference_of_pass(one, wrapped) is None
    for call, output in zip(wrapped.calls, ("o2", "c2", "c2"), strict=True):
        call.output = output
    found = difference_of_pass(one, wrapped)
    assert (found.name, found.calls) == ("conv", (1, 2))


def test_the_ranks_of_a_world_are_merged_and_compared() -> None:
    ranks = [record(), record()]
    for rank, each in enumerate(ranks):
        for step in each.steps.values():
            del step.micro_batches[str(1 - rank)]
    merged, difference = merge_ranks(ranks)
    assert difference is None
    assert first_difference(record(), merged) is None
    ranks[1].steps["1"].weights["conv.weight"] = "another"
    _, difference = merge_ranks(ranks)
    assert (difference.stage, difference.step, difference.name) == ("weights", 1, "conv.weight")


def test_a_trace_is_the_same_after_a_way_through_json() -> None:
    text = json.dumps(record().to_plain())
    assert json.dumps(Trace.from_plain(json.loads(text)).to_plain()) == text


def test_calls_are_recorded_in_the_order_of_computation() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    recorder = Recorder([model], detail=OPERATIONS)
    recorder.start(0, {})
    model(torch.ones(1, 2))
    recorder.end_forward()
    model(torch.ones(1, 2))
    micro_batch = recorder.step({}).micro_batches["0"]
    recorder.remove()
    found = [(call.name, call.kind, call.parent) for call in micro_batch.calls]
    assert found == [("", "Sequential", None), ("0", "Linear", 0), ("1", "ReLU", 0)]
    assert [number for number, _ in returned(micro_batch.calls)] == [1, 2, 0]
    names = [(each.call, each.name) for each in micro_batch.operations]
    assert (1, "aten.addmm") in names
    assert (2, "aten.relu") in names


def test_a_forward_pass_that_fails_leaves_no_tracing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("height")

    recorder = Recorder([model := nn.Sequential(nn.Linear(2, 2), Fails())], detail=OPERATIONS)
    recorder.start(0, {})
    with pytest.raises(KeyError):
        model(torch.ones(1, 2))
    num_modes = torch._C._len_torch_dispatch_stack()
    recorder.remove()
    assert num_modes == 0


def test_a_digest_changes_with_any_bit_type_and_shape_and_not_with_strides() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)
    other = tensor.clone()
    other[1, 2, 3] = torch.nextafter(other[1, 2, 3], torch.tensor(100.0))
    values = [tensor, other, tensor.to(torch.float64), tensor.view(6, 4), {"x": tensor, "y": 1}, {"x": tensor, "y": 2}]
    assert len({digest(value) for value in values}) == len(values)
    transposed = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    assert digest(transposed) == digest(tensor)


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
        judge({"again": [], "losses": {}, "suspects": []}, outcomes)
