"""An ONNX file says how to make its input from an image: `examples/onnx_predict.py` needs nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from samebits.inference.export import export
from samebits.inference.predict import predict
from tests.unit.inference.test_exported import model_of

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "onnx_predict.py"


def draw(path: str, width: int, height: int) -> None:
    """A smooth image whose left, right, top and bottom differ."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    Image.fromarray(np.stack([across, down, 255 - across], axis=2).astype(np.uint8)).save(path)


@pytest.mark.parametrize(
    "more",
    [
        ["data.size_px=48", "data.eval_resize_px=48", "data.mean=[0.1,0.2,0.3]", "data.std=[0.5,0.4,0.6]"],
        pytest.param([], marks=pytest.mark.full),
    ],
)
def test_the_example_gives_the_prediction_of_samebits(more: list[str]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)  # probabilities far from a half: other libraries resize to slightly other pixels
        _, settings = model_of("shapes")
    settings += more
    state = load_file("w.safetensors")
    # Fresh weights give nearly equal probabilities, of which either may be the largest.
    save_file({name: value * 50 if name.startswith("fc.") else value for name, value in state.items()}, "w.safetensors")
    export("w.safetensors", "onnx", "net.onnx", settings, preset="shapes")
    files = ["wide.png", "high.png", "alpha.png", "deep.png"]
    draw(files[0], 90, 60)
    draw(files[1], 61, 80)
    colors = Image.open(files[0])
    colors.putalpha(Image.linear_gradient("L").resize(colors.size))
    colors.save(files[2])
    Image.fromarray(np.asarray(Image.open(files[1]).convert("L")).astype(np.uint16) * 257).save(files[3])
    done = subprocess.run(
        [sys.executable, "-P", EXAMPLE, "net.onnx", *files], capture_output=True, text=True, check=True, timeout=180
    )
    mine = predict("w.safetensors", files, settings, preset="shapes")
    for file, line, prediction in zip(files, done.stdout.splitlines(), mine, strict=True):
        found = re.fullmatch(r"(\S+)  class (\w+)  probability ([\d.]+)%", line)
        assert (found[1], found[2]) == (file, prediction["class"])
        assert float(found[3]) / 100 == pytest.approx(prediction["probability"], abs=0.01)


@pytest.mark.parametrize(
    ("preset", "steps"),
    [
        ("digits", {"colors": "gray, light on dark", "resize_px": [8, 8]}),
        ("text", {"colors": "gray", "resize_px": [32, 80]}),
        ("segment_shapes", {"colors": "RGB", "resize_px": [64, 64]}),
        ("pose", {"colors": "RGB"}),
    ],
)
def test_the_file_of_each_recipe_has_its_preprocessing(preset: str, steps: dict[str, object]) -> None:
    _, settings = model_of(preset)
    made = export("w.safetensors", "safetensors", "net.safetensors", settings, preset=preset)
    assert json.loads(json.dumps(made.metadata["preprocess"])) == steps


def test_the_steps_of_a_segmentation_give_its_input() -> None:
    parts, settings = model_of("segment_shapes")
    export("w.safetensors", "onnx", "net.onnx", settings, preset="segment_shapes")
    texts = onnxruntime.InferenceSession("net.onnx").get_modelmeta().custom_metadata_map
    mean, std, steps = (json.loads(texts[name]) for name in ("mean", "std", "preprocess"))
    draw("wide.png", 128, 96)
    height, width = steps["resize_px"]
    image = Image.open("wide.png").resize((width, height), Image.Resampling.BILINEAR)
    pixels = (np.asarray(image, np.float32) / 255 - np.float32(mean)) / np.float32(std)
    torch.testing.assert_close(
        torch.from_numpy(pixels.transpose(2, 0, 1)), parts.preprocess(Path("wide.png")), atol=0.05, rtol=0
    )
