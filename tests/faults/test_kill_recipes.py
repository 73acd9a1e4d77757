"""kill -9 of a rank in the recipes' own training, with their augmentation: the same weights as without it."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.faults import Job
from tests.ranks.recipes_in_ranks import draw_digits
from tests.runs import kill_session, samebits, start, wait_until, weights
from tests.synthetic_people import write_coco

POSE_NET = "model={width: 4, num_modules: [1, 1, 1], num_blocks: 1, stem_width: 8, stem_blocks: 1, deconv_blocks: 0}"
RECIPES = {
    "classify": ["data.root=shapes", "model.name=resnet18", "data.size_px=32", "global_batch=12", "micro_batch=4"],
    "pose": [
        "data.root=people", "batch_norm=sync", "data.size_px=64", "global_batch=6",
        "micro_batch=2", POSE_NET,
    ],
    "text": ["data.train=l.tsv", "data.val_fraction=0.1", "global_batch=12", "micro_batch=4"],
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("recipe", [
    pytest.param("classify", marks=pytest.mark.lab), "pose", pytest.param("text", marks=pytest.mark.lab),
])  # fmt: skip
def test_a_rank_that_is_killed_changes_nothing(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path
    if recipe == "classify":
        samebits("data", "make", "classify", "--out", folder / "shapes", "num_per_class=20", cwd=folder)
    elif recipe == "pose":
        write_coco(folder / "people", num_train=48, num_eval=4, size_px=64)
    else:
        draw_digits(folder, 96)
    settings = [*RECIPES[recipe], "epochs=2", "device=cpu", "checkpoint.every=3 steps", "report.every_steps=1"]
    samebits("train", recipe, *settings, "--procs", 1, "--run-dir", folder / "alone", cwd=folder)

    more = ["--procs", 2, "--max-restarts", 1, "--run-dir", folder / "run"]
    running = Job(folder, start("train", recipe, *settings, *more, cwd=folder))
    try:
        running.wait_for_step(4)
        os.kill(wait_until(running.workers)[1].pid, signal.SIGKILL)
        code, said = running.ended()
    finally:
        kill_session(running.process)
    assert code == 0, said
    assert "was killed by signal 9" in said
    assert "restart 1 of 1" in said
    assert weights(folder / "run") == weights(folder / "alone"), said
