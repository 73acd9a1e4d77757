from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.data.samples import Batch
from samebits.recipes.pose.config import LossConfig
from samebits.recipes.pose.recipe import heatmap_loss, pose_loss, tag_loss

CASES = ("cp_exp_mixed", "coco_exp_mixed", "cp_max_mixed", "cp_exp_empty", "cp_exp_factors")


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_official_ones(parity_folder: Path, case: str) -> None:
    arrays = np.load(parity_folder / "pose_loss.npz")
    if f"{case}/factors" not in arrays:
        pytest.skip(f"{case} is only in ../shared/parity")

    def field(name: str) -> Tensor:
        return torch.from_numpy(arrays[f"{case}/{name}"])

    heat, push, pull = arrays[f"{case}/factors"].tolist()
    config = LossConfig(heatmap=tuple(heat), push=push[0], pull=pull[0], push_form=str(arrays[f"{case}/ae_type"]))
    outputs = [field(f"out{stage}").requires_grad_() for stage in (0, 1)]
    targets = {
        "heatmaps": [field("heatmaps0"), field("heatmaps1")],
        "masks": [field("mask0"), field("mask1")],
        "index": field("index0"),
    }
    terms = pose_loss(outputs, Batch(None, targets, torch.arange(len(outputs[0]))), config=config)
    total = sum(terms.values(), torch.zeros(()))
    total.backward()
    official = {"heatmap0": "heat_loss0", "heatmap1": "heat_loss1", "push0": "push0", "pull0": "pull0"}
    assert list(terms) == list(official)
    for name, recorded in official.items():
        assert terms[name].item() == pytest.approx(field(recorded).mean().item(), rel=1e-5, abs=1e-12)
    assert total.item() == pytest.approx(float(arrays[f"{case}/total"]), rel=1e-5)
    for stage, output in enumerate(outputs):
        assert output.grad is not None
        expected = field(f"grad{stage}")
        assert (output.grad - expected).abs().max() <= 1e-6 * expected.abs().max()


def _index(people: list[list[int]], num_joints: int = 2, room: int = 5) -> Tensor:
    index = torch.zeros(1, room, num_joints, 2, dtype=torch.int64)
    for row, places in enumerate(people):
        for column, place in enumerate(places):
            index[0, row, column] = torch.tensor([place, 1])
    return index


def test_the_example_worked_by_hand() -> None:
    tags = (torch.arange(32, dtype=torch.float64) * 0.1).reshape(1, 2, 4, 4).float()
    push, pull = tag_loss(tags, _index([[3, 22], [10, 30]]), form="exp")
    assert push.item() == pytest.approx(0.28489141236546156, rel=1e-6)
    assert pull.item() == pytest.approx(0.95125, rel=1e-6)


@pytest.mark.parametrize("form", ["exp", "max"])
def test_one_person_has_no_push_loss(form: str) -> None:
    tags = torch.randn(1, 2, 4, 4, requires_grad=True)
    push, pull = tag_loss(tags, _index([[3, 22]]), form=form)
    assert push.item() == 0
    assert pull.item() > 0
    push, pull = tag_loss(tags, _index([]), form=form)
    assert (push.item(), pull.item()) == (0, 0)
    (push + pull).sum().backward()
    assert not tags.grad.any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 31), max_size=4), max_size=6),
    st.sampled_from(["exp", "max"]),
    st.integers(0, 1000),
)
def test_people_one_by_one_give_the_same_as_all_at_once(people: list[list[int]], form: str, seed: int) -> None:
    tags = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
    push, pull = tag_loss(tags, _index(people, num_joints=4, room=6), form=form)
    there = [tags.flatten()[places] for places in people if places]
    means = [values.mean() for values in there]
    expected_pull = sum(float((v - m).square().mean()) for v, m in zip(there, means, strict=True)) / max(1, len(there))
    expected_push, pairs = 0.0, 0
    for place, first in enumerate(means):
        for second in means[place + 1 :]:
            apart = abs(float(first - second))
            expected_push += np.exp(-(apart**2)) if form == "exp" else max(0.0, 1 - apart)
            pairs += 1
    assert pull.item() == pytest.approx(expected_pull, abs=1e-5)
    assert push.item() == pytest.approx(0.5 * expected_push / max(1, pairs), abs=1e-5)


def test_a_masked_pixel_has_no_gradient_but_counts_in_the_mean() -> None:
    found = torch.ones(1, 2, 4, 4, requires_grad=True)
    mask = torch.ones(1, 4, 4)
    mask[0, 1, 2] = 0
    loss = heatmap_loss(found, torch.zeros(1, 2, 4, 4), mask)
    assert loss.item() == pytest.approx(15 / 16)
    loss.backward()
    assert not found.grad[0, :, 1, 2].any()


def test_half_precision_outputs_are_compared_in_float32() -> None:
    found = torch.full((1, 1, 8, 8), 300.0, dtype=torch.float16)
    assert heatmap_loss(found, torch.zeros(1, 1, 8, 8), torch.ones(1, 8, 8)).item() == pytest.approx(90_000)
    push, pull = tag_loss(torch.full((1, 2, 4, 4), 300.0, dtype=torch.bfloat16), _index([[3], [4]]), form="exp")
    assert push.dtype == pull.dtype == torch.float32


def test_the_mean_over_micro_batches_is_the_mean_over_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(5, 6, 8, 8, generator=generator), torch.randn(5, 3, 16, 16, generator=generator)]
    heatmaps = [torch.rand(5, 3, size, size, generator=generator) for size in (8, 16)]
    masks = [torch.ones(5, size, size) for size in (8, 16)]
    index = torch.stack([torch.randint(0, 192, (5, 4, 3), generator=generator), torch.ones(5, 4, 3).long()], dim=-1)

    def losses(rows: slice) -> dict[str, Tensor]:
        targets = {"heatmaps": [each[rows] for each in heatmaps], "masks": [each[rows] for each in masks]}
        batch = Batch(None, {**targets, "index": index[rows]}, torch.arange(5)[rows])
        return dict(pose_loss([each[rows] for each in outputs], batch, config=LossConfig()))

    whole, first, rest = losses(slice(0, 5)), losses(slice(0, 2)), losses(slice(2, 5))
    for name, term in whole.items():
        assert (0.4 * first[name] + 0.6 * rest[name]).item() == pytest.approx(term.item(), rel=1e-5)
