"""Short runs of the recipes in many environments: portable arithmetic gives one hash in all, `auto` does not.

    python -m tests.lab.portable_runs --recipes digits                       # in this environment
    OLDEST_TORCH=VENV/bin/python make bench-portable BENCH_ARGS="--parts table"     # the table

Of {kernels} x {MKL_CBWR} x {threads} x {processes} x {oneDNN} x {torch}, eleven rows have each pair of two settings.
Rows with the oldest torch need a virtual environment of its own, with the newest versions of all else:

    python -m venv VENV; VENV/bin/pip install torch==2.11.0 torchvision==0.26.0 ".[all]"
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.models import VisionTransformer

from benchmarks.small_networks import assignment, spawn
from samebits.cluster.env import ALONE, RankAssignment
from samebits.config.schema import CheckpointConfig, RunConfig
from samebits.launch.start import join_world
from samebits.recipes.catalog import find
from tests.ranks import recipes_in_ranks as small

RECIPES = ("digits", "mnist", "classify", "vit", "text", "pose", "segment")
WITH_ADAMW = ("digits-adamw", "classify-adamw")  # half as many steps
KERNELS, MKL, THREADS, PROCESSES = ("default", "avx2", "avx512"), ("", "AVX2", "COMPATIBLE"), (1, 2, 4), (1, 2, 3)
TORCH = ("newest", "oldest")
Row = tuple[str, str, int, int, bool, str]
ROWS: list[Row] = [
    (KERNELS[i], MKL[j], THREADS[k], PROCESSES[n], onednn == 0, TORCH[torch])
    for i, j, k, n, onednn, torch in (
        (0, 0, 0, 0, 0, 0), (1, 1, 1, 2, 0, 1), (2, 2, 2, 2, 1, 0), (2, 1, 0, 1, 1, 1), (0, 2, 2, 1, 0, 1),
        (1, 0, 1, 1, 1, 0), (1, 1, 2, 0, 1, 1), (2, 2, 1, 0, 0, 0), (0, 1, 1, 2, 1, 0), (1, 2, 0, 2, 0, 1),
        (2, 0, 2, 2, 0, 1),
    )
]  # fmt: skip
STEPS, STEPS_TO_DEATH = 20, 5
OLDEST = os.environ.get("OLDEST_TORCH", "")  # a Python with the oldest supported torch


def make_data(folder: Path) -> None:
    """Write the data of all recipes: noise and bars, by integers only."""
    rng = np.random.default_rng(0)

    def picture(path: Path, *shape: int, values: int = 256) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, values, shape, dtype=np.uint8)).save(path, quality=90)

    for number in range(100):  # JPEG and PNG files
        ending = "jpg" if number % 2 else "png"
        picture(folder / "classes" / "abcde"[number % 5] / f"{number}.{ending}", 40 + number % 7, 40, 3)
    for number in range(27):
        picture(folder / "masks" / "images" / f"{number}.png", 40, 40, 3)
        picture(folder / "masks" / "masks" / f"{number}.png", 40, 40, values=3)
    (folder / "lines").mkdir()
    small.draw_digits(folder / "lines")
    (folder / "idx").mkdir()
    for name, count in (("train", 200), ("t10k", 50)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            values = rng.integers(0, 256 if len(shape) == 3 else 10, shape, dtype=np.uint8)
            head = np.array([2048 + len(shape), *shape], ">u4").tobytes()
            (folder / "idx" / f"{name}-{kind}-ubyte").write_bytes(head + values.tobytes())


def config_of(recipe: str, data: Path, kernels: str) -> RunConfig:
    """Return the settings of a run of STEPS steps with evaluations."""
    recipe, _, optimizer = recipe.partition("-")
    if recipe in ("digits", "mnist"):
        more = [f"data.root={data / 'idx'}", "global_batch=20", "micro_batch=8"] if recipe == "mnist" else []
        config = find(recipe).load(["epochs=2", *more]).config
    elif recipe == "pose":
        config = small.pose(epochs=4)
    elif recipe == "segment":
        config = small.segment(data / "masks").model_copy(update={"epochs": 5})
    elif recipe == "text":
        config = small.text(data / "lines", name="crnn", epochs=5)
    else:
        config = small.classify(data / "classes", model={"name": "resnet18"})
    saved = CheckpointConfig(every="2 steps")
    changed = {"kernels": kernels, "max_steps": STEPS, "checkpoint": saved}
    if optimizer:
        optim = config.optim.model_copy(update={"name": optimizer, "lr": 1e-3, "weight_decay": 0.05})
        changed |= {"max_steps": STEPS // 2, "optim": optim}
    return config.model_copy(update=changed)


def tiny_vit() -> torch.nn.Module:
    """Return a vision transformer for 5 classes of 32 px."""
    return VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5)


class Killed(small.Losses):
    """Ends its process as `kill -9` does, after some steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def step(self, *arguments: Any) -> None:
        super().step(*arguments)
        if len(self.losses) == self._steps:
            os.kill(os.getpid(), signal.SIGKILL)


def train(here: RankAssignment, recipes: Sequence[str], kernels: str, killed: int, folder: Path) -> dict[str, str]:
    """Train recipes as a rank, from their newest checkpoints; the hash of each one's weights."""
    found = {}
    configs = {recipe: config_of(recipe, folder / "data", kernels) for recipe in recipes}
    with join_world(here, configs[recipes[0]]) as world:
        for recipe, config in configs.items():
            run = folder / f"{recipe}-{kernels}"
            if world.is_main:
                run.mkdir(exist_ok=True)
            model = tiny_vit if recipe == "vit" else None
            outcome = small.carry_out(world, run, config, model=model, told=Killed(killed))
            found[recipe] = str(outcome[0])[:16]
    return found


def _rank(
    rank: int, recipes: Sequence[str], kernels: str, threads: int, onednn: bool, killed: int, folder: Path
) -> None:
    torch.set_num_threads(threads)
    torch.backends.mkldnn.set_flags(onednn)
    found = train(assignment() if "RANK" in os.environ else ALONE, recipes, kernels, killed, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def can_run(row: Row) -> bool:
    """Whether the row's torch is here."""
    return row[5] == "newest" or bool(OLDEST)


def _start(
    row: Row, recipes: Sequence[str], kernels: str, folder: Path, python: str, killed: int = 0
) -> subprocess.CompletedProcess[str]:
    aten, mkl, threads, processes, onednn, torch_version = row
    # Threads of more processes than cores would spin while they wait for each other.
    variables = {"OMP_WAIT_POLICY": "passive"} | ({"ATEN_CPU_CAPABILITY": aten} if aten else {})
    variables |= {"MKL_CBWR": mkl} if mkl else {}
    python = OLDEST if torch_version == "oldest" else python
    command = [python, "-m", "tests.lab.portable_runs", "--kernels", kernels, "--recipes", *recipes]
    command += ["--threads", str(threads), "--processes", str(processes)] + ([] if onednn else ["--no-onednn"])
    command += ["--killed-after", str(killed), "--folder", str(folder)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def hashes(row: Row, recipes: Sequence[str], kernels: str, python: str = sys.executable) -> dict[str, str]:
    """Train recipes in an environment, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        done = _start(row, recipes, kernels, Path(folder), python)
        if done.returncode:
            raise RuntimeError(f"{row}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        found: dict[str, str] = json.loads(Path(folder, "found.json").read_text())
        return found


def hash_after_kills(rows: Sequence[Row], recipe: str) -> str:
    """Train a recipe in portable arithmetic, killed in each environment but the last and continued in the next."""
    with tempfile.TemporaryDirectory() as folder:
        for row in rows[:-1]:
            done = _start(row, [recipe], "portable", Path(folder), sys.executable, STEPS_TO_DEATH)
            if "SIGKILL" not in done.stderr and done.returncode != -signal.SIGKILL:
                raise RuntimeError(f"{recipe} was not killed in {row}: {done.returncode}\n{done.stderr[-3000:]}")
        done = _start(rows[-1], [recipe], "portable", Path(folder), sys.executable)
        if done.returncode:
            raise RuntimeError(f"{recipe} in {rows[-1]}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        return str(json.loads(Path(folder, "found.json").read_text())[recipe])


def name_of(row: Row) -> str:
    aten, mkl, threads, processes, onednn, torch_version = row
    words = (aten, f"MKL {mkl or 'auto'}", f"{threads} threads", f"{processes} processes")
    return ", ".join((*words, f"oneDNN {'on' if onednn else 'off'}", f"{torch_version} torch"))


def print_table(recipes: Sequence[str], rows: Sequence[Row]) -> bool:
    """Print the hashes of each row, by both kernels; whether portable arithmetic has one for each recipe."""
    rows = [row for row in rows if can_run(row)]
    every: list[dict[str, str]] = []

    def show(title: str, cells: Iterable[str]) -> None:
        print(f"| {title} | {' | '.join(cells)} |", flush=True)

    show("portable (auto)", recipes)
    print("|---" * (len(recipes) + 1) + "|")
    for row in rows:
        portable, auto = (hashes(row, recipes, kernels) for kernels in ("portable", "auto"))
        show(name_of(row), (f"{portable[each][:8]} ({auto[each][:8]})" for each in recipes))
        every.append(portable)
    # From one, each row is an environment that a killed run continues in.
    chain = rows[:: max(1, len(rows) // (STEPS // STEPS_TO_DEATH))][: STEPS // STEPS_TO_DEATH]
    every.append({recipe: hash_after_kills(chain, recipe) for recipe in recipes})
    show(f"killed in {len(chain) - 1} of these, continued in another", (every[-1][each][:8] for each in recipes))
    return all(found == every[0] for found in every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES + WITH_ADAMW, default=list(RECIPES))
    parser.add_argument("--kernels", default="portable")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--no-onednn", action="store_true")
    parser.add_argument("--killed-after", type=int, default=0, metavar="STEPS")
    parser.add_argument("--folder", type=Path, help="of data and runs; default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or Path(place)
        if not (folder / "data").exists():
            (folder / "data").mkdir()
            make_data(folder / "data")
        arguments = (given.recipes, given.kernels, given.threads, not given.no_onednn, given.killed_after, folder)
        if given.processes > 1:
            spawn(_rank, given.processes, *arguments)
        else:
            _rank(0, *arguments)
        print((folder / "found.json").read_text())


if __name__ == "__main__":
    main()
