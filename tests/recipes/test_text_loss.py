"""CTC compared with torch's in float64 and by hand; decoding compared with a plain loop and by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.samples import Batch
from samebits.recipes.text.alphabet import Alphabet
from samebits.recipes.text.loss import ctc, ctc_loss
from samebits.recipes.text.predict import read

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
