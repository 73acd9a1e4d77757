"""The text recipe: its network, predictions, and CTC against torch's in float64 and by hand."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from samebits.data.keyed import keys
from samebits.data.samples import Batch
from samebits.errors import DataError
from samebits.recipes.text.alphabet import Alphabet
from samebits.recipes.text.config import Config, ModelConfig
from samebits.recipes.text.loss import ctc, ctc_loss
from samebits.recipes.text.predict import read
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


ABC = Alphabet("abc")


def by_torch(logits: torch.Tensor, classes: torch.Tensor, lengths: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    scores = logits.double().log_softmax(dim=2).transpose(0, 1)
    return F.ctc_loss(scores, classes, steps, lengths, reduction="none")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 14), st.integers(2, 9)),
    scale=st.floats(0.1, 30),
)
def test_losses_and_gradients_are_those_of_torch(seed: int, shape: tuple[int, int, int], scale: float) -> None:
    num_samples, num_times, num_classes = shape
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal(shape) * scale)
    lengths = torch.from_numpy(rng.integers(0, num_times + 2, num_samples))
    steps = torch.full((num_samples,), num_times)
    classes = torch.from_numpy(rng.integers(1, num_classes, (num_samples, max(1, int(lengths.max())))))
    classes *= torch.arange(classes.shape[1]) < lengths[:, None]
    weights = torch.from_numpy(rng.uniform(0.1, 2, num_samples))

    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = ctc_loss(ours, classes, lengths), by_torch(theirs, classes, lengths, steps)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    possible = expected.isfinite()
    texts = [row[:length] for row, length in zip(classes, lengths, strict=True)]
    needed = torch.tensor([len(text) + int((text[1:] == text[:-1]).sum()) for text in texts])
    assert torch.equal(possible, needed <= steps)
    if possible.any():
        (loss * weights)[possible].sum().backward()
        (expected * weights)[possible].sum().backward()
        torch.testing.assert_close(ours.grad[possible], theirs.grad[possible], rtol=1e-7, atol=1e-9)


def test_over_6736_classes_gradients_are_near_those_of_float64() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 71, 6736, generator=rng)
    classes, lengths = torch.randint(1, 6736, (4, 10), generator=rng), torch.tensor([10, 10, 3, 7])
    classes *= torch.arange(10) < lengths[:, None]
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (ctc_loss(ours, classes, lengths) / lengths).mean().backward()
    (by_torch(exact, classes, lengths, torch.full((4,), 71)) / lengths).mean().backward()
    assert ours.grad is not None
    assert exact.grad is not None
    assert float((ours.grad - exact.grad).abs().max()) < 1e-8


@pytest.mark.parametrize(
    ("text", "num_ways"),
    # Of all paths of 4 steps over blank, a, b, c: those that say the text.
    [("", 1), ("a", 10), ("ab", 15), ("aa", 5), ("abc", 7), ("aba", 7), ("aab", 1), ("abca", 1), ("aaa", 0)],
)
def test_a_loss_counts_every_path_of_the_text(text: str, num_ways: int) -> None:
    paths = [ABC.decode_paths(np.array([path])) for path in itertools.product(range(4), repeat=4)]
    assert paths.count([text]) == num_ways
    classes = torch.from_numpy(ABC.encode(text))[None] if text else torch.zeros(1, 1, dtype=torch.int64)
    (loss,) = ctc_loss(torch.zeros(1, 4, 4), classes, torch.tensor([len(text)]))
    assert math.exp(-float(loss)) * 4**4 == pytest.approx(num_ways, abs=1e-4)


def test_the_loss_of_a_batch_is_the_mean_over_lines_of_each_line_s_by_its_length() -> None:
    logits = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(1))
    targets = {"classes": torch.tensor([[1, 2, 3], [2, 0, 0], [0, 0, 0]]), "lengths": torch.tensor([3, 1, 0])}
    batch = Batch(None, targets, torch.arange(3))
    single = ctc_loss(logits, targets["classes"], targets["lengths"])
    expected = float(single[0] / 3 + single[1] + single[2]) / 3
    assert ctc(logits, batch)["ctc"].item() == pytest.approx(expected)
    assert ctc(logits.bfloat16(), batch)["ctc"].dtype == torch.float32


def test_logits_far_apart_have_a_finite_loss_and_gradient() -> None:
    logits = torch.tensor([[[2000.0, -2000.0], [2000.0, -2000.0]]], requires_grad=True)
    loss = ctc_loss(logits, torch.tensor([[1]]), torch.tensor([1]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(4000 - math.log(2))  # two paths, each with one step that costs 4,000
    assert logits.grad.isfinite().all()


def plain_loop(paths: list[list[int]], characters: str) -> list[str]:
    """As people write it, character by character."""
    texts = []
    for path in paths:
        text = ""
        for place, name in enumerate(path):
            if name != 0 and not (place > 0 and path[place - 1] == name):
                text += characters[name - 1]
        texts.append(text)
    return texts


@settings(max_examples=100, deadline=None)
@given(
    paths=st.integers(1, 12).flatmap(
        lambda length: st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=1, max_size=6)
    )
)
def test_all_paths_are_decoded_as_the_plain_loop_does_one_by_one(paths: list[list[int]]) -> None:
    assert ABC.decode_paths(np.array(paths)) == plain_loop(paths, "abc")


@pytest.mark.parametrize(
    ("path", "text"),
    [([0, 0, 0], ""), ([1, 1, 1], "a"), ([1, 0, 1], "aa"), ([1, 1, 2], "ab"), ([0, 3, 3], "c"), ([2, 0, 0], "b")],
)
def test_the_likeliest_path_is_read(path: list[int], text: str) -> None:
    logits = 5.0 * F.one_hot(torch.tensor([path]), 4)
    assert read(logits, ABC) == [text]
