"""Evaluation and prediction by a trained model: a run folder, or a file of weights."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from samebits.config.document import to_yaml
from samebits.errors import CheckpointError, ConfigError, DataError, LaunchError
from samebits.inference.export import export
from samebits.inference.predict import evaluate, expand, predict, predictions
from samebits.inference.trained_model import TrainedModel
from samebits.launch import forkserver, start
from samebits.recipes.catalog import find
from samebits.recipes.trust import trust
from samebits.report.pictures import is_drawing, places_for
from samebits.storage.weights import weights_sha256

RECIPE = Path(__file__).with_name("recipe_of_dots.py")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Of a net that answers "dark" for dark dots and "bright" for bright ones."""
    net = find(str(RECIPE)).build(_config(), {"classes": ["dark", "bright"]}).model
    state = net.state_dict()
    for tensor in state.values():
        tensor.zero_()
    state["conv.weight"].fill_(1)
    state["norm.weight"].fill_(1)
    state["norm.running_var"].fill_(1)
    state["head.weight"].copy_(torch.tensor([[-1.0, -1], [1, 1]]))
    state["head.bias"].copy_(torch.tensor([0.9, -0.9]))
    return state


def _config():

    found = find(str(RECIPE))
    return found.load(["eval_batch=1", "device=cpu"]).config


@pytest.fixture
def run(weights: dict[str, torch.Tensor]) -> Path:
    """A run folder, whose data are gone."""
    folder = Path("run")
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(_config().model_dump(mode="json")))
    (folder / "dataset_info.json").write_text('{"classes": ["dark", "bright"]}')
    save_file(weights, folder / "weights.safetensors")
    (folder / "result.json").write_text(json.dumps({"weights_sha256": weights_sha256(weights)}))
    trust(RECIPE)
    return folder


@pytest.fixture
def pictures() -> Path:
    folder = Path("pictures")
    (folder / "more").mkdir(parents=True)
    for name, shade in {"b.png": 250, "a.png": 5, "more/b.png": 240}.items():
        Image.new("L", (2, 2), shade).save(folder / name)
    (folder / ".hidden").touch()
    return folder


def test_predict_answers_with_the_run_s_names_for_each_file_of_a_folder_in_order(run: Path, pictures: Path) -> None:
    answers = list(predictions(TrainedModel(run), [pictures, pictures / "a.png"]))
    assert [str(answer.file.relative_to(pictures)) for answer in answers] == ["a.png", "b.png", "more/b.png"]
    assert [answer.prediction["class"] for answer in answers] == ["dark", "bright", "bright"]


def test_a_recipe_s_own_way_to_infer_is_used_and_settings_can_differ(run: Path, pictures: Path) -> None:
    (once,), (twice,) = (predict(run, [pictures / "a.png"], each) for each in ([], ["twice=true"]))
    assert twice["scores"] == pytest.approx([2 * score for score in once["scores"]])


def test_a_file_that_can_not_be_read_has_its_error_and_the_others_their_answers(run: Path, pictures: Path) -> None:
    (pictures / "notes.txt").write_text("no picture")
    (pictures / "torn.png").write_bytes((pictures / "a.png").read_bytes()[:30])
    files = [pictures, pictures / "gone.png"]
    answers = list(predictions(TrainedModel(run), files))
    errors = {answer.file.name: answer.prediction["error"] for answer in answers if answer.error}
    assert set(errors) == {"notes.txt", "torn.png", "gone.png"}
    assert all(name in text and "\n" not in text for name, text in errors.items())
    assert len(answers) - len(errors) == 3
    assert [("error" in answer) for answer in predict(run, files, keep_errors=True)].count(True) == 3
    with pytest.raises(DataError, match="no picture of dots"):
        predict(run, files)


def test_missing_files_are_reported_before_the_model_is_opened(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainedModel, "open", lambda *_: pytest.fail("opened"))
    answers = list(predictions(TrainedModel(run), ["gone.png", "too.png"]))
    assert [str(answer.error) for answer in answers] == [
        f"data error: there is no file {name}\n  fix  Check the path." for name in ("gone.png", "too.png")
    ]
    with pytest.raises(DataError, match=r"no file gone\.png"):
        predict(run, ["gone.png"])


def test_images_are_evaluated_without_loss_if_the_recipe_infers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = evaluate(run)
    assert set(figures) == {"loss", "top1"}
    assert re.fullmatch(r"\d+ samples, each once\n", capsys.readouterr().err)
    twice = evaluate(run, ["twice=true"])
    assert twice == {"top1": figures["top1"]}


def test_answers_are_drawn_into_a_folder_without_writing_over_each_other(run: Path, pictures: Path) -> None:
    list(predictions(TrainedModel(run), [pictures], draw=Path("drawn")))
    assert sorted(path.name for path in Path("drawn").iterdir()) == ["a.png", "b-2.png", "b.png"]
    list(predictions(TrainedModel(run), [pictures / "a.png"], draw=Path("one/a.jpg")))
    with Image.open("one/a.jpg") as image:
        assert image.format == "JPEG"
    assert image.size == (5, 5)


@pytest.mark.parametrize(
    ("num_files", "draw", "text"),
    [
        (2, "out.png", "one file for 2 images"),
        (1, "out.docx", "can't be written as .docx"),
        (1, "0.png", "would overwrite the input 0.png"),
        (2, ".", "would overwrite the input 0.png"),
    ],
)
def test_a_place_for_drawings_that_can_not_be_is_refused_early(num_files: int, draw: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        places_for([Path(f"{place}.png") for place in range(num_files)], Path(draw))


@pytest.mark.parametrize("name", ["drawn.png", "drawn.jpg"])
def test_a_user_s_picture_is_not_drawn_over_and_an_earlier_drawing_is(run: Path, pictures: Path, name: str) -> None:
    Image.new("RGB", (9, 9)).save(name)
    before = Path(name).read_bytes()
    with pytest.raises(CheckpointError, match=f"{name} already exists"):
        list(predictions(TrainedModel(run), [pictures / "a.png"], draw=Path(name)))
    assert Path(name).read_bytes() == before
    Path(name).unlink()
    for _ in range(2):
        list(predictions(TrainedModel(run), [pictures / "a.png"], draw=Path(name)))
    assert is_drawing(Path(name))


@pytest.mark.parametrize("draw", ["pictures/a.png/drawn.png", "pictures/a.png/drawn/more"])
def test_a_place_that_can_not_be_written_to_is_found_before_the_model_is_opened(
    run: Path, pictures: Path, draw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainedModel, "open", lambda *_: pytest.fail("the model was opened"))
    with pytest.raises(CheckpointError, match=r"can't write .*a\.png is not a folder"):
        next(predictions(TrainedModel(run), [pictures / "a.png"], draw=Path(draw)))


def test_an_empty_folder_is_an_error() -> None:
    Path("empty").mkdir()
    with pytest.raises(DataError, match="no files in empty"):
        expand(["empty"])


def test_a_file_of_weights_is_a_preset_s_model(run: Path, pictures: Path, weights: dict[str, torch.Tensor]) -> None:
    Path("data").mkdir()
    Path("data/classes.txt").write_text("dark bright")
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()} | {"module.aux": torch.zeros(2)}
    torch.save({"epoch": 3, "state_dict": wrapped}, "official.pth.tar")
    settings = ["data.root=data", "eval_batch=1", "device=cpu"]
    assert evaluate("official.pth.tar", settings, preset=str(RECIPE)) == evaluate(run)
    (answer,) = predict("official.pth.tar", [pictures / "a.png"], settings, preset=str(RECIPE))
    assert answer["class"] == "dark"
    Path("data/classes.txt").write_text("dark bright gray")
    with pytest.raises(CheckpointError, match="is of another model") as caught:
        evaluate("official.pth.tar", settings, preset=str(RECIPE))
    assert "head.weight (2, 2) in the file, (3, 2) here" in caught.value.slots["cause"]


@pytest.mark.parametrize(
    ("path", "preset", "text"),
    [
        ("run/weights.safetensors", None, "its model is not known"),
        ("run", "digits", "--preset digits was given with a run folder"),
        ("runs", None, "runs does not exist"),
        ("pictures", None, "is not a run folder"),
        ("nothing.pth", "digits", "nothing.pth does not exist"),
    ],
)
def test_settings_that_conflict_are_refused(run: Path, pictures: Path, path: str, preset: str, text: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=text):
        evaluate(path, preset=preset)


@pytest.mark.parametrize("setting", ["epochs=3", "optim.lr=0.1"])
def test_a_setting_that_only_training_reads_is_refused(run: Path, pictures: Path, setting: str) -> None:
    text = rf"{setting.partition('=')[0]} has no effect on a trained model"
    with pytest.raises(ConfigError, match=text):
        evaluate(run, [setting])
    with pytest.raises(ConfigError, match=text):
        predict(run, [pictures / "a.png"], [setting])
    with pytest.raises(ConfigError, match=text):
        export(run, "safetensors", None, [setting])


def test_a_missing_run_is_an_error_with_the_newest_runs() -> None:
    for number in range(1, 8):
        Path(f"runs/digits-000{number}").mkdir(parents=True)
        config = Path(f"runs/digits-000{number}/config.yaml")
        config.touch()
        os.utime(config, (number, number))
    for name in ("digits-0009", "runs/digits-0009"):
        with pytest.raises(CheckpointError) as caught:
            evaluate(name)
        assert caught.value.slots["fix"] == "Name a run folder: " + ", ".join(
            f"runs/digits-000{number}" for number in range(3, 8)
        )


def test_settings_may_be_given_by_name_as_for_train(run: Path, pictures: Path) -> None:
    assert evaluate(run, {"twice": True}) == evaluate(run, ["twice=true"]) != evaluate(run)
    assert predict(run, [pictures / "a.png"], {"twice": True}) == predict(run, [pictures / "a.png"], ["twice=true"])


@pytest.mark.parametrize("procs", [-1, 0, "two", True, "1:2", 1.5])
def test_a_number_of_processes_that_can_not_be_is_refused(run: Path, procs: object) -> None:
    with pytest.raises(ConfigError, match="procs is"):
        evaluate(run, procs=procs)


@pytest.mark.parametrize(
    ("code", "kind"), [(130, KeyboardInterrupt), (143, SystemExit), (1, LaunchError), (137, LaunchError)]
)
def test_an_evaluation_that_is_stopped_ends_as_the_signal_does(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[BaseException]
) -> None:
    monkeypatch.setattr(start, "launch_here", lambda *_: code)
    monkeypatch.setattr(forkserver, "prepare", lambda *_: None)
    with pytest.raises(kind) as stop:
        evaluate(run, procs="2")
    assert kind is LaunchError or stop.value.code == code
