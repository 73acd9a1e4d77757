"""The text recipe against the reference implementation's numbers, which are in ../shared/parity."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samebits.data.keyed import keys
from samebits.recipes.text.alphabet import Alphabet, read_alphabet, read_chars
from samebits.recipes.text.config import Config
from samebits.recipes.text.loss import ctc_loss
from samebits.recipes.text.recipe import Reader, build, crnn, dataset_info, ground_truths
from tests.recipes.parity import filled, noise, recorded

SHARED = Path(__file__).resolve().parents[3] / "shared"
PARITY, TEXTS = SHARED / "parity", SHARED / "data" / "text"
if not PARITY.is_dir():  # a small part is in every clone
    PARITY = Path(__file__).resolve().parents[1] / "fixtures" / "parity"

needs_texts = pytest.mark.skipif(not TEXTS.is_dir(), reason="../shared/data/text is not there")


def load(name: str) -> Any:
    path = PARITY / name
    if not path.is_file():
        pytest.skip(f"../shared/parity/{name} is not there")
    return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path, allow_pickle=False)


def network(name: str) -> Reader:
    facts = load("crnn_models.json")[name]
    return filled(crnn(facts["num_classes"], 64, facts["num_hidden"]))


def log_probs(model: Reader, x: torch.Tensor) -> torch.Tensor:
    """(T, N, C), as the reference gives them."""
    return model(x).log_softmax(dim=2).transpose(0, 1)


def padded(targets: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> torch.Tensor:
    classes = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
    for row, part in zip(classes, np.split(targets, np.cumsum(lengths)[:-1]), strict=True):
        row[: len(part)] = torch.from_numpy(part.astype(np.int64))
    return classes


def test_a_fresh_network_is_drawn_as_the_reference_s() -> None:
    facts = load("crnn_models.json")["small40"]
    torch.manual_seed(0)
    for name, tensor in crnn(40, 64, 32).state_dict().items():
        mean, std = facts["init_mean_std"][name]
        values = tensor.double()
        # What two draws of so many values differ by.
        spread = 5 * max(std, 1e-3) / math.sqrt(max(1, values.numel()))
        assert abs(float(values.mean()) - mean) <= 2 * spread, name
        if values.numel() > 1:
            assert abs(float(values.std(correction=0)) - std) <= 2 * spread + 1e-12, name


@pytest.mark.parametrize("width", [280, 160, 100])
def test_outputs_are_the_reference_s(width: int) -> None:
    outputs, case = load("crnn_outputs.npz"), f"small40/w{width}"
    with torch.inference_mode():
        ours = log_probs(network("small40").eval(), noise(outputs[f"{case}/x_shape"], outputs[f"{case}/x_seed"]))
    assert ours.shape[0] == width // 4 + 1
    np.testing.assert_allclose(ours.numpy(), outputs[f"{case}/log_probs"], atol=1e-5)
    sure = outputs[f"{case}/top2_gap"] > 1e-4
    assert (ours.argmax(2).numpy() == outputs[f"{case}/argmax"])[sure].all()


def test_outputs_of_all_6736_classes_are_the_reference_s() -> None:
    outputs, model = load("crnn_outputs.npz"), network("alphabet6736").eval()
    for width in (280, 160):
        case = f"alphabet6736/w{width}"
        with torch.inference_mode():
            ours = log_probs(model, noise(outputs[f"{case}/x_shape"], outputs[f"{case}/x_seed"]))
        assert list(ours.shape) == outputs[f"{case}/log_probs/shape"].tolist() == [width // 4 + 1, 2, 6736]
        some = ours.contiguous().numpy().reshape(-1)[:: int(outputs[f"{case}/log_probs/step"])]
        np.testing.assert_allclose(some, outputs[f"{case}/log_probs/sample"], atol=1e-5)
        assert float(ours.double().sum()) == pytest.approx(float(outputs[f"{case}/log_probs/sum"]), rel=1e-6)
        assert float(ours.double().abs().sum()) == pytest.approx(float(outputs[f"{case}/log_probs/abs_sum"]), rel=1e-6)
        sure = outputs[f"{case}/top2_gap"] > 1e-4
        assert (ours.argmax(2).numpy() == outputs[f"{case}/argmax"])[sure].all()


_TAKEN_OFF = ("cnn.conv2.bias", "cnn.conv4.bias", "cnn.conv6.bias")


def check_group(
    outputs: Any, group: str, tensors: Mapping[str, torch.Tensor | None], ignored: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Each tensor's sample within a ten-thousandth of its largest value, but for the values that are ignored."""
    assert outputs[f"{group}/names"].tolist() == list(tensors)
    for name, ours, expected in recorded(tensors, outputs, group, 256):
        counts = ~ignored.get(name, np.zeros(len(ours), bool))
        # A bias before a batch norm has no gradient but rounding.
        largest = 1e-2 if name in _TAKEN_OFF else float(np.abs(expected).max())
        atol = 1e-4 * max(largest, 1e-12)
        np.testing.assert_allclose(ours[counts], expected[counts], rtol=0, atol=atol, err_msg=name)


def test_three_training_steps_are_the_reference_s() -> None:
    outputs = load("crnn_outputs.npz")
    # Batch norm over few samples: in float32 rounding decides single ReLUs, on each kind of processor others.
    model = network("small40").double().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = noise(outputs["small40/train/x_shape"], outputs["small40/train/x_seed"]).double()
    lengths = torch.from_numpy(outputs["small40/train/target_lengths"].astype(np.int64))
    classes = padded(outputs["small40/train/targets"], lengths.numpy())
    losses = []
    for step in range(3):
        logits = model(x)
        loss = (ctc_loss(logits, classes, lengths) / lengths.clamp(min=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            ours = logits.detach().log_softmax(dim=2).transpose(0, 1)
            np.testing.assert_allclose(ours.numpy(), outputs["small40/train/log_probs"], atol=1e-5)
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            check_group(outputs, "small40/train/grad", gradients, {})
        optimizer.step()
        if step == 0:
            # Adam's first step is lr * sign(gradient): where that is rounding, so is the step.
            tiny = {
                name: np.abs(ours) <= 1e-6 for name, ours, _ in recorded(gradients, outputs, "small40/train/grad", 256)
            }
            check_group(outputs, "small40/train/after", model.state_dict(), tiny)
    np.testing.assert_allclose(losses, outputs["small40/train/losses"], rtol=1e-4)


def losses_of(logits: torch.Tensor, classes: torch.Tensor, lengths: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Compute the loss of each line over its own number of time steps, which a batch of ours has in common."""
    rows = [slice(row, row + 1) for row in range(len(steps))]
    return torch.cat(
        [ctc_loss(logits[row, :end], classes[row], lengths[row]) for row, end in zip(rows, steps, strict=True)]
    )


def test_losses_and_gradients_are_the_reference_s() -> None:
    ctc = load("crnn_ctc.npz")
    # Log-probabilities are logits too: their softmax is themselves.
    logits = torch.from_numpy(ctc["ctc/log_probs"]).transpose(0, 1).contiguous().requires_grad_()
    lengths = torch.from_numpy(ctc["ctc/target_lengths"].astype(np.int64))
    losses = losses_of(logits, padded(ctc["ctc/targets"], lengths.numpy()), lengths, ctc["ctc/input_lengths"].tolist())
    np.testing.assert_allclose(losses.detach().numpy(), ctc["ctc/none"], rtol=1e-4)
    assert losses.sum().item() == pytest.approx(float(ctc["ctc/sum"]), rel=1e-4)
    mean = (losses / lengths.clamp(min=1)).mean()
    assert mean.item() == pytest.approx(float(ctc["ctc/mean"]), rel=1e-4)
    mean.backward()
    np.testing.assert_allclose(logits.grad.transpose(0, 1).numpy(), ctc["ctc/grad_mean"], atol=1e-4 * 0.2)


def test_a_text_without_room_has_the_reference_s_infinite_loss_and_no_gradient() -> None:
    ctc = load("crnn_ctc.npz")
    logits = torch.from_numpy(ctc["ctc/log_probs"]).transpose(0, 1).contiguous().requires_grad_()
    lengths = torch.from_numpy(ctc["ctc/target_lengths"].astype(np.int64))
    steps = ctc["ctc/input_lengths_infeasible"].tolist()
    losses = losses_of(logits, padded(ctc["ctc/targets"], lengths.numpy()), lengths, steps)
    np.testing.assert_allclose(losses.detach().numpy(), ctc["ctc/infeasible_none"], rtol=1e-4)
    finite = torch.where(losses.isfinite(), losses, 0.0)
    mean = (finite / lengths.clamp(min=1)).mean()
    assert mean.item() == pytest.approx(float(ctc["ctc/infeasible_zero_infinity_mean"]), rel=1e-4)
    losses[losses.isinf()].sum().backward()
    assert not logits.grad.any()


@needs_texts
def test_texts_are_encoded_as_the_reference_does() -> None:
    known = load("crnn_labels.json")
    alphabet = read_alphabet(TEXTS / "cc360" / "alphabet_6735.txt")
    assert (len(alphabet), alphabet.num_classes) == (known["alphabet_len"], known["num_classes"])
    assert alphabet.characters.startswith(known["alphabet_first"])
    assert alphabet.characters.endswith(known["alphabet_last"])
    encoded = [alphabet.encode(text) for text in known["texts"]]
    assert [len(classes) for classes in encoded] == known["lengths"]
    assert np.concatenate(encoded).tolist() == known["encoded"]
    toy = Alphabet(known["toy"]["alphabet"])
    assert (
        np.concatenate([toy.encode(text) for text in known["toy"]["list"]]).tolist() == known["toy"]["list_encoded"][0]
    )
    assert toy.encode(known["toy"]["word"]).tolist() == known["toy"]["word_encoded_crnn_pytorch"][0]


@needs_texts
def test_the_published_table_of_characters_is_read_as_the_reference_does() -> None:
    known = load("crnn_labels.json")
    table = read_chars(TEXTS / "cc360" / "char_std_5990.txt")
    assert len(table) == known["char_std_lines"]
    assert [number for number, text in enumerate(table) if not text][1:] == known["char_std_empty_lines"]
    assert [table.index("，"), table.index(",")] == known["char_std_comma"]
    assert [table.index("（"), table.index("(")] == known["char_std_brackets"]
    alphabet = read_alphabet(TEXTS / "cc360" / "alphabet_6735.txt")
    assert [text for text in table if text and text not in alphabet.characters] == known["char_std_not_in_alphabet"]


@needs_texts
@pytest.mark.parametrize(("case", "folder"), [("cc360_w160", "cc360"), ("cc360_w280", "cc360"), ("lpr_w160", "lpr")])
@pytest.mark.parametrize("labels", ["labels_index.txt", "labels_text.txt"])
def test_samples_are_the_reference_s(case: str, folder: str, labels: str) -> None:
    arrays, known = load("crnn_dataset.npz"), load("crnn_dataset.json")[case]
    data = {
        "root": str(TEXTS / folder), "train": labels, "eval": labels, "width": known["width"],
        "chars": str(TEXTS / "cc360" / "char_std_5990.txt"), "alphabet": str(TEXTS / "cc360" / "alphabet_6735.txt"),
    }  # fmt: skip
    config = Config.model_validate({"recipe": "text", "data": data, "model": {"name": "fast", "width": 1}})
    found = dataset_info(config)
    samples = build(config, found).train_data()
    pick = arrays[f"{case}/pick"]
    batch = samples.batch(pick, keys(0, 0, pick))
    assert ground_truths(batch, Alphabet(found["alphabet"])) == [text for _, text in known["labels"]]
    pixels = ((batch.inputs * config.data.std + config.data.mean) * 255).numpy()
    close = np.abs(pixels - arrays[f"{case}/pixels"]) <= 2
    assert close.mean() >= 0.99
    mean, std = arrays[f"{case}/tensor_mean_std"]
    assert float(batch.inputs.mean()) == pytest.approx(mean, abs=2e-3)
    assert float(batch.inputs.std(correction=0)) == pytest.approx(std, abs=2e-3)
    first = arrays[f"{case}/tensor_first"]
    ours = batch.inputs[0, 0, ::4, ::4].numpy()
    assert ours.shape == first.shape
    assert (np.abs(ours - first) < 0.05).mean() >= 0.99
