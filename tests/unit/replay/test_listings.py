"""A verifier's own data and own files count, not what the publisher's listing says of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from samebits.errors import ConfigError
from samebits.inference.hub import pull, push
from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.classify.make import make
from samebits.replay.verify import Request, Verdict, lines, verify
from tests.runs import python, samebits
from tests.verify_trials.forgery import edit_json

SETTINGS = ("model.name=timm/test_resnet", "max_steps=2", "loader.num_workers=0", "--procs", 1)
# A publisher who trains on a listing of his own.
CHEAT = """
import json, sys
import samebits.recipes.classify.recipe as recipe
plain = recipe.dataset_info
def info(config):
    found = json.loads(json.dumps(plain(config)))
    train, held_out = found["train"], found["held_out"]
    first, second = sorted(train)[:2]
    if sys.argv[1] == "labels":
        train[second] += train[first][::2]
        train[first] = train[first][1::2]
    if sys.argv[1] == "leak":
        for name in held_out:
            train[name] += held_out[name]
    if sys.argv[1] == "names":
        found["classes"] = found["classes"][::-1]
    return found
recipe.dataset_info = info
from samebits.cli.main import run
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos") / "shapes"
    make(MakeConfig(num_per_class=6, size_px=60), folder)
    return folder


@pytest.fixture(scope="module")
def run(photos: Path) -> Path:
    run = photos.parent / "run"
    samebits("train", "classify/shapes", f"data.root={photos}", *SETTINGS, "--run-dir", run, cwd=photos.parent)
    return run


@pytest.fixture(scope="module")
def pulled(run: Path) -> Path:
    return pull(push(run, str(run.parent / "pushed")), run.parent / "pulled")


def verified(run: Path, *overrides: str) -> Verdict:
    return verify(Request(run, overrides))


@pytest.mark.full
@pytest.mark.parametrize("how", ["labels", "leak", "names"])
def test_a_listing_of_the_publishers_own_is_found(photos: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "cheat.py").write_text(CHEAT)
    command = ["train", "classify/shapes", f"data.root={photos}", *map(str, SETTINGS), "--run-dir", "run"]
    python("cheat.py", how, *command, cwd=tmp_path)
    verdict = verified(tmp_path / "run", f"data.root={photos}")
    assert not verdict.is_verified
    key = "classes[0]" if how == "names" else "train."
    assert any(text.startswith(f"dataset_info.json: {key}") for text in verdict.mismatches), lines(verdict)


def test_a_published_model_of_own_images_is_verified_with_the_photos(
    pulled: Path, photos: Path, tmp_path: Path
) -> None:
    """Its list of files is not published: the split is made again."""
    elsewhere = shutil.copytree(photos, tmp_path / "moved" / "shapes")
    verdict = verified(pulled, f"data.root={elsewhere}")
    assert verdict.is_verified, lines(verdict)
    assert verdict.share == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("label_names", ["stars", "squares", "circles"]), ("num_classes", 2), ("architecture", "resnet18")],
)
def test_a_forged_config_of_a_published_model_is_found(
    pulled: Path, photos: Path, tmp_path: Path, name: str, value: object
) -> None:
    """From it timm takes the classes."""
    model = shutil.copytree(pulled, tmp_path / "model")
    edit_json(model / "config.json", lambda content: content.update({name: value}))
    found = verified(model, f"data.root={photos}").mismatches
    assert any(text.startswith(f"config.json: {name} is {value}, in the run ") for text in found), found


def swap(photos: Path) -> None:
    one, other = (sorted((photos / name).iterdir())[0] for name in ("circles", "stars"))
    one.rename(photos / "held")
    other.rename(one)
    (photos / "held").rename(other)


def add(photos: Path) -> None:
    file = sorted((photos / "circles").iterdir())[0]
    shutil.copyfile(file, file.with_name("zz.jpg"))


def remove(photos: Path) -> None:
    for file in sorted((photos / "circles").iterdir())[:2]:
        file.unlink()


@pytest.mark.parametrize("change", [swap, add, remove])
def test_other_photos_do_not_verify_it(
    pulled: Path, photos: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    other = shutil.copytree(photos, tmp_path / "shapes")
    change(other)
    assert not verified(pulled, f"data.root={other}").is_verified


@pytest.fixture(scope="module")
def fine_tuned(run: Path, photos: Path) -> Path:
    """A run that starts from a file of weights, which is no longer where it was."""
    start, tuned = run.parent / "start.safetensors", run.parent / "tuned"
    shutil.copyfile(run / "weights.safetensors", start)
    samebits(
        "train", "classify/shapes", f"data.root={photos}", f"model.weights={start}", *SETTINGS, "--run-dir", tuned,
        cwd=photos.parent,
    )  # fmt: skip
    start.rename(run.parent / "moved.safetensors")
    return tuned


@pytest.mark.parametrize("is_published", [False, True], ids=["run folder", "published"])
def test_a_fine_tuned_run_is_verified_where_the_weights_have_another_path(
    fine_tuned: Path, photos: Path, tmp_path: Path, is_published: bool
) -> None:
    if is_published:
        fine_tuned = pull(push(fine_tuned, str(tmp_path / "pushed")), tmp_path / "pulled")
    moved = photos.parent / "moved.safetensors"
    verdict = verified(fine_tuned, f"model.weights={moved}", f"data.root={photos}")
    assert verdict.is_verified, lines(verdict)
    assert any(f"starts from weights: {moved}, sha256 " in note for note in verdict.notes)


def test_other_weights_to_start_from_are_found(fine_tuned: Path, photos: Path, tmp_path: Path) -> None:
    tensors = load_file(photos.parent / "moved.safetensors")
    next(each for each in tensors.values() if each.is_floating_point()).flatten()[:1].add_(1e-7)
    save_file(tensors, tmp_path / "other.safetensors")
    verdict = verified(fine_tuned, f"model.weights={tmp_path}/other.safetensors")
    assert any(text.startswith("dataset_info.json: weights.sha256 is ") for text in verdict.mismatches)


def test_weights_in_the_run_folder_came_with_it(fine_tuned: Path, photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(fine_tuned, tmp_path / "run")
    os.link(photos.parent / "moved.safetensors", run / "start.safetensors")
    settings = (run / "config.yaml").read_text().replace(f"{photos.parent}/start", f"{run}/start")
    (run / "config.yaml").write_text(settings)
    with pytest.raises(ConfigError, match=r"model\.weights lies in the run folder: it came with the run"):
        verified(run)


@pytest.mark.parametrize("is_published", [False, True], ids=["run folder", "published"])
def test_sets_that_lie_elsewhere_are_verified(photos: Path, tmp_path: Path, is_published: bool) -> None:
    run, place = tmp_path / "run", tmp_path / "before"
    for name in ("train", "val", "more"):
        shutil.copytree(photos, place / name)
    (place / "train/circles/broken.jpg").write_bytes(b"no image")
    names = {"data.train": "train", "data.eval": "val", "data.eval_sets.night": "more"}
    settings = ["data.on_error=skip", *SETTINGS, "--run-dir", run]
    samebits("train", "classify/shapes", *(f"{key}={place / name}" for key, name in names.items()), *settings,
             cwd=tmp_path)  # fmt: skip
    model = pull(push(run, str(tmp_path / "pushed")), tmp_path / "pulled") if is_published else run
    moved = [f"{key}={tmp_path / 'after' / name}-2" for key, name in names.items()]
    for name in names.values():
        shutil.copytree(place / name, tmp_path / "after" / f"{name}-2")
    shutil.rmtree(place)
    verdict = verified(model, *moved)
    assert verdict.is_verified, lines(verdict)
    assert is_published == any("the hash of the list of files" in note for note in verdict.notes)
    shutil.rmtree(tmp_path / "after" / "val-2" / "stars")
    assert not verified(model, *moved).is_verified


def test_weights_whose_hash_is_not_stated_are_named(fine_tuned: Path, photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(fine_tuned, tmp_path / "run")
    edit_json(run / "dataset_info.json", lambda info: info.pop("weights"))
    for path in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    moved = photos.parent / "moved.safetensors"
    verdict = verified(run, f"model.weights={moved}")
    assert f"not stated: the SHA-256 of {moved}, which the run starts from" in verdict.notes
