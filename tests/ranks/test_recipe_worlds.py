"""The recipes over real processes: one hash in all worlds, with any number of workers, and after stops.

If a change of the results of training is intended, `python -m tests.ranks.test_recipe_worlds` records new values;
the commit message gives the reason.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samebits.recipes.classify.config import MakeConfig as MakeShapes
from samebits.recipes.classify.make import make as make_shapes
from samebits.recipes.segment.config import MakeConfig as MakeMasks
from samebits.recipes.segment.make import make as make_masks
from tests.ranks.rank_pool import RankPool
from tests.ranks.recipes_in_ranks import Small, carry_out, classify, draw_digits, pose, segment, text
from tests.ranks.recorded import check_recorded, record
from tests.recipes.coco_regions import write_coco
from tests.recipes.test_classify_augment import ALL

FULL = pytest.mark.full


def shapes(folder: Path) -> Path:
    """100 synthetic images in class folders."""
    make_shapes(MakeShapes(num_per_class=20, size_px=80), folder / "shapes")
    return folder / "shapes"


def lines(folder: Path) -> Path:
    """50 lines of digits."""
    (folder / "lines").mkdir()
    draw_digits(folder / "lines")
    return folder / "lines"


def masks(folder: Path, is_coco: bool) -> Path:
    """27 synthetic images with masks, or with regions of COCO."""
    make_masks(MakeMasks(num_images=27, size_px=40), folder / "made")
    return write_coco(folder / "made") if is_coco else folder / "made"


# Makes the data and the settings. Each is given a number of workers.
CASES: dict[str, Callable[[Path], Callable[..., Any]]] = {
    "classify, micro": lambda folder: partial(classify, shapes(folder), batch_norm="micro"),
    "classify, sync": lambda folder: partial(classify, shapes(folder), batch_norm="sync"),
    "classify, augmented": lambda folder: partial(classify, shapes(folder), augment=ALL, data={"train_px": 24}),
    "text, crnn": lambda folder: partial(text, lines(folder), name="crnn"),
    "text, fast": lambda folder: partial(text, lines(folder), name="fast"),
    "pose, sync": lambda _: lambda **__: pose(batch_norm="sync", epochs=1),
    "pose, micro": lambda _: lambda **__: pose(batch_norm="micro"),
    "segment, masks": lambda folder: partial(segment, masks(folder, False)),
    "segment, coco": lambda folder: partial(segment, masks(folder, True)),
}


@pytest.mark.parametrize(
    ("case", "num_steps", "worlds", "stop_at"),
    [
        ("classify, micro", 20, {2: 0}, 7),
        pytest.param("classify, sync", 20, {3: 0}, 7, marks=FULL),
        pytest.param("classify, augmented", 20, {2: 1}, 9, marks=FULL),
        pytest.param("text, crnn", 8, {3: 1}, 4, marks=FULL),
        pytest.param("text, fast", 8, {4: 0}, 4, marks=FULL),
        pytest.param("pose, sync", 5, {3: 0}, 2, marks=FULL),
        pytest.param("pose, micro", 10, {2: 0}, 4, marks=FULL),
        ("segment, masks", 8, {3: 1}, 5),
        pytest.param("segment, coco", 8, {2: 0}, 5, marks=FULL),
    ],
)
@pytest.mark.one_in(2)
def test_a_recipe_gives_one_hash_in_all_worlds_and_after_a_stop(
    pool: RankPool, tmp_path: Path, case: str, num_steps: int, worlds: dict[int, int], stop_at: int
) -> None:
    settings, model = CASES[case](tmp_path), Small if case.startswith("classify") else None
    (straight,) = pool.run(1, carry_out, tmp_path / "1", settings(), -1, model)
    weights, figures, losses, is_done = straight
    assert is_done
    assert len(losses) == num_steps
    assert {"text": "cer", "segment": "mIoU", "classify": "top1", "pose": "AP"}[case.split(",")[0]] in figures
    for world, num_workers in worlds.items():
        config = settings(num_workers=num_workers)
        assert pool.run(world, carry_out, tmp_path / str(world), config, -1, model) == [straight] * world
    pool.run(2, carry_out, tmp_path / "stopped", settings(), stop_at, model)
    for other in pool.run(3, carry_out, tmp_path / "stopped", settings(), -1, model):
        assert other == (weights, figures, losses[stop_at + 1 :], True)


@pytest.mark.full
def test_a_resnet_too_gives_one_hash(pool: RankPool, tmp_path: Path) -> None:
    config = classify(shapes(tmp_path), model={"name": "resnet18"})
    config = config.model_copy(update={"global_batch": 40, "micro_batch": 8, "epochs": 1})
    ((weights, figures, *_),) = pool.run(1, carry_out, tmp_path / "1", config)
    for other in pool.run(3, carry_out, tmp_path / "3", config):
        assert other[:2] == (weights, figures)


def twenty_steps(recipe: str, pool: RankPool, folder: Path) -> tuple[str, list[float]]:
    config, model = {
        "classify": lambda: (classify(shapes(folder)), Small),
        "text": lambda: (text(lines(folder), epochs=5), None),
        "pose": lambda: (pose(epochs=4), None),
    }[recipe]()
    ((weights, _, losses, _),) = pool.run(1, carry_out, folder / "run", config, -1, model)
    return weights, losses


def recorded(recipe: str) -> Path:
    return Path(__file__).with_name(f"{recipe}_recorded.json")


@pytest.mark.parametrize(
    ("recipe", "close"),
    [
        ("classify", {"tolerance": 1e-2}),  # with another JPEG library too the last digits differ
        # Batch norm over two samples of one pixel each: from the fifth step on, rounding decides single ReLUs.
        ("pose", {"num_close": 4, "tolerance": 5e-4}),
        pytest.param("text", {}, marks=FULL),
    ],
)
def test_twenty_steps_are_the_recorded_ones(pool: RankPool, tmp_path: Path, recipe: str, close: dict[str, Any]) -> None:
    check_recorded(recorded(recipe), partial(twenty_steps, recipe), pool, tmp_path, **close)


if __name__ == "__main__":
    for name in ("classify", "text", "pose"):
        record(recorded(name), partial(twenty_steps, name))
