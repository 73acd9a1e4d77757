"""A segmentation run from its folder alone: metrics, predictions, pictures, and the exported network."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from samebits.recipes.segment.make import draw_image
from tests.runs import result, samebits

TRAIN = ["segment_shapes", "data.num_train=16", "data.num_eval=5", "model.width=2", "epochs=1"]


@pytest.mark.full
def test_a_segmentation_run_is_evaluated_predicts_and_is_exported(tmp_path: Path) -> None:
    samebits("train", *TRAIN, "--procs", 1, "--run-dir", "run", cwd=tmp_path)
    trained = result(tmp_path / "run")["metrics"]
    # Equal at another number of processes, with an evaluation batch on each rank.
    done = samebits("eval", "run", "--procs", 2, "--json", cwd=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1]) == trained
    assert {"mIoU", "Dice", "pixel_accuracy", "IoU/circles"} <= trained.keys()

    Image.fromarray(draw_image(64, 1)[0]).resize((100, 60)).save(tmp_path / "a.png")
    Image.fromarray(draw_image(64, 2)[0]).convert("CMYK").save(tmp_path / "b.jpg")
    done = samebits("predict", "run", "a.png", "b.jpg", "--draw", "drawn", "--json", cwd=tmp_path)
    predictions = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["file"] for each in predictions] == ["a.png", "b.jpg"]
    for each in predictions:
        assert sum(row["share"] for row in each["classes"]) == pytest.approx(1, abs=1e-5)
        assert each["masks"].keys() == {row["class"] for row in each["classes"]}
        assert all(mask["size"] == [64, 64] for mask in each["masks"].values())
    assert len(list((tmp_path / "drawn").iterdir())) == 2

    samebits("export", "run", "--to", "onnx", cwd=tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "run/model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input": np.zeros((3, 3, 64, 64), np.float32)})
    assert logits.shape == (3, 4, 64, 64)
    known = session.get_modelmeta().custom_metadata_map
    assert json.loads(known["classes"]) == ["background", "circles", "squares", "triangles"]
