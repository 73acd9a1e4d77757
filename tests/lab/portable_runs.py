"""Short runs of the recipes in many environments: portable arithmetic gives one hash in all, `auto` does not.

    python -m tests.lab.portable_runs --recipes digits      # in this environment
    make bench-portable BENCH_ARGS="--parts table"                      # the table

Of {kernels} x {MKL_CBWR} x {threads} x {processes} x {oneDNN}, ten rows have each pair of two settings.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.models import VisionTransformer

from benchmarks.small_networks import assignment, spawn
from samebits.cluster.env import ALONE, RankAssignment
from samebits.config.schema import RunConfig
from samebits.launch.start import join_world
from samebits.recipes.catalog import find
from tests.ranks import recipes_in_ranks as small

RECIPES = ("digits", "mnist", "classify", "vit", "text", "pose", "segment")
KERNELS, MKL, THREADS, PROCESSES = ("default", "avx2", "avx512"), ("", "AVX2", "COMPATIBLE"), (1, 2, 4), (1, 2, 3)
WITH_ONEDNN = "111100100"
Row = tuple[str, str, int, int, bool]
ROWS: list[Row] = [
    (KERNELS[i], MKL[j], THREADS[(i + j) % 3], PROCESSES[(i + 2 * j) % 3], WITH_ONEDNN[3 * i + j] == "1")
    for i in range(3)
    for j in range(3)
]
ROWS.append((*ROWS[0][:4], not ROWS[0][4]))


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
    """Return the settings of a short run with evaluations."""
    if recipe in ("digits", "mnist"):
        more = [f"data.root={data / 'idx'}", "global_batch=20", "micro_batch=8"] if recipe == "mnist" else []
        config = find(recipe).load(["epochs=2", *more]).config
    elif recipe == "pose":
        config = small.pose()
    elif recipe == "segment":
        config = small.segment(data / "masks")
    elif recipe == "text":
        config = small.text(data / "lines", name="crnn")
    else:
        config = small.classify(data / "classes", model={"name": "resnet18"})
    return config.model_copy(update={"kernels": kernels, "max_steps": 20})


def tiny_vit() -> torch.nn.Module:
    """Return a vision transformer for 5 classes of 32 px."""
    return VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5)


def train(here: RankAssignment, recipes: Sequence[str], kernels: str, folder: Path) -> dict[str, str]:
    """Train recipes as a rank; the hash of each one's weights."""
    found = {}
    configs = {recipe: config_of(recipe, folder / "data", kernels) for recipe in recipes}
    with join_world(here, configs[recipes[0]]) as world:
        for recipe, config in configs.items():
            run = folder / f"{recipe}-{kernels}"
            if world.is_main:
                run.mkdir()
            outcome = small.carry_out(world, run, config, model=tiny_vit if recipe == "vit" else None)
            found[recipe] = str(outcome[0])[:16]
    return found


def _rank(rank: int, recipes: Sequence[str], kernels: str, threads: int, onednn: bool, folder: Path) -> None:
    torch.set_num_threads(threads)
    torch.backends.mkldnn.set_flags(onednn)
    found = train(assignment() if "RANK" in os.environ else ALONE, recipes, kernels, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def hashes(row: Row, recipes: Sequence[str], kernels: str, python: Sequence[str] = (sys.executable,)) -> dict[str, str]:
    """Train recipes in an environment, in processes of their own."""
    aten, mkl, threads, processes, onednn = row
    variables = {"ATEN_CPU_CAPABILITY": aten} if aten else {}
    variables |= {"MKL_CBWR": mkl} if mkl else {}
    command = [*python, "-m", "tests.lab.portable_runs", "--kernels", kernels, "--recipes", *recipes]
    command += ["--threads", str(threads), "--processes", str(processes)] + ([] if onednn else ["--no-onednn"])
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{row}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_table(recipes: Sequence[str], num_rows: int) -> bool:
    """Print the hashes of each row, by both kernels; whether portable arithmetic has one for each recipe."""
    print("| kernels | MKL_CBWR | threads | processes | oneDNN | " + " | ".join(recipes) + " |")
    print("|---|---|---|---|---|" + "---|" * len(recipes))
    every: list[dict[str, str]] = []
    for row in ROWS[:num_rows]:
        cells = []
        for kernels in ("portable", "auto"):
            found = hashes(row, recipes, kernels)
            cells.append([found[each][:8] for each in recipes])
            every += [found] if kernels == "portable" else []
        aten, mkl, threads, processes, onednn = row
        environment = f"| {aten} | {mkl or 'auto'} | {threads} | {processes} | {'on' if onednn else 'off'} |"
        print(environment, " | ".join(f"{one} ({other})" for one, other in zip(*cells, strict=True)), "|", flush=True)
    return all(found == every[0] for found in every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--kernels", default="portable")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--no-onednn", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "data").mkdir()
        make_data(folder / "data")
        arguments: tuple[Any, ...] = (given.recipes, given.kernels, given.threads, not given.no_onednn, folder)
        if given.processes > 1:
            spawn(_rank, given.processes, *arguments)
        else:
            _rank(0, *arguments)
        print((folder / "found.json").read_text())


if __name__ == "__main__":
    main()
