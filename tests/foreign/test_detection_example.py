"""The example of a detector: equal weights and mAP at any world size and after a kill; mAP is that of pycocotools."""

import contextlib
import io
import json
import re
import runpy
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.foreign.scripts import Ended, Starter
from tests.runs import ROOT

EXAMPLE = ROOT / "examples" / "detection.py"
OPTIONS = [
    "--epochs",
    "2",
    "--size",
    "96",
    "--global-batch",
    "6",
    "--micro-batch",
    "2",
    "--workers",
    "0",
    "--lr",
    "0.02",
]
NUM_IMAGES = 21  # not divisible by the number of ranks


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in COCO's format: squares of two colors, crowds among them, numbers of categories with a gap."""
    folder = tmp_path_factory.mktemp("squares")
    images, annotations = [], []
    for number in range(NUM_IMAGES):
        draw = np.random.default_rng(number)
        width, height = (int(side) for side in draw.integers(96, 120, 2))
        picture = draw.integers(0, 60, (height, width, 3)).astype(np.uint8)
        for _ in range(int(draw.integers(0 if number % 7 == 0 else 1, 4))):
            color, side = int(draw.integers(0, 2)), int(draw.integers(24, 48))
            x, y = int(draw.integers(0, width - side)), int(draw.integers(0, height - side))
            picture[y : y + side, x : x + side, color] = 230
            outline = [x, y, x + side, y, x + side, y + side, x, y + side]
            is_crowd = int(draw.random() < 0.1)
            region = {"size": [height, width], "counts": _run_lengths(picture.shape, x, y, side)}
            annotations.append(
                {
                    "id": len(annotations) + 1, "image_id": 100 - number, "category_id": (3, 7)[color],
                    "bbox": [x, y, side, side], "area": side * side, "iscrowd": is_crowd,
                    "segmentation": region if is_crowd else [outline],
                }
            )  # fmt: skip
        Image.fromarray(picture).save(folder / f"{number}.png")
        images.append({"id": 100 - number, "file_name": f"{number}.png", "width": width, "height": height})
    categories = [{"id": 3, "name": "red"}, {"id": 7, "name": "green"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "squares.json").write_text(json.dumps(content))
    return folder


def _run_lengths(shape: tuple[int, ...], x: int, y: int, side: int) -> list[int]:
    mask = np.zeros(shape[:2], bool)
    mask[y : y + side, x : x + side] = True
    column_first = mask.T.ravel()
    edges = np.flatnonzero(np.diff(column_first)) + 1
    return np.diff([0, *edges.tolist(), column_first.size]).tolist()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_detector_is_equal_at_any_world_size_and_after_a_stop(squares: Path, tmp_path: Path) -> None:
    given = [str(squares), str(squares / "squares.json"), *OPTIONS]
    with Starter() as starter:

        def run(world: int, name: str, kill_at: int | None = None) -> Ended:
            return starter.run_files([EXAMPLE], world, *given, "--checkpoint", tmp_path / name, kill_at=kill_at)

        alone = run(1, "alone.pt")
        # The first epoch has three steps, and its checkpoint is loaded on two processes.
        killed, resumed = run(3, "killed.pt", kill_at=4), run(2, "killed.pt")
    assert (alone.codes, resumed.codes) == ([0], [0, 0]), (alone, resumed)
    assert -signal.SIGKILL in killed.codes
    first, second, sha256 = _results(alone.texts[0])
    assert _results(killed.texts[0]) == [first]
    assert _results(resumed.texts[0]) == [second, sha256]
    assert f"epoch 2: bbox mAP {_map_of_pycocotools(squares, tmp_path / 'alone.pt'):.17g}" == second


def _results(text: str) -> list[str]:
    return re.findall(r"^(?:epoch .+|\w{64})$", text, re.MULTILINE)


def _map_of_pycocotools(folder: Path, checkpoint: Path) -> float:
    """Return the mAP of a checkpoint as pycocotools computes it from the detections of all images."""
    pycoco, pycocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    example = runpy.run_path(str(EXAMPLE))
    model = example["detector"]("fasterrcnn_mobilenet_v3_large_320_fpn", None, 3, 96)
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    model.eval()
    data = example["Detections"](str(folder), example["COCO"](str(folder / "squares.json")), example["PLAIN"], False)
    assert len(data) == NUM_IMAGES
    torch.set_num_threads(1)
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        results = [
            result
            for index, image_id in enumerate(data.image_ids)
            for result in example["coco_results"](model([data[index][0]])[0], image_id, {1: 3, 2: 7})
        ]
        truth = pycoco.COCO(str(folder / "squares.json"))
        evaluation = pycocoeval.COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])
