"""A hundred tampered runs, each with the step at which a replay of every step has to find it.

That step is the first one whose record can show the change: a change of what step n reads or computes shows in the loss
of step n; a change of its update in the loss of step n + 1, or, after the last step of a segment, in the weights of the
checkpoint there; a change of state that no loss depends on (running statistics, a moving average) at the next
evaluation or checkpoint. A file that contradicts another one is found without a step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.data.division import Alone
from samebits.data.order import Order
from samebits.storage.manifest import OPTIMIZER, WEIGHTS
from tests.verify_trials import cheats
from tests.verify_trials.forgery import (
    edit_evaluation,
    edit_json,
    edit_settings,
    edit_state,
    edit_steps,
    edit_tensors,
    forge,
    read_record,
)
from tests.verify_trials.runs import KEPT, NUM_STEPS, PER_EPOCH, Cheat, settings, train

ANY = -1  # files that contradict each other: there is no step


@dataclass(frozen=True)
class Tamper:
    """A way to tamper with a run.

    Attributes:
        kind: What is tampered with.
        name: Kind and parameters.
        step: The step of the first difference; ANY if files contradict each other.
        make: Makes the tampered run in a new folder, given an honest run.
    """

    kind: str
    name: str
    step: int
    make: Callable[[Path, Path], None]


def tampers() -> list[Tamper]:
    """Return all of them."""
    return [*_data(), *_updates(), *_state(), *_other_runs(), *_weights(), *_chain(), *_metrics()]


def trained(cheat: Cheat, *overrides: str) -> Callable[[Path, Path], None]:
    """Train a tampered run."""
    return lambda _, folder: train(folder, overrides, cheat)


def edited(edit: Callable[[Path], Any], *, forged: bool = True) -> Callable[[Path, Path], None]:
    """Edit an honest run, and make its files agree with each other again."""

    def make(honest: Path, folder: Path) -> None:
        shutil.copytree(honest, folder)
        edit(folder)
        if forged:
            forge(folder)

    return make


def first_step_of(sample: int) -> int:
    """Return the first step that trains on a sample."""
    config = settings()[1]
    order = Order(101, config.global_batch, config.micro_batch, config.seed)
    return next(
        step.number
        for step in order.steps(Alone(), stop=NUM_STEPS)
        if any(sample in each.indices for each in step.micro_batches)
    )


def shown_after(step: int) -> int:
    """Return the next kept checkpoint or evaluation after a step."""
    return min(-(-(step + 1) // KEPT) * KEPT, -(-(step + 1) // PER_EPOCH) * PER_EPOCH, NUM_STEPS)


def _data() -> Iterator[Tamper]:
    for sample in (0, 13, 26, 39, 52, 65, 78, 91):
        at = first_step_of(sample)
        yield Tamper("sample swapped", f"sample {sample}", at, trained(cheats.with_sample(sample, (sample + 50) % 101)))
        yield Tamper("label poisoned", f"label of {sample}", at, trained(cheats.with_label(sample)))
    for at in (0, 7, 12, 19):
        yield Tamper("samples shuffled", f"samples of step {at}", at, trained(cheats.swapped_batches(at)))


def _updates() -> Iterator[Tamper]:
    for at in (0, 3, 9, 14, 18):
        yield Tamper("lr of a step", f"lr of step {at}", at, trained(cheats.with_lr(at, 1.01, is_hidden=False)))
    for at in (1, 6, 11, 17):  # the rate of the last step is 0
        yield Tamper("lr, hidden", f"lr of step {at}, hidden", at + 1, trained(cheats.with_lr(at, 1.5, is_hidden=True)))
    for at in (0, 5, 10, 15, 19):
        yield Tamper("step left out", f"update {at} left out", at + 1, trained(cheats.with_updates(at, 0)))
    for at in (2, 8, 13, 17):
        yield Tamper("extra update", f"update {at} twice", at + 1, trained(cheats.with_updates(at, 2)))
    for at in (4, 11, 16):
        make = trained(cheats.with_hyperparameter(at, "momentum", 0.5))
        yield Tamper("momentum of a step", f"momentum of step {at}", at + 1, make)
    for at in (3, 10, 18):
        make = trained(cheats.with_hyperparameter(at, "weight_decay", 0.5))
        yield Tamper("weight decay", f"weight decay of step {at}", at + 1, make)
    for at in (0, 8, 14, 19):
        yield Tamper("dropout off", f"no dropout in step {at}", at, trained(cheats.without_dropout(at)))


def _state() -> Iterator[Tamper]:
    for at in (2, 9, 16):
        make = trained(cheats.with_change_after(at, cheats.nudge_weight))
        yield Tamper("weight changed", f"a weight after step {at}", at + 1, make)
    for at in (5, 13):
        make = trained(cheats.with_change_after(at, cheats.forget_momentum))
        # The next update differs, and the loss after it.
        yield Tamper("momentum reset", f"momentum after step {at}", at + 2, make)
    for at in (1, 12, 18):
        make = trained(cheats.with_change_after(at, cheats.nudge_statistics))
        yield Tamper("batch norm", f"statistics after step {at}", shown_after(at), make)
    for at in (2, 7, 17):
        make = trained(cheats.without_average(at), "optim.ema=0.9")
        yield Tamper("moving average", f"average of step {at}", shown_after(at), make)
    for start in (0, 6, 13, 19):
        yield Tamper("other code", f"loss from step {start} on", start, trained(cheats.with_loss_term(start, 1e-3)))


def _other_runs() -> Iterator[Tamper]:
    def other(overrides: tuple[str, ...], nested: dict[str, Any], flat: dict[str, Any]) -> Callable[[Path, Path], None]:
        def make(_: Path, folder: Path) -> None:
            train(folder, overrides)
            edit_settings(folder, nested)
            forge(folder, settings=read_record(folder).settings | flat)

        return make

    for seed in (1, 2, 3, 4):
        yield Tamper("another seed", f"seed {seed}", 0, other((f"seed={seed}",), {"seed": 0}, {"seed": 0}))
    optim = settings()[1].optim.model_dump(mode="json")
    yield Tamper("other settings", "lr", 0, other(("optim.lr=0.06",), {"optim": optim}, {"optim.lr": optim["lr"]}))
    # The rate of the cosine schedule depends on the number of steps, but not that of the first one.
    yield Tamper("other settings", "3 of 4 epochs", 1, other(("epochs=3",), {"epochs": 4}, {"epochs": 4}))


def _weights() -> Iterator[Tamper]:
    def on_final(edit: Callable[[dict[str, Tensor]], None]) -> Callable[[Path, Path], None]:
        return edited(lambda run: edit_tensors(run / WEIGHTS, edit))

    def on_last_too(edit: Callable[[dict[str, Tensor]], None]) -> Callable[[Path, Path], None]:
        def both(run: Path) -> None:
            edit_tensors(run / WEIGHTS, edit)
            edit_tensors(run / "checkpoints" / f"step-{NUM_STEPS:06}" / WEIGHTS, edit)

        return edited(both)

    for name in ("0.weight", "5.bias"):
        make = on_final(lambda each, name=name: _flip(each, name))
        yield Tamper("final weights", f"a bit of {name}", NUM_STEPS, make)
    yield Tamper("final weights", "a buffer", NUM_STEPS, on_final(lambda each: _flip(each, "1.running_var")))
    yield Tamper("final weights", "all replaced", NUM_STEPS, on_final(_replace))
    make = on_last_too(lambda each: _flip(each, "5.weight"))
    yield Tamper("final weights", "a bit, last checkpoint too", NUM_STEPS, make)
    yield Tamper("final weights", "all, last checkpoint too", NUM_STEPS, on_last_too(_replace))
    for at in (4, 8, 12, 16):
        path = Path("checkpoints") / f"step-{at:06}" / WEIGHTS
        make = edited(lambda run, path=path: edit_tensors(run / path, lambda each: _flip(each, "0.weight")))
        yield Tamper("checkpoint", f"a bit of weights at {at}", at, make)
    for at in (4, 12):
        path = Path("checkpoints") / f"step-{at:06}" / OPTIMIZER
        make = edited(lambda run, path=path: edit_tensors(run / path, lambda each: _flip(each, min(each))))
        yield Tamper("checkpoint", f"a bit of momentum at {at}", at, make)
    make = edited(lambda run: edit_state(run, 8, lambda state: state["state"].update(loss_scale=2.0)))
    yield Tamper("checkpoint", "loss scale at 8", 8, make)


def _chain() -> Iterator[Tamper]:
    for at in (0, 10, 19):
        yield Tamper("chain", f"loss of {at}", at, edited(lambda run, at=at: _restate(run, at, loss=0.1)))
    for at in (5, 11):
        yield Tamper("chain", f"norm of {at}", at, edited(lambda run, at=at: _restate(run, at, norm=0.1)))
        yield Tamper("chain", f"lr of {at}", at, edited(lambda run, at=at: _restate(run, at, lr=0.1)))
    yield Tamper("chain", "samples of 6", 6, edited(lambda run: _restate(run, 6, samples=bytes(16))))
    yield Tamper("chain", "content of 7", 7, edited(lambda run: _restate(run, 7, content=b"7" * 16)))
    yield Tamper("chain", "outcome of 8", 8, edited(lambda run: _restate(run, 8, outcome=1)))
    yield Tamper("chain", "loss of 9, old root", 9, edited(lambda run: _restate(run, 9, loss=0.1), forged=False))
    for name, edit in (("cut off", lambda old: old[:-72]), ("too long", lambda old: old + old[-72:])):
        make = edited(lambda run, edit=edit: _rewrite(run / "steps.bin", edit), forged=False)
        yield Tamper("chain", name, ANY, make)


def _metrics() -> Iterator[Tamper]:
    def on(file: str, edit: Callable[[Any], None]) -> Callable[[Path, Path], None]:
        return edited(lambda run: edit_json(run / file, edit), forged=False)

    def internal(statement: Any) -> Any:
        return statement["predicate"]["buildDefinition"]["internalParameters"]

    yield Tamper("metrics", "result.json", ANY, on("result.json", lambda each: each["metrics"].update(top1=1.0)))
    yield Tamper("metrics", "best in result.json", ANY, on("result.json", lambda each: each["best"].update(value=1.0)))
    yield Tamper("metrics", "steps in result.json", ANY, on("result.json", lambda each: each.update(steps=21)))
    make = edited(lambda run: edit_evaluation(run, 10, top1=1.0), forged=False)
    yield Tamper("metrics", "metrics.jsonl", ANY, make)
    make = on("provenance.json", lambda each: internal(each)["evaluations"][1]["metrics"].update(top1=1.0))
    yield Tamper("metrics", "provenance.json, old root", ANY, make)
    for at in (5, 10, 20):
        make = edited(lambda run, at=at: edit_evaluation(run, at, top1=1.0))
        yield Tamper("metrics", f"top-1 after {at}, everywhere", at, make)
    yield Tamper("metrics", "an evaluation after 7", 7, edited(lambda run: edit_evaluation(run, 7, top1=1.0)))
    make = edited(lambda run: _rewrite(run / "metrics.jsonl", _without_last_evaluation))
    yield Tamper("metrics", "the last one is missing", ANY, make)
    make = on("provenance.json", lambda each: each["subject"][0]["digest"].update(sha256="0" * 64))
    yield Tamper("statement", "subject", ANY, make)
    make = on("provenance.json", lambda each: each["predicate"]["buildDefinition"]["resolvedDependencies"].pop(0))
    yield Tamper("statement", "dependencies", ANY, make)


def _flip(tensors: dict[str, Tensor], name: str) -> None:
    bits = tensors[name].view(-1).view(torch.int32)
    bits[0] ^= 1


def _replace(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator))


def _restate(run: Path, step: int, **changes: Any) -> None:
    edit_steps(run, step, lambda record: replace(record, **changes))


def _rewrite(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def _without_last_evaluation(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if b'"eval"' in line)
    return b"".join(lines[:last] + lines[last + 1 :])
