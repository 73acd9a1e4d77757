"""The classify recipe: networks equal to the reference's numbers, learning, predictions, figures, pictures."""

import csv
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from samebits.data.samples import Batch, DatasetSamples
from samebits.engine.parts import Parts
from samebits.errors import ConfigError
from samebits.metrics import classification
from samebits.metrics.classification import Accuracy
from samebits.optim.build import optimizer
from samebits.recipes.catalog import list_presets
from samebits.recipes.classify.config import Config, MakeConfig, ModelConfig
from samebits.recipes.classify.make import make
from samebits.recipes.classify.model import build_model
from samebits.recipes.classify.recipe import _write_counts, build, dataset_info, draw_evaluation
from samebits.recipes.results import draw_matrix, top_classes
from tests.recipes.class_folders import shapes as make_shapes
from tests.recipes.evaluated import evaluated, trained
from tests.recipes.parity import filled, noise, recorded

CLASSES = ["daisy", "dandelion", "roses", "sunflowers", "tulips"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("shapes"), 40, 64)


def config_of(root: Path, **settings: Any) -> Config:
    data = {"root": root, "size_px": 32, **settings.pop("data", {})}
    model = {"name": "resnet18", **settings.pop("model", {})}
    return Config.model_validate({"recipe": "classify", "data": data, "model": model, **settings})


def parts_of(config: Config) -> Parts:
    torch.manual_seed(0)
    return build(config, json.loads(json.dumps(dataset_info(config))))


def test_further_validation_sets_are_listed_once_and_a_later_one_is_listed_then(shapes: Path, tmp_path: Path) -> None:
    first = next(path for path in sorted(shapes.iterdir()) if path.is_dir())
    night = tmp_path / "night" / first.name
    night.mkdir(parents=True)
    for path in sorted(first.iterdir())[:3]:
        (night / path.name).symlink_to(path)
    config = config_of(shapes, data={"eval_sets": {"night": tmp_path / "night"}})
    info = json.loads(json.dumps(dataset_info(config)))
    (night / sorted(first.iterdir())[4].name).symlink_to(sorted(first.iterdir())[4])
    assert len(build(config, info).eval_sets["night"]()) == 3
    assert len(build(config, {**info, "eval_sets": {}}).eval_sets["night"]()) == 4
    with pytest.raises(ConfigError, match="name of a validation set"):
        config_of(shapes, data={"eval_sets": {"a.b": night}}).check_inputs()


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("resnet34", 21_287_237), pytest.param("resnet101", 42_510_405, marks=pytest.mark.full)],
)
def test_a_network_answers_as_the_reference(parity_folder: Path, name: str, num_parameters: int) -> None:
    known = json.loads((parity_folder / "resnet_models.json").read_text())[f"{name}_5"]
    expected = np.load(parity_folder / "resnet_outputs.npz", allow_pickle=False)
    model = filled(build_model(ModelConfig(name=name), 5)).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters == known["params"]
    assert [(key, list(tensor.shape)) for key, tensor in model.state_dict().items()] == list(known["state"].items())
    for case in ("sq224", "wide"):
        field = f"{name}_5/{case}"
        with torch.no_grad():
            logits = model(noise(expected[f"{field}/x_shape"], expected[f"{field}/x_seed"])).numpy()
        assert np.abs(logits - expected[f"{field}/logits"]).max() < 1e-4 * expected[f"{field}/logits"].std()


def test_three_steps_of_training_are_the_references(parity_folder: Path) -> None:
    data = np.load(parity_folder / "resnet_outputs.npz", allow_pickle=False)
    known = {name.removeprefix("resnet34_5/train/"): data[name] for name in data.files if "34_5/train" in name}
    # Batch norm over few samples: in float32 rounding decides single ReLUs, on each kind of processor others. The
    # recording's later steps have such flips too.
    model = filled(build_model(ModelConfig(name="resnet34"), 5)).double().train()
    settings = {"name": "sgd"} | {name: float(known[name]) for name in ("lr", "momentum", "weight_decay")}
    config = Config.model_validate({"recipe": "classify", "optim": settings})
    parts = build(config.model_copy(update={"model": ModelConfig(name="resnet18")}), _facts(CLASSES))
    update = optimizer(model, config.optim)
    inputs = noise(known["x_shape"], known["x_seed"]).double()
    targets = torch.from_numpy(known["targets"])
    batch = Batch(inputs, targets, torch.arange(len(targets)))
    losses = []
    for step in range(3):
        update.zero_grad()
        (loss,) = parts.loss(model(inputs), batch).values()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            compare(gradients, known, "grad", 1e-4)
        update.step()
        if step in (0, 2):
            compare(model.state_dict(), known, f"after{step + 1}", 1e-4 if step == 0 else 5e-4)
    assert losses[:2] == pytest.approx(known["losses"][:2].tolist(), rel=1e-5)
    assert losses[2] == pytest.approx(float(known["losses"][2]), rel=3e-4)


def compare(
    tensors: Mapping[str, Tensor | None], known: Mapping[str, np.ndarray[Any, Any]], group: str, tolerance: float
) -> None:
    for name, ours, theirs in recorded(tensors, known, group, 64):
        assert len(ours) == len(theirs), name
        assert np.abs(ours - theirs).max() <= tolerance * max(np.abs(theirs).max(), 1e-3), name


def _facts(classes: list[str]) -> dict[str, Any]:
    return {"classes": classes, "skipped": {}, "train": {}, "held_out": {}, "held_out_from": None}


def test_without_timm_its_networks_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as Python has it for what can't be imported
    with pytest.raises(ConfigError, match="timm/resnet10t needs timm, which is not installed"):
        build_model(ModelConfig(name="timm/resnet10t"), 5)


def test_networks_of_timm_have_the_head_that_is_needed_and_can_be_frozen() -> None:
    model = build_model(ModelConfig(name="timm/resnet10t", freeze="backbone"), 7)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["fc.weight", "fc.bias"]
    with pytest.raises(ConfigError, match="timm has no network called resnet10x"):
        build_model(ModelConfig(name="timm/resnet10x"), 7)


def test_label_smoothing_is_torchs(shapes: Path) -> None:
    parts = parts_of(config_of(shapes, loss={"label_smoothing": 0.2}))
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    (loss,) = parts.loss(logits, Batch(None, labels, torch.arange(6))).values()
    target = torch.full((6, 5), 0.2 / 5)
    target[torch.arange(6), labels] += 0.8
    assert loss.item() == pytest.approx(-(target * logits.log_softmax(1)).sum(1).mean().item())


def test_the_recipe_learns_answers_and_draws(shapes: Path, tmp_path: Path) -> None:
    # It is measured on what it was trained on: that it learns is what counts here, not how well it carries over.
    parts = parts_of(config_of(shapes, data={"root": None, "train": shapes, "eval": shapes, "crop_area": [0.6, 1.0]}))
    model = nn.Sequential(  # the network does not matter here, and a ResNet would take minutes
        nn.Conv2d(3, 16, 5, 2, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 5),
    )  # fmt: skip
    losses = trained(parts, torch.optim.Adam(model.parameters(), 5e-3), 12, 10, model)
    assert losses[-1] < losses[0] - 0.3

    held_out: Any = parts.eval_data()
    metric: Any = evaluated(parts, model)
    assert metric.num_samples == 200
    assert metric.result()["top1"] > 0.4
    assert set(metric.result()) == {"top1", *(f"top1/{name}" for name in dataset_info(config_of(shapes))["classes"])}

    path = held_out.files[0]
    with torch.no_grad():
        said = json.loads(json.dumps(parts.postprocess(model(parts.preprocess(path).unsqueeze(0))[0])))
    assert said["class"] == said["top"][0]["class"]
    assert len(said["top"]) == 5
    assert sum(entry["probability"] for entry in said["top"]) == pytest.approx(1, abs=1e-5)
    parts.draw(metric, held_out, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["confusion.csv", "confusion.png", "worst.png"]
    assert (tmp_path / "confusion.csv").read_text().startswith("ground truth,samples,correct,predicted circles,")
    drawn = parts.draw_prediction(path, said)
    assert drawn.width >= 360
    assert drawn.height > Image.open(path).height


def test_a_model_answers_when_its_data_is_gone(shapes: Path, tmp_path: Path) -> None:
    config = config_of(shapes)
    known = json.loads(json.dumps(dataset_info(config)))
    gone = config.model_copy(update={"data": config.data.model_copy(update={"root": tmp_path / "gone"})})
    parts = build(gone, known)
    assert parts.postprocess(torch.tensor([0.0, 0, 9, 0, 0]))["class"] == "squares"


@pytest.mark.parametrize("has_split", [False, True])
def test_a_run_is_asked_about_other_pictures(shapes: Path, tmp_path: Path, has_split: bool) -> None:
    data = {} if has_split else {"root": None, "train": shapes, "eval": shapes}
    first, other = config_of(shapes, data=data), config_of(shapes, data={**data, "eval": tmp_path})
    known = json.loads(json.dumps(dataset_info(first)))
    (tmp_path / "stars").mkdir()
    (tmp_path / "stars" / "one.jpg").write_bytes((shapes / "stars" / "0000.jpg").read_bytes())
    samples: Any = build(other, known).eval_data()
    assert samples.files == [tmp_path / "stars" / "one.jpg"]
    assert samples.batch(np.array([0]), np.zeros(1, np.uint64)).targets.tolist() == [known["classes"].index("stars")]
    assert len(build(first, known).eval_data()) == (40 if has_split else 200)


def test_synthetic_images_are_trained_on_by_the_printed_command(tmp_path: Path) -> None:
    out = tmp_path / "my shapes"
    said = make(MakeConfig(num_per_class=2, size_px=40), out)
    *_, preset, root = shlex.split(said.partition("train with")[2])
    assert preset.partition("/")[2] in [each.name for each in list_presets("classify")]
    assert root == f"data.root={out}"


def test_the_label_among_the_likeliest_is_counted_exactly_however_samples_are_shared() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(731, 12), torch.randint(12, (731,))
    names = [f"class {place}" for place in range(12)]
    whole = Accuracy(12, num_top=5, classes=names)
    whole.add(logits, Batch(None, labels, torch.arange(731)))
    expected = (logits.topk(5).indices == labels[:, None]).any(1).sum().item()
    assert whole.result()["top5"] == expected / 731
    merged = Accuracy(12, num_top=5, classes=names)
    for rank in range(4):
        own = Accuracy(12, num_top=5, classes=names)
        own.add(logits[rank::4], Batch(None, labels[rank::4], torch.arange(731)[rank::4]))
        merged.merge(json.loads(json.dumps(own.state())))
    assert merged.num_samples == 731
    assert merged.result() == whole.result()
    right = (logits.argmax(1) == labels)[labels == 3]
    assert whole.result()["top1/class 3"] == right.sum().item() / len(right)


def test_equal_logits_count_as_argmax_has_it_and_no_number_never_counts() -> None:
    metric = Accuracy(7, num_top=5)
    metric.add(torch.zeros(7, 7), Batch(None, torch.arange(7), torch.arange(7)))
    assert metric.result() == {"top1": 1 / 7, "top5": 5 / 7}
    metric = Accuracy(7, num_top=5)
    metric.add(torch.full((1, 7), torch.nan), Batch(None, torch.tensor([3]), torch.arange(1)))
    assert metric.result()["top5"] == 0


def test_many_classes_and_few_have_the_figures_that_say_something() -> None:
    few, many = (
        Accuracy(5, num_top=5, classes=["daisy", "dandelion", "roses", "sunflowers", "tulips"]),
        Accuracy(60, num_top=5, classes=[str(place) for place in range(60)]),
    )
    few.add(torch.eye(5)[:2], Batch(None, torch.tensor([0, 2]), torch.arange(2)))
    many.add(torch.eye(60)[:2], Batch(None, torch.tensor([0, 2]), torch.arange(2)))
    assert few.result() == {"top1": 0.5, "top1/daisy": 1.0, "top1/roses": 0.0}
    assert set(many.result()) == {"top1", "top5"}


def test_a_matrix_is_drawn_for_up_to_forty_classes(tmp_path: Path) -> None:
    for count in (40, 41):
        draw_matrix(
            np.eye(count, dtype=np.int64).tolist(), [str(label) for label in range(count)], tmp_path / str(count)
        )
    assert [path.parent.name for path in tmp_path.rglob("confusion.png")] == ["40"]


def test_with_too_many_classes_for_a_matrix_each_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "MAX_DENSE_CLASSES", 50)
    classes = [f"class {place}" for place in range(60)]
    labels, predictions = torch.tensor([3, 3, 3, 3, 3, 8]), torch.tensor([3, 9, 9, 5, 5, 8])
    metric = Accuracy(60, num_worst=4)
    metric.add(torch.eye(60)[predictions], Batch(None, labels, torch.arange(6)))
    samples = DatasetSamples([(torch.zeros(8, 8, 3, dtype=torch.uint8), int(label)) for label in labels])
    draw_evaluation(metric, samples, tmp_path, classes=classes)
    rows = (tmp_path / "confusion.csv").read_text().splitlines()
    assert rows[0] == "ground truth,samples,correct"
    assert (rows[4], rows[9], len(rows)) == ("class 3,5,1", "class 8,1,1", 61)
    assert not (tmp_path / "confusion.png").exists()
    assert (tmp_path / "worst.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "cell"),
    [("=1+1", "'=1+1"), ("@SUM(A1)", "'@SUM(A1)"), ("-2", "'-2"), ("a\x1b[31m", "a\\x1b[31m"), ("rose", "rose")],
)
def test_a_class_name_is_no_formula_and_no_escape_sequence_in_the_table(tmp_path: Path, name: str, cell: str) -> None:
    _write_counts(np.array([[3, 2]]), [], [name], tmp_path / "counts.csv")
    with (tmp_path / "counts.csv").open(newline="") as file:
        assert list(csv.reader(file))[1] == [cell, "3", "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["counts.csv"]


def test_an_answer_names_the_five_likeliest() -> None:
    said = top_classes(torch.arange(9.0), num_top=5, classes=[f"class {place}" for place in range(9)])
    assert [entry["class"] for entry in said["top"]] == [f"class {place}" for place in (8, 7, 6, 5, 4)]
