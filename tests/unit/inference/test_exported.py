"""What `samebits export` writes: the model's own outputs, in each format, with all that its input is made by."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import nn

from samebits.cli.main import run as command
from samebits.cluster.world import alone
from samebits.engine.build import build_parts, dataset_info_for, input_shape
from samebits.engine.parts import Parts
from samebits.errors import CheckpointError, ConfigError
from samebits.inference import export as export_module
from samebits.inference.export import FIELD, INPUT, export
from samebits.inference.predict import predict
from samebits.recipes.catalog import find
from samebits.recipes.pose import recipe as _pose  # noqa: F401  OpenCV sets a variable when it is imported
from samebits.storage.run_folder import is_export
from tests.ranks.recipes_in_ranks import draw_digits
from tests.runs import python

DOTS = str(Path(__file__).with_name("recipe_of_dots.py"))
TINY = {
    "digits": [],
    "shapes": ["data.size_px=32", "model.name=resnet18"],
    "text": ["model.width=4", "model.num_hidden=4", "model.name=fast", "data.width=80"],
    "pose": ["model.width=2", "model.num_modules=[1,1,1]", "model.num_blocks=1", "model.stem_width=4",
             "model.stem_blocks=1", "model.deconv_blocks=1", "data.size_px=64"],
    "segment_shapes": ["model.width=2"],
}  # fmt: skip


def model_of(preset: str) -> tuple[Parts, list[str]]:
    """A recipe's fresh parts, batch norms with statistics of their own; the weights are then in `w.safetensors`."""
    settings = [*TINY[preset]]
    if preset == "shapes":
        for name, shade in {"dark": 30, "bright": 220}.items():
            Path("shapes", name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 32), (shade,) * 3).save(Path("shapes", name, f"{number}.jpg"))
        settings.append("data.root=shapes")
    if preset == "text":
        draw_digits(Path(), 30)
        settings += ["data.train=l.tsv", "data.val_fraction=0.1"]
    found = find(preset)
    config = found.load(settings).config
    dataset_info = dataset_info_for(found, config, alone("cpu"), None)
    parts = build_parts(config, lambda: found.build(config, dataset_info))
    for module in parts.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    save_file({name: tensor.contiguous() for name, tensor in parts.model.state_dict().items()}, "w.safetensors")
    return parts, settings


def outputs_of(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        found = model.eval()(batch)
    return list(found) if isinstance(found, list | tuple) else [found]


# A file of weights that an earlier export has written.
EARLIER = save({"a": torch.zeros(1)}, metadata={"samebits": "0.1.0"})


@pytest.mark.parametrize(
    "preset",
    [
        "digits",
        *(pytest.param(preset, marks=pytest.mark.full) for preset in ("shapes", "text", "pose", "segment_shapes")),
    ],
)
def test_an_onnx_file_gives_the_models_outputs_for_any_number_of_samples(preset: str) -> None:
    parts, settings = model_of(preset)
    made = export("w.safetensors", "onnx", "net.onnx", settings, preset=preset)
    assert 0 <= made.difference <= 1e-4
    session = onnxruntime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape[0] == "batch"
    batch = torch.randn(3, *made.input_shape)
    theirs = session.run(None, {INPUT: batch.numpy()})
    for one, other in zip(outputs_of(parts.model, batch), theirs, strict=True):
        torch.testing.assert_close(torch.from_numpy(other), one, atol=1e-4, rtol=1e-3)
    known = session.get_modelmeta().custom_metadata_map
    wanted = {
        "digits": "classes", "shapes": "classes", "text": "alphabet", "pose": "skeleton", "segment_shapes": "classes",
    }[preset]  # fmt: skip
    value = known[wanted] if wanted == "alphabet" else json.loads(known[wanted])
    assert value == json.loads(json.dumps(parts.metadata[wanted]))
    assert json.loads(known["input"]) == list(made.input_shape)


@pytest.mark.parametrize("preset", ["digits", pytest.param("text", marks=pytest.mark.lab)])
def test_a_torch_program_gives_the_models_outputs_and_knows_the_classes(preset: str) -> None:
    parts, settings = model_of(preset)
    made = export("w.safetensors", "torch-export", "net.pt2", settings, preset=preset)
    files = {FIELD: ""}
    program = torch.export.load("net.pt2", extra_files=files).module()
    batch = torch.randn(4, *made.input_shape)
    torch.testing.assert_close(program(batch), outputs_of(parts.model, batch)[0])
    assert json.loads(files[FIELD])["input"] == list(made.input_shape)
    assert json.loads(files[FIELD])["mean"] == parts.metadata["mean"]


def test_safetensors_have_the_weights_and_the_classes() -> None:
    parts, _ = model_of("digits")
    made = export("w.safetensors", "safetensors", "net.safetensors", preset="digits")
    assert made.difference == 0
    with safe_open("net.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == [str(digit) for digit in range(10)]
        for name, tensor in parts.model.state_dict().items():
            assert torch.equal(file.get_tensor(name), tensor)


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=pytest.mark.full if to == "onnx" else []) for to in export_module.ENDINGS]
)
def test_a_file_of_someone_else_is_never_written_over_and_an_export_is(to: str) -> None:
    model_of("digits")
    Path("net").write_text("mine: a text on samebits")
    with pytest.raises(CheckpointError, match="net already exists"):
        export("w.safetensors", to, "net", preset="digits")
    assert Path("net").read_text() == "mine: a text on samebits"
    Path("net").unlink()
    export("w.safetensors", to, "net", preset="digits")
    assert is_export(Path("net"))
    export("w.safetensors", to, "net", preset="digits")
    Path("link").symlink_to("net")
    with pytest.raises(CheckpointError, match="link already exists"):
        export("w.safetensors", to, "link", preset="digits")


@pytest.mark.parametrize("to", ["safetensors", "torch-export"])
def test_a_file_with_other_outputs_is_not_written(to: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model_of("digits")
    Path("net").write_bytes(EARLIER)
    real = export_module._flat
    num_calls = 0

    def off(outputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return [tensor + 1e-2 * (num_calls > len(export_module.BATCHES)) for tensor in real(outputs)]

    monkeypatch.setattr(export_module, "_flat", off)
    with pytest.raises(CheckpointError, match="outputs are not the model's own"):
        export("w.safetensors", to, "net", preset="digits")
    num_calls = 0
    assert (
        command(["export", "w.safetensors", "--preset", "digits", "--to", to, "--out", "net"])
        == CheckpointError.exit_code
    )
    assert "difference" in capsys.readouterr().err
    assert Path("net").read_bytes() == EARLIER
    assert sorted(path.name for path in Path().iterdir()) == ["net", "w.safetensors"]


@pytest.mark.parametrize("values", [(math.nan, 0.0, 0.0), (0.0, math.nan, 0.0), (0.0, 0.0, math.nan)])
def test_an_output_of_nan_is_a_difference(values: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("digits")
    left = iter([*[0.0] * len(values), *values])
    real = export_module._flat
    monkeypatch.setattr(export_module, "_flat", lambda outputs: [tensor + next(left) for tensor in real(outputs)])
    with pytest.raises(CheckpointError, match="outputs are not the model's own"):
        export("w.safetensors", "safetensors", "net", preset="digits")
    some, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    assert math.isnan(export_module._difference([some, some], [some, bad]))


class Unusual(nn.Module):
    """With an operator that ONNX has not."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(inputs.flatten(1))


def test_what_onnx_can_not_hold_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"torch\.onnx can't take this model"):
        export_module._to_onnx(Unusual(), torch.zeros(2, 1, 4, 4), {})


def test_without_onnx_the_fix_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as Python has it for what can't be imported
    with pytest.raises(ConfigError, match="needs onnxscript") as caught:
        export("w.safetensors", "onnx", preset="digits")
    assert caught.value.slots["fix"] == 'Run pip install "samebits[onnx]".'


def test_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't be exported to 'coreml'"):
        export("w.safetensors", "coreml", preset="digits")


def test_a_recipe_without_an_input_shape_uses_that_of_a_validation_sample() -> None:
    parts, settings = model_of("digits")
    found = find("digits")
    config = found.load(settings).config
    assert input_shape(replace(parts, input_shape=None), config) == (1, 8, 8)


def test_a_model_that_takes_a_dict_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(DOTS)
    config = found.load().config
    with pytest.raises(ConfigError, match="one tensor of floats"):
        input_shape(found.build(config, {"classes": ["dark", "bright"]}), config)


def test_the_command_prints_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    model_of("digits")
    assert command(["export", "w.safetensors", "--preset", "digits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model.safetensors  0.3 MB")
    assert lines[1:] == [
        "  input    (batch, 1, 8, 8)",
        "  checked  largest difference 0 of the largest output, 0 at most",
        "  metadata classes, mean, std, preprocess",
    ]
    assert command(["export", "w.safetensors", "--preset", "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "model.safetensors"


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
    done = python("-P", EXAMPLE, "net.onnx", *files)
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
