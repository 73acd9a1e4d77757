"""Models pushed to and pulled from repositories in Hugging Face's format: folders, and a Hub that is a folder."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import load_file

from samebits.errors import CheckpointError, ConfigError
from samebits.inference import hub
from samebits.inference.hub import pull, push
from samebits.inference.predict import predict
from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.classify.make import make
from tests.runs import TINY, samebits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of a small network of timm."""
    folder = tmp_path_factory.mktemp("trained")
    make(MakeConfig(num_per_class=4, size_px=60), folder / "shapes")
    samebits("train", "classify/shapes", f"data.root={folder}/shapes", "model.name=timm/test_resnet", "max_steps=1",
             "--procs", 1, "--run-dir", folder / "run", cwd=folder)  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def pushed(run: Path) -> Path:
    return Path(push(run, str(run.parent / "pushed")))


@pytest.mark.full
def test_a_pushed_model_has_a_card_that_the_hub_reads_and_no_folders_of_this_machine(run: Path, pushed: Path) -> None:
    card = huggingface_hub.ModelCard.load(pushed / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("timm", "image-classification")
    (accuracy,) = card.data.eval_results
    metrics = json.loads((run / "result.json").read_text(encoding="utf-8"))["metrics"]
    assert (accuracy.metric_type, accuracy.metric_value) == ("accuracy", metrics["top1"])
    assert (pushed / "model.safetensors").read_bytes() == (run / "weights.safetensors").read_bytes()
    for path in pushed.iterdir():
        if path.suffix not in (".safetensors", ".bin"):
            assert str(run.parent) not in path.read_text(encoding="utf-8"), path.name
    text = (pushed / "README.md").read_text(encoding="utf-8")
    assert "| steps | 1 |" in text
    assert "| epochs |" not in text  # of the 40 that the preset has, the run trained one step
    assert "0000.jpg" not in (pushed / "dataset_info.json").read_text(encoding="utf-8")


@pytest.mark.full
def test_timm_loads_a_pushed_model_of_its_own(run: Path, pushed: Path) -> None:
    model = timm.create_model(f"local-dir:{pushed}", pretrained=True).eval()
    for name, tensor in load_file(run / "weights.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.pretrained_cfg["label_names"] == ["circles", "crosses", "squares", "stars", "triangles"]


@pytest.mark.full
def test_a_pulled_model_predicts_as_the_run(run: Path, pushed: Path, tmp_path: Path) -> None:
    pulled = pull(str(pushed), tmp_path / "model")
    image = run.parent / "shapes/stars/0001.jpg"
    assert list(predict(pulled, [image])) == list(predict(run, [image]))
    with pytest.raises(ConfigError, match="is not an empty folder"):
        pull(str(pushed), tmp_path / "model")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        push(run, str(tmp_path / "model"))


@pytest.mark.full
def test_altered_missing_and_linked_files_are_refused_and_leave_nothing(pushed: Path, tmp_path: Path) -> None:
    altered = Path(shutil.copytree(pushed, tmp_path / "altered"))
    weights = altered / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"are not those of its provenance\.json"):
        pull(str(altered), tmp_path / "out")
    weights.unlink()
    for name in ("missing", "linked"):
        with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read: (No such file|Too many levels)"):
            pull(str(altered), tmp_path / "out")
        if name == "missing":
            weights.symlink_to(pushed / "model.safetensors")
    shutil.copyfile(pushed / "model.safetensors", tmp_path / "copy")
    weights.unlink()
    (tmp_path / "copy").rename(weights)
    settings = altered / "config.yaml"
    settings.write_text(
        settings.read_text(encoding="utf-8").replace("recipe: classify", "recipe: other.py"), encoding="utf-8"
    )
    with pytest.raises(ConfigError):
        pull(str(altered), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["altered"]


@pytest.mark.full
def test_the_hub_is_used_for_hf_names(run: Path, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def upload(self: object, **options: Any) -> None:
        calls.append((options["repo_id"], sorted(path.name for path in Path(options["folder_path"]).iterdir())))

    def download(repository: str, **options: Any) -> str:
        calls.append((repository, options["revision"]))
        return str(pushed)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, name, **_: calls.append(name))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert push(run, "hf://me/shapes") == "https://huggingface.co/me/shapes"
    pull("hf://me/shapes@v1", tmp_path / "model")
    assert calls == ["me/shapes", ("me/shapes", sorted(path.name for path in pushed.iterdir())), ("me/shapes", "v1")]
    with pytest.raises(ConfigError, match="no name of a model repository"):
        push(run, "hf://me")


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "steps.bin"])
def test_a_file_of_holes_is_refused_before_a_copy_fills_them(tmp_path: Path, name: str) -> None:
    """It takes no place on the publisher's disk, and its copy would fill the user's."""
    samebits("train", "digits", "max_steps=1", "--procs", 1, "--run-dir", tmp_path / "run", cwd=tmp_path)
    pushed = Path(push(tmp_path / "run", str(tmp_path / "pushed")))
    os.truncate(pushed / name, 1 << 40)
    with pytest.raises(CheckpointError, match=rf"{name} can't be read: it has 1,099,511,627,776 bytes, and "):
        pull(str(pushed), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=rf"{name} can't be read"), hub.as_run(pushed):
        pass


def test_recipe_files_are_not_published(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(f"recipe: {TINY}\n", encoding="utf-8")
    with pytest.raises(ConfigError):
        push(tmp_path / "run", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_recipe_without_color_images_is_published(tmp_path: Path) -> None:
    samebits("train", "digits", "max_steps=1", "--procs", 1, "--run-dir", tmp_path / "run", cwd=tmp_path)
    pushed = Path(push(tmp_path / "run", str(tmp_path / "pushed")))
    assert json.loads((pushed / "config.json").read_text(encoding="utf-8"))["num_classes"] == 10
    assert pull(str(pushed), tmp_path / "pulled").is_dir()


@pytest.mark.parametrize("name", ["[x](javascript:a)", "<img src=x>", "a|b\n# c", "`a`", "a\x1b[31m"])
def test_a_name_in_the_card_is_no_markup(name: str) -> None:
    text = hub._plain(name)
    assert "\n" not in text
    assert "\x1b" not in text
    assert not re.search(r"(?<!\\)[`*\[\]()#|<>]", text)
