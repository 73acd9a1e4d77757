"""Commands name the weights that they take, and take those that a run's statement lists."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.errors import CheckpointError, ConfigError
from samebits.inference.predict import evaluate
from samebits.inference.trained_model import TrainedModel, describe_weights
from samebits.storage.weights import read, weights_sha256
from tests.verify_trials.forgery import edit_json, edit_tensors


def replace_the_weights(run: Path) -> None:
    edit_tensors(run / "weights.safetensors", lambda tensors: [each.zero_() for each in tensors.values()])
    found = weights_sha256(read(run / "weights.safetensors"))
    edit_json(run / "result.json", lambda result: result.update(weights_sha256=found))


def replace_a_checkpoint(run: Path) -> None:
    path = run / "checkpoints" / "step-000008" / "weights.safetensors"
    edit_tensors(path, lambda tensors: [each.zero_() for each in tensors.values()])


def plant_a_checkpoint(run: Path) -> None:
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-000008", folder / "step-000002")
    edit_json(folder / "best.json", lambda best: best.update(step=2))


def name_another_best(run: Path) -> None:
    edit_json(run / "checkpoints" / "best.json", lambda best: best.update(value=0.99))


@pytest.mark.parametrize(
    ("change", "which", "text"),
    [
        (replace_the_weights, "last", "weights.safetensors is not the file"),
        (replace_a_checkpoint, "step-000008", "step-000008/weights.safetensors is not the file"),
        (plant_a_checkpoint, "best", "step-000002/weights.safetensors is not the file"),
        (plant_a_checkpoint, "step-000002", "step-000002/weights.safetensors is not the file"),
        (name_another_best, "best", "is not that of its record"),
    ],
)
def test_weights_that_the_statement_does_not_list_are_refused(
    honest: Path, tmp_path: Path, change: Callable[[Path], None], which: str, text: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    assert evaluate(run, checkpoint="best" if which == "best" else "last")
    change(run)
    with pytest.raises(CheckpointError, match=text):
        evaluate(run, checkpoint=which)


def test_a_statement_itself_is_checked(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    replace_the_weights(run)
    sha256 = json.loads((run / "result.json").read_text())["weights_sha256"]
    edit_json(
        run / "provenance.json",
        lambda plain: plain["predicate"]["buildDefinition"]["internalParameters"].update(weights_sha256=sha256),
    )
    with pytest.raises(CheckpointError, match=r"provenance\.json"):
        evaluate(run)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    from PIL import Image

    run = tmp_path / "run"
    for name in ("a", "b"):
        for index in range(3):
            folder = run / "data" / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
    return run


def write_settings(run: Path, *overrides: str) -> None:
    from samebits.config import document
    from samebits.provenance.identity import plain_settings
    from samebits.recipes.catalog import find

    config = find("classify").load(["data.val_fraction=0.5", *overrides]).config
    (run / "config.yaml").write_text(document.to_yaml(plain_settings(config)))


@pytest.mark.parametrize("name", ["root", "train", "link"])
def test_data_in_the_run_folder_is_refused_unless_the_user_names_it(images: Path, tmp_path: Path, name: str) -> None:
    place, setting = images / "data", f"data.{name}"
    if name == "link":
        shutil.move(images / "data", tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        setting = "data.root"
    write_settings(images, f"{setting}={place}", *([f"data.eval={place}"] if name == "train" else []))
    with pytest.raises(ConfigError, match=f"{setting} lies in the run folder"):
        TrainedModel(images).settings()
    typed = [f"{setting}={place}", *([f"data.eval={place}"] if name == "train" else [])]
    assert TrainedModel(images, typed).settings()[1].recipe == "classify"


def test_data_elsewhere_needs_no_word(images: Path, tmp_path: Path) -> None:
    shutil.move(images / "data", tmp_path / "run-data")
    write_settings(images, f"data.root={tmp_path / 'run-data'}")
    assert TrainedModel(images).settings()[1].recipe == "classify"


BEST = {"step": 184, "metric": "top1", "value": 0.99444}


def folder(path: Path, best: object = BEST, result: object = None, *, is_complete: bool = True) -> Path:
    (path / "checkpoints").mkdir()
    (path / "checkpoints/best.json").write_text(json.dumps(best))
    (path / "result.json").write_text(json.dumps(result or {"steps": 230, "metrics": {"top1": 0.99167}}))
    if is_complete:
        (path / "weights.safetensors").touch()
        (path / "provenance.json").touch()
    return path


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ("last", "final weights (step 230): top-1 99.17%; --checkpoint best (step 184): 99.44%"),
        ("best", "best checkpoint (step 184): top-1 99.44%"),
        ("step-000046", "checkpoint step-000046"),
    ],
)
def test_the_final_weights_are_named_with_the_best_ones(tmp_path: Path, which: str, line: str) -> None:
    assert describe_weights(folder(tmp_path), which) == line
    assert len(line) <= 80


@pytest.mark.parametrize(
    "change", [{"step": 4, "value": 0.99}, {"value": 0.99}, {"metric": [[]]}, {"metric": None}, {"value": "0.9"}]
)
def test_a_best_value_that_the_record_contradicts_is_not_shown(honest: Path, tmp_path: Path, change: object) -> None:
    run = shutil.copytree(honest, tmp_path / "run")
    assert "best of the run" in describe_weights(run, "last") or "--checkpoint best" in describe_weights(run, "last")
    edit_json(run / "checkpoints" / "best.json", lambda content: content.update(change))
    assert "best" not in describe_weights(run, "last")
    assert describe_weights(run, "best") == "best checkpoint"


def test_weights_that_no_statement_lists_are_named(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (run / "provenance.json").unlink()
    first, second = describe_weights(run, "last").split("\n")
    assert first.startswith("final weights (step 230)")
    assert second.startswith("provenance.json is missing")
    assert len(second) <= 80


def test_final_weights_may_be_the_best(tmp_path: Path) -> None:
    run = folder(tmp_path, {**BEST, "step": 230, "value": 0.99167})
    assert describe_weights(run, "last") == "final weights (step 230), the best of the run: top-1 99.17%"


def test_a_run_that_is_not_complete_has_the_newest_checkpoint(tmp_path: Path) -> None:
    line = "newest checkpoint, because the run is not complete"
    assert describe_weights(folder(tmp_path, is_complete=False), "last") == line


def test_a_file_of_weights_is_not_described(tmp_path: Path) -> None:
    assert describe_weights(tmp_path / "weights.pth", "last") == ""


@pytest.mark.parametrize(
    "best",
    [
        [], {"step": "x" * 10**6, "metric": "top1", "value": 1}, {"step": 10**400, "metric": "top1", "value": 10**400},
        {"step": 1, "metric": "\x1b[2J", "value": 0.5}, {"step": -1, "metric": "m" * 1000, "value": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("which", ["last", "best", "\x1b[2J"])
def test_a_strangers_folder_prints_one_short_line_or_none(tmp_path: Path, best: object, which: str) -> None:
    line = describe_weights(folder(tmp_path, best, {"steps": 10**400, "metrics": {"top1": "x" * 10**6}}), which)
    assert len(line) < 200
    assert line.isprintable()
