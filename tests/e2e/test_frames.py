"""How far it is from a command to the optimizer: functions of this package that are on the stack in its step."""

from pathlib import Path

from tests.runs import samebits

RECIPE = """
import os
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.e2e.tiny_recipe import *


def note(*_):
    frame, names = sys._getframe(), []
    while frame:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("samebits"):
            names.insert(0, f"{module.rpartition('.')[2]}.{frame.f_code.co_name}")
        frame = frame.f_back
    with open(f"frames-{os.environ.get('RANK', '0')}", "w") as file:
        print(*names, "optimizer.step", file=file)


register_optimizer_step_pre_hook(note)
"""


IN_COMMAND = ["main.main", "main.run", "train.train", "start_run.train_command"]
IN_ENGINE = ["loop.train", "step.run_step", "optimizer.step"]


def test_few_functions_lie_between_a_launched_process_and_the_optimizer(tmp_path: Path) -> None:
    frames = frames_of(tmp_path, "--procs", "2", "cluster.recovery=in_step")
    assert frames[-4:] == ["start_run._train_worker", *IN_ENGINE]
    assert len(frames) <= 6


def test_few_functions_lie_between_the_command_and_the_optimizer(tmp_path: Path) -> None:
    assert frames_of(tmp_path, "--procs", "1") == [*IN_COMMAND, *IN_ENGINE]


def frames_of(folder: Path, *options: str) -> list[str]:
    (folder / "recipe.py").write_text(RECIPE)
    samebits("train", "recipe.py", "epochs=1", "max_steps=1", *options, "--run-dir", "run", cwd=folder)
    return (folder / "frames-0").read_text().split()
