"""Tampered runs, each with the step at which a replay of every step has to find it, or what the verdict has to say.

That step is the first one whose record can show the change: a change of what step n reads or computes shows in the loss
of step n; a change of its update in the loss of step n + 1, or, after the last step of a segment, in the weights of the
checkpoint there; a change of state that no loss depends on (running statistics, a moving average) at the next
evaluation or checkpoint. A file that contradicts another one is found without a step. What a publisher leaves out of
the statement is no contradiction: the verdict names it as not stated.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.data.division import Alone
from samebits.data.order import Order
from samebits.replay.verify import Verdict
from samebits.storage.manifest import OPTIMIZER, WEIGHTS
from tests.verify_trials import cheats
from tests.verify_trials.forgery import (
    add_a_checkpoint,
    edit_evaluation,
    edit_json,
    edit_settings,
    edit_state,
    edit_steps,
    edit_tensors,
    forge,
    name_another_best,
    raise_the_best,
    read_record,
    smooth_the_curve,
    state_another_processor,
    state_other_typed_settings,
    turn_the_direction,
    without_evaluations,
    worst,
)
from tests.verify_trials.runs import KEPT, NUM_STEPS, PER_EPOCH, Cheat, settings, train

ANY = -1  # files that contradict each other: there is no step
_NOTES = ("not stated: ", "not compared: ", "metrics.jsonl does not have ")


@dataclass(frozen=True)
class Tamper:
    """A way to tamper with a run.

    Attributes:
        kind: What is tampered with.
        name: Kind and parameters.
        step: The step of the first difference; ANY if files contradict each other.
        make: Makes the tampered run in a new folder, given an honest run.
        said: A text in a line of the verdict: of a mismatch, or of a note where nothing contradicts the run.
        request: What the verifier asks for, as for `Request`.
    """

    kind: str
    name: str
    step: int
    make: Callable[[Path, Path], None]
    said: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)

    def is_found(self, verdict: Verdict) -> bool:
        """Return whether a verdict names the change, with the right step where there is one."""
        at = min((each.step for each in verdict.differences), default=ANY)
        texts = [*verdict.mismatches, *verdict.notes]
        is_said = any(self.said in each for each in texts)
        return is_said and at == self.step and (not verdict.is_verified or self.is_note)

    @property
    def is_note(self) -> bool:
        """Whether the run is verified, and a note names what it does not state."""
        return self.said.startswith(_NOTES)


def tampers() -> list[Tamper]:
    """Return all of them."""
    return [
        *_data(), *_updates(), *_state(), *_other_runs(), *_weights(), *_chain(), *_metrics(),
        *_left_out(), *_unlisted(),
    ]  # fmt: skip


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
    yield Tamper("fewer epochs", "3 of 4 epochs", 1, other(("epochs=3",), {"epochs": 4}, {"epochs": 4}))


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
    yield Tamper("final buffer", "a buffer", NUM_STEPS, on_final(lambda each: _flip(each, "1.running_var")))
    yield Tamper("final weights replaced", "all replaced", NUM_STEPS, on_final(_replace))
    make = on_last_too(lambda each: _flip(each, "5.weight"))
    yield Tamper("final weights and checkpoint", "a bit, last checkpoint too", NUM_STEPS, make)
    yield Tamper("final weights and checkpoint", "all, last checkpoint too", NUM_STEPS, on_last_too(_replace))
    for at in (4, 8, 12, 16):
        path = Path("checkpoints") / f"step-{at:06}" / WEIGHTS
        make = edited(lambda run, path=path: edit_tensors(run / path, lambda each: _flip(each, "0.weight")))
        yield Tamper("checkpoint", f"a bit of weights at {at}", at, make)
    for at in (4, 12):
        path = Path("checkpoints") / f"step-{at:06}" / OPTIMIZER
        make = edited(lambda run, path=path: edit_tensors(run / path, lambda each: _flip(each, min(each))))
        yield Tamper("checkpoint, momentum", f"a bit of momentum at {at}", at, make)
    make = edited(lambda run: edit_state(run, 8, lambda state: state["state"].update(loss_scale=2.0)))
    yield Tamper("checkpoint, loss scale", "loss scale at 8", 8, make)


def _chain() -> Iterator[Tamper]:
    for at in (0, 10, 19):
        yield Tamper("chain, loss", f"loss of {at}", at, edited(lambda run, at=at: _restate(run, at, loss=0.1)))
    for at in (5, 11):
        yield Tamper("chain, norm", f"norm of {at}", at, edited(lambda run, at=at: _restate(run, at, norm=0.1)))
        yield Tamper("chain, lr", f"lr of {at}", at, edited(lambda run, at=at: _restate(run, at, lr=0.1)))
    yield Tamper("chain, samples", "samples of 6", 6, edited(lambda run: _restate(run, 6, samples=bytes(16))))
    yield Tamper("chain, content", "content of 7", 7, edited(lambda run: _restate(run, 7, content=b"7" * 16)))
    yield Tamper("chain, outcome", "outcome of 8", 8, edited(lambda run: _restate(run, 8, outcome=1)))
    yield Tamper(
        "chain, old root", "loss of 9, old root", 9, edited(lambda run: _restate(run, 9, loss=0.1), forged=False)
    )
    for name, edit in (("cut off", lambda old: old[:-72]), ("too long", lambda old: old + old[-72:])):
        make = edited(lambda run, edit=edit: _rewrite(run / "steps.bin", edit), forged=False)
        yield Tamper(f"chain {name}", name, ANY, make)


def _metrics() -> Iterator[Tamper]:
    def on(file: str, edit: Callable[[Any], None]) -> Callable[[Path, Path], None]:
        return edited(lambda run: edit_json(run / file, edit), forged=False)

    def internal(statement: Any) -> Any:
        return statement["predicate"]["buildDefinition"]["internalParameters"]

    yield Tamper(
        "result, metrics", "result.json", ANY, on("result.json", lambda each: each["metrics"].update(top1=1.0))
    )
    yield Tamper(
        "result, best", "best in result.json", ANY, on("result.json", lambda each: each["best"].update(value=1.0))
    )
    yield Tamper("result, steps", "steps in result.json", ANY, on("result.json", lambda each: each.update(steps=21)))
    make = edited(lambda run: edit_evaluation(run, 10, top1=1.0), forged=False)
    yield Tamper("metrics", "metrics.jsonl", ANY, make)
    make = on("provenance.json", lambda each: internal(each)["evaluations"][1]["metrics"].update(top1=1.0))
    yield Tamper("metrics, old root", "provenance.json, old root", ANY, make)
    for at in (5, 10, 20):
        make = edited(lambda run, at=at: edit_evaluation(run, at, top1=1.0))
        yield Tamper("metrics everywhere", f"top-1 after {at}, everywhere", at, make)
    yield Tamper(
        "invented evaluation", "an evaluation after 7", 7, edited(lambda run: edit_evaluation(run, 7, top1=1.0))
    )
    make = edited(lambda run: _rewrite(run / "metrics.jsonl", _without_last_evaluation))
    yield Tamper("last evaluation missing", "the last one is missing", ANY, make)
    make = on("provenance.json", lambda each: each["subject"][0]["digest"].update(sha256="0" * 64))
    yield Tamper("statement, digest", "subject", ANY, make)
    make = on("provenance.json", lambda each: each["predicate"]["buildDefinition"]["resolvedDependencies"].pop(0))
    yield Tamper("statement, dependencies", "dependencies", ANY, make)


def _left_out() -> Iterator[Tamper]:
    def emptied(*names: str) -> Callable[[Path, Path], None]:
        def make(honest: Path, folder: Path) -> None:
            shutil.copytree(honest, folder)
            forge(folder, **{name: {} if name == "data" else [] for name in names})
            (folder / "environment.json").unlink()

        return make

    def hidden(*steps: int, forged: bool) -> Callable[[Path, Path], None]:
        return edited(lambda run: without_evaluations(run, lambda step: step in steps), forged=forged)

    def unnamed(kept: Callable[[str], bool]) -> Callable[[Path, Path], None]:
        def leave_out(content: Any) -> None:
            content["subject"] = [each for each in content["subject"] if kept(each["name"])]

        return edited(lambda run: edit_json(run / "provenance.json", leave_out), forged=False)

    for names in (("code",), ("environment",), ("data",), ("code", "environment", "data")):
        listed = ", ".join(names)
        yield Tamper(f"emptied {listed}", f"no {listed}", ANY, emptied(*names), f"not stated: the run's {listed}")
    stranger = {"training sample of a stranger": "0" * 16}
    make = edited(lambda run: forge(run, data=stranger), forged=False)
    yield Tamper("invented digest", "a digest of nothing", ANY, make, f"not compared: {next(iter(stranger))}")
    for steps in ((10,), (5, 10), (5, 10, 15)):
        make = hidden(*steps, forged=True)
        said = f"{len(steps)} evaluation{'s, the first' * (len(steps) > 1)} after step {steps[0]}, which eval_every=1"
        yield Tamper("hidden evaluation", f"none after {steps}", ANY, make, f"not stated: {said}")
    make = hidden(10, 15, 20, forged=False)
    said = "metrics.jsonl does not have the recorded evaluation after step 10"
    yield Tamper("metrics cut off", "from 10 on", ANY, make, said)
    said = "provenance.json: its subjects do not name "
    yield Tamper("no subjects", "none", ANY, unnamed(lambda _: False), said)
    yield Tamper("weights are no subject", "all but weights", ANY, unnamed(lambda name: name != WEIGHTS), said)
    yield Tamper("a checkpoint is no subject", "all but a checkpoint", ANY, unnamed(lambda name: "8" not in name), said)
    for name, said in (
        ("provenance.json", "provenance.json is missing, and there is result.json"),
        ("steps.bin", "steps.bin is missing"),
        (WEIGHTS, f"{WEIGHTS} is missing"),
    ):
        make = edited(lambda run, name=name: (run / name).unlink(), forged=False)
        yield Tamper(f"without {name}", f"{name} deleted", ANY, make, said)


def _unlisted() -> Iterator[Tamper]:
    def best(change: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
        return edited(
            lambda run: edit_json(run / "result.json", lambda each: each.update(best=change(run))), forged=False
        )

    not_best = "is not the best of the recorded evaluations"
    renamed = {"metric": "loss", "value": None, "step": 1, "better": "max"}
    yield Tamper("another best", "best of result.json is another", ANY, best(worst), not_best)
    yield Tamper("best of another metric", "best of result.json by loss", ANY, best(lambda _: renamed), not_best)
    yield Tamper("no best", "best of result.json is none", ANY, best(lambda _: None), "result.json: best is none")
    for kind, edit, said in (
        ("best.json, step", name_another_best, "best.json: "),
        ("best.json, value", raise_the_best, "best.json: "),
        ("best.json, direction", turn_the_direction, "best.json: "),
        ("curve smoothed", smooth_the_curve, "metrics.jsonl: loss of step 2 is 0.01"),
        ("another processor", state_another_processor, "environment.json: the environment of its worlds"),
        ("typed settings", state_other_typed_settings, "config.diff.yaml: epochs is 400"),
        ("checkpoint added", add_a_checkpoint, "checkpoints/step-000001 is not in provenance.json"),
    ):
        yield Tamper(kind, kind, ANY, edited(edit, forged=False), said)
    make = edited(lambda run: _reseed(run), forged=False)
    yield Tamper("settings edited", "seed in config.yaml", ANY, make, "config.yaml: seed is 1, recorded 0")
    for at in (4, 8, 16):
        path = Path("checkpoints") / f"step-{at:06}" / WEIGHTS
        make = edited(lambda run, path=path: edit_tensors(run / path, _replace))
        scratch = {"from_scratch": True}
        yield Tamper("another run's checkpoint", f"weights at {at} replaced", at, make, request=scratch)


def _reseed(run: Path) -> None:
    _rewrite(run / "config.yaml", lambda content: content.replace(b"seed: 0", b"seed: 1", 1))


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
