"""The text recipe as a whole: learning, predicting, drawing, making data sets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from samebits.data.keyed import keys
from samebits.errors import DataError
from samebits.recipes.text.config import Config, ModelConfig
from samebits.recipes.text.recipe import build, build_model, crnn, dataset_info
from tests.recipes.evaluated import evaluated, trained


def config_of(**given: Any) -> Config:
    data = {"width": 64}
    model = {"name": "fast", "width": 4, "num_hidden": 16}
    return Config.model_validate({"recipe": "text", "data": data, "model": model, **given})


def draw_lines(folder: Path, texts: list[str], size: tuple[int, int] = (64, 32)) -> None:
    """Pictures and l.tsv, in the font that comes with Pillow: the same on any machine."""
    font = ImageFont.load_default(20)
    for number, text in enumerate(texts):
        image = Image.new("L", size, 220)
        ImageDraw.Draw(image).text((4 + number % 3, 3), text, 20, font)
        image.save(folder / f"{number}.png")
    (folder / "l.tsv").write_text("".join(f"{number}.png\t{text}\n" for number, text in enumerate(texts)))


def test_the_recipe_learns_predicts_and_draws(tmp_path: Path) -> None:
    texts = [f"{7 * number % 100:02d}" for number in range(1, 11)]
    draw_lines(tmp_path, texts, size=(40, 32))
    labels = str(tmp_path / "l.tsv")
    config = config_of(
        data={"train": labels, "eval": labels, "width": 32}, model={"name": "fast", "width": 8, "num_hidden": 24}
    )
    found = dataset_info(config)
    torch.manual_seed(0)
    parts = build(config, found)
    trained(parts, torch.optim.AdamW(parts.model.parameters(), lr=1e-2), 150, 1)
    metric, data = evaluated(parts), parts.eval_data()
    assert metric.num_samples == 10
    assert metric.result()["line_accuracy"] > 0.9

    picture = Image.open(tmp_path / "5.png")
    picture.rotate(180).save(tmp_path / "upside-down.png")
    upright = parts.preprocess(tmp_path / "5.png")
    assert torch.equal(parts.preprocess(tmp_path / "upside-down.png"), upright.flip(0))
    with torch.no_grad():
        answer = parts.postprocess(parts.model(upright.unsqueeze(0))[0])
    assert (answer["text"], answer["upside_down"]) == ("42", False)
    assert 0.5 < answer["confidence"] <= 1
    json.dumps(answer)
    assert parts.draw_prediction(tmp_path / "5.png", answer).height > Image.open(tmp_path / "5.png").height

    batch = data.batch(np.arange(3), keys(0, 0, np.arange(3)))
    metric.add(parts.model(batch.inputs).roll(1, dims=0), batch)  # some that are read wrong
    parts.draw(metric, data, tmp_path / "pictures")
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["worst.png"]


def test_a_tall_picture_is_turned_to_both_sides(tmp_path: Path) -> None:
    parts = build(config_of(), {"alphabet": "ab"})
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 64), np.uint8))
    picture.save(tmp_path / "line.png")
    picture.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "up.png")
    picture.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "down.png")
    lying = parts.preprocess(tmp_path / "line.png")
    assert lying.shape == (2, 1, 32, 64)
    assert torch.equal(parts.preprocess(tmp_path / "down.png"), lying)
    assert torch.equal(parts.preprocess(tmp_path / "up.png"), lying.flip(0))
    as_it_is = build(config_of(decode={"turns": False}), {"alphabet": "ab"})
    assert as_it_is.preprocess(tmp_path / "up.png").shape == (1, 1, 32, 64)


@pytest.mark.parametrize(
    ("upright", "turned", "text"),
    # Logits of blank, a, b in each view.
    [
        ([0, 3, -9], [0, -9, 3], "a"),
        ([0, 0.2, 0.1], [0, -9, 4], "b"),
        ([0, 0.5, -9], [0, -9, 4], "a"),  # 62% and 98%: not twice as sure
        ([3, 0, -9], [0, -9, 1], "b"),  # nothing is read upright
    ],
)
def test_the_surest_view_answers_and_a_turned_one_only_if_it_is_twice_as_sure(
    upright: list[float], turned: list[float], text: str
) -> None:
    parts = build(config_of(), {"alphabet": "ab"})
    answer = parts.postprocess(torch.tensor([[upright], [turned]]))
    assert (answer["text"], answer["upside_down"]) == (text, text == "b")


def test_a_picture_of_one_shade_is_refused(tmp_path: Path) -> None:
    parts = build(config_of(), {"alphabet": "ab"})
    Image.new("L", (100, 30), 200).save(tmp_path / "blank.png")
    with pytest.raises(DataError, match="shows nothing"):
        parts.preprocess(tmp_path / "blank.png")


def test_a_run_starts_from_an_official_checkpoint_whose_alphabet_is_another(tmp_path: Path) -> None:
    torch.manual_seed(1)
    official = crnn(9, 8, 12)
    torch.save({"state_dict": official.state_dict(), "epoch": 3}, tmp_path / "official.pth")
    model = {"name": "crnn", "width": 8, "num_hidden": 12, "weights": str(tmp_path / "official.pth"), "freeze": "cnn"}
    parts = build(config_of(model=model), {"alphabet": "abc"})
    rows = parts.init_weights(parts.model)
    assert "rnn.1.embedding.weight" in rows["other shape"]
    ours, theirs = parts.model.state_dict(), official.state_dict()
    same = [name for name in ours if torch.equal(ours[name], theirs[name])]
    assert len(same) == len(ours) - 2
    trainable = [name for name, parameter in parts.model.named_parameters() if parameter.requires_grad]
    assert trainable
    assert all(name.startswith("rnn.") for name in trainable)


@pytest.mark.parametrize("name", ["crnn", "fast"])
@pytest.mark.parametrize("width", [64, 100, 160, 281])
def test_a_width_gives_the_time_steps_that_settings_reckon_with(name: str, width: int) -> None:
    config = ModelConfig.model_validate({"name": name, "width": 2, "num_hidden": 2})
    model = build_model(config, 5)
    assert model(torch.zeros(2, 1, 32, width)).shape == (2, config.num_steps(width), 5)
    assert model(torch.zeros(2, 3, 1, 32, width)).shape == (2, 3, config.num_steps(width), 5)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"train": "a.tsv"}, "train requires eval, or val_fraction"),
        ({"train": "a", "eval": "b", "val_fraction": 0.1}, "cannot be combined"),
        ({"eval": "b"}, "require train"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(data: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config_of(data=data)


def test_a_run_without_lines_is_told_what_to_set() -> None:
    with pytest.raises(DataError, match="no dataset is set"):
        config_of().check_inputs()


def test_lines_whose_image_is_in_both_sets_or_repeated_are_counted(tmp_path: Path) -> None:
    draw_lines(tmp_path, ["01", "02", "10", "20"])
    (tmp_path / "e.tsv").write_text("1.png\t02\n3.png\t20\n")
    (tmp_path / "t.tsv").write_text("0.png\t01\n1.png\t02\n0.png\t10\n")
    config = config_of(data={"train": str(tmp_path / "t.tsv"), "eval": str(tmp_path / "e.tsv"), "width": 64})
    rows = build(config, dataset_info(config)).describe
    assert rows["validation"] == "warning: 1 of 2 images are training images too"
    assert rows["training"].startswith("warning: 1 of 3 images are listed again")
    config = config_of(data={"train": str(tmp_path / "l.tsv"), "val_fraction": 0.5, "width": 64})
    assert not build(config, dataset_info(config)).describe.keys() & {"validation", "training"}
