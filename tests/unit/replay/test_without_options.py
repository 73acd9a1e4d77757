"""`samebits verify RUN`, without options, finds runs whose end, one file, or data are not what they state."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.data.samples import Batch
from samebits.engine.step import run_step
from samebits.storage.manifest import WEIGHTS
from tests.verify_trials.cheats import Changed, with_loss_term
from tests.verify_trials.forgery import edit_evaluation, edit_json, edit_lines, edit_steps, edit_tensors, forge
from tests.verify_trials.runs import KEPT, NUM_STEPS, Cheat, train, verified

Make = Callable[[Path, Path], None]
SHARE = 0.05  # what the command takes


def at_the_end(edit: Callable[[Tensor], Any], name: str = "") -> Make:
    """Replace final weights, those of the last checkpoint too, and make all files agree."""

    def edit_all(tensors: dict[str, Tensor]) -> None:
        for each in [tensors[name]] if name else [each for each in tensors.values() if each.is_floating_point()]:
            edit(each)

    def make(honest: Path, run: Path) -> None:
        shutil.copytree(honest, run)
        edit_tensors(run / WEIGHTS, edit_all)
        edit_tensors(run / "checkpoints" / f"step-{NUM_STEPS:06}" / WEIGHTS, edit_all)
        forge(run)

    return make


def a_file(edit: Callable[[Path], Any]) -> Make:
    def make(honest: Path, run: Path) -> None:
        shutil.copytree(honest, run)
        edit(run)

    return make


def on_json(name: str, edit: Callable[[Any], Any]) -> Make:
    return a_file(lambda run: edit_json(run / name, edit))


def with_text(name: str, before: str, after: str) -> Make:
    def edit(run: Path) -> None:
        text = (run / name).read_text()
        assert before in text
        (run / name).write_text(text.replace(before, after, 1))

    return a_file(edit)


def planted(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / f"step-{KEPT:06}", run / "checkpoints" / "step-000002")


def without_statement(run: Path) -> None:
    (run / "provenance.json").unlink()
    edit_json(run / "result.json", lambda each: [each.pop(name) for name in ("root", "chain")])
    edit_tensors(run / WEIGHTS, lambda tensors: [each.zero_() for each in tensors.values()])


def on_data(change: Callable[[Batch], Batch]) -> Make:
    """Train all steps on other data, as an honest recorder would."""
    cheat: Cheat = lambda job, step, loader, flag: run_step(job, step, Changed(loader, change), flag)  # type: ignore[arg-type]  # noqa: E731
    return lambda _, run: train(run, (), cheat)


def inputs(edit: Callable[[Tensor], Tensor]) -> Make:
    return on_data(lambda batch: replace(batch, inputs=edit(batch.inputs)))


def targets(edit: Callable[[Tensor], Tensor]) -> Make:
    return on_data(lambda batch: replace(batch, targets=edit(batch.targets)))


FORGERIES: dict[str, Make] = {
    "end: zeros": at_the_end(lambda each: each.zero_()),
    "end: ones": at_the_end(lambda each: each.fill_(1)),
    "end: negated": at_the_end(lambda each: each.neg_(), "5.weight"),
    "end: scaled": at_the_end(lambda each: each.mul_(1.001)),
    "end: noise": at_the_end(lambda each: each.add_(torch.rand(each.shape) * 1e-5)),
    "end: a bias": at_the_end(lambda each: each[0].add_(1e-4), "5.bias"),
    "end: classes exchanged": at_the_end(lambda each: each.copy_(each.flip(0)), "5.weight"),
    "end: a running mean": at_the_end(lambda each: each[0].add_(1e-3), "1.running_mean"),
    "end: a running variance": at_the_end(lambda each: each.mul_(2), "1.running_var"),
    "end: rounded to bf16": at_the_end(lambda each: each.copy_(each.bfloat16().float())),
    "file: top-1 in result.json": on_json("result.json", lambda each: each["metrics"].update(top1=1.0)),
    "file: steps in result.json": on_json("result.json", lambda each: each.update(steps=21)),
    "file: an evaluation": a_file(lambda run: edit_evaluation(run, 10, top1=1.0)),
    "file: one evaluation more": a_file(lambda run: edit_evaluation(run, 7, top1=1.0)),
    "file: a loss in metrics.jsonl": a_file(lambda run: edit_lines(run, "train", 5, loss=0.01)),
    "file: a loss in steps.bin": a_file(lambda run: edit_steps(run, 3, lambda record: replace(record, loss=0.1))),
    "file: step in best.json": on_json("checkpoints/best.json", lambda each: each.update(step=each["step"] + 1)),
    "file: metric in best.json": on_json("checkpoints/best.json", lambda each: each.update(metric="loss")),
    "file: environment.json": on_json(
        "environment.json", lambda each: each["worlds"][0]["environment"].update(torch="1")
    ),
    "file: config.yaml": with_text("config.yaml", "seed: 0", "seed: 1"),
    "file: a planted checkpoint": a_file(planted),
    "file: no provenance.json": a_file(without_statement),
    "file: no steps.bin": a_file(lambda run: (run / "steps.bin").unlink()),
    "file: no weights": a_file(lambda run: (run / WEIGHTS).unlink()),
    "data: other labels": targets(lambda each: (each + 1) % 3),
    "data: one class": targets(torch.zeros_like),
    "data: half the labels": targets(lambda each: torch.where(torch.arange(len(each)) % 2 == 0, each, (each + 1) % 3)),
    "data: brighter": inputs(lambda each: each * 1.1),
    "data: mirrored": inputs(lambda each: each.flip(-1)),
    "data: another term in the loss": lambda _, run: train(run, (), with_loss_term(0, 1e-3)),
}
QUICK = ("end: zeros", "file: no provenance.json", "file: a planted checkpoint", "data: other labels")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in FORGERIES]
)
@pytest.mark.one_in(3)
def test_a_forged_run_is_found_without_options(honest: Path, tmp_path: Path, name: str) -> None:
    assert len(FORGERIES) == 30
    run = tmp_path / "run"
    FORGERIES[name](honest, run)
    verdict = verified(run, share=SHARE)
    assert not verdict.is_verified
    assert verdict.mismatches or verdict.differences


def test_the_honest_run_is_verified_without_options(honest: Path) -> None:
    verdict = verified(honest, share=SHARE)
    assert verdict.is_verified
    assert verdict.replayed[-1].stop == NUM_STEPS
    assert json.loads(verdict.to_json())["share"] < 1
