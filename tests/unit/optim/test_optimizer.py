"""Optimizers against timm's, torch's and MAE's, and learning rates against values worked out by hand."""

import copy
import json
import math
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.optim import Lamb as TimmLamb
from torch import nn

from samebits.config.schema import OptimConfig
from samebits.errors import CheckpointError, ConfigError
from samebits.optim.build import layer_scales, load_state, optimizer
from samebits.optim.schedule import factor


@pytest.mark.parametrize(
    ("config", "kind", "expected"),
    [
        ({"name": "sgd", "lr": 0.3, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, torch.optim.SGD,
         {"lr": 0.3, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
        ({"name": "adam", "lr": 0.2, "betas": (0.8, 0.9), "weight_decay": 0.5}, torch.optim.Adam,
         {"lr": 0.2, "betas": (0.8, 0.9), "weight_decay": 0.5, "decoupled_weight_decay": False}),
        ({"name": "adamw", "lr": 0.1}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
    ],
)  # fmt: skip
def test_every_setting_arrives(config: dict[str, Any], kind: type, expected: dict[str, Any]) -> None:
    made = optimizer(nn.Linear(2, 2), OptimConfig(**config))
    assert type(made) is kind
    (group,) = made.param_groups
    assert {name: group[name] for name in expected} == expected


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    (group,) = optimizer(model, OptimConfig()).param_groups
    assert [id(p) for p in group["params"]] == [id(model[0].bias), id(model[1].weight), id(model[1].bias)]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_the_fused_form_computes_what_the_plain_form_does(name: Any) -> None:
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    models[1].load_state_dict(models[0].state_dict())
    ours = optimizer(models[0], OptimConfig(name=name, lr=0.1, weight_decay=0.01))
    options = dict(ours.defaults, fused=False, foreach=False)
    options.pop("decoupled_weight_decay", None)
    plain = type(ours)(models[1].parameters(), **options)
    for step in range(4):
        for model, made in zip(models, (ours, plain), strict=True):
            made.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(7, 5)).square().mean().backward()
            made.step()
    torch.testing.assert_close(models[0].weight, models[1].weight)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_norms_and_biases_can_be_spared_from_weight_decay(name: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    model[3].bias.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    made = optimizer(model, OptimConfig(name=name, lr=0.1, weight_decay=0.5, decay_norms_and_biases=False))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"0.weight", "3.weight"}
    assert sum(len(group["params"]) for group in made.param_groups) == 5


def test_a_group_that_would_be_empty_is_left_out() -> None:
    model = nn.Linear(2, 2, bias=False)
    (group,) = optimizer(model, OptimConfig(weight_decay=0.5, decay_norms_and_biases=False)).param_groups
    assert group["weight_decay"] == 0.5


class Net(nn.Module):
    """Embedding, two hidden matrices, norm, output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.hidden, self.norm, self.deep, self.head = (
            nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 3),
        )  # fmt: skip

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.deep(self.norm(self.hidden(self.embed(indices)))))
        return found


def take_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randint(0, 5, (7,))).square().sum().backward()
        for each in optimizers:
            each.step()


def twins() -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_computes_what_timms_does(weight_decay: float) -> None:
    ours, other = twins()
    config = OptimConfig(name="lamb", lr=0.02, weight_decay=weight_decay)
    reference = TimmLamb(other.parameters(), lr=0.02, weight_decay=weight_decay, max_grad_norm=None)
    take_steps(ours, [optimizer(ours, config)], range(5))
    take_steps(other, [reference], range(5))
    for mine, theirs in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_muon_trains_hidden_matrices_and_adamw_the_rest_with_the_values_of_torchs_two_optimizers() -> None:
    ours, other = twins()
    config = OptimConfig(name="muon", lr=0.01, momentum=0.95, weight_decay=0.1, decay_norms_and_biases=False)
    hidden = [other.hidden.weight, other.deep.weight]
    rest = [[other.embed.weight, other.head.weight], [each for each in other.parameters() if each.dim() == 1]]
    references = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": rest[0], "weight_decay": 0.1}, {"params": rest[1], "weight_decay": 0.0}], lr=0.01, fused=True
        ),
    ]
    take_steps(ours, [optimizer(ours, config)], range(4))
    take_steps(other, references, range(4))
    for (name, mine), theirs in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_muon_needs_hidden_matrices() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="hidden matrices"):
        optimizer(model, OptimConfig(name="muon"))


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_loaded_state_continues_with_equal_bits_and_another_optimizers_state_is_refused(name: Any) -> None:
    model, resumed = twins()
    config = OptimConfig(name=name, lr=0.02, weight_decay=0.1)
    first = optimizer(model, config)
    take_steps(model, [first], range(3))
    resumed.load_state_dict(model.state_dict())
    second = optimizer(resumed, config)
    state = first.state_dict()
    json.dumps(state["param_groups"])  # a checkpoint stores them as JSON
    load_state(second, copy.deepcopy(state))
    take_steps(model, [first], range(3, 5))
    take_steps(resumed, [second], range(3, 5))
    for mine, theirs in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(CheckpointError, match="different optimizer"):
        load_state(optimizer(resumed, OptimConfig(name="sgd")), state)


def test_layers_of_a_vision_transformer_learn_at_the_rates_of_beit_and_mae() -> None:
    with torch.device("meta"):
        names = [name for name, _ in timm.create_model("vit_tiny_patch16_224").named_parameters()]

    def layer_of(name: str) -> int:  # get_layer_id_for_vit in facebookresearch/mae, util/lr_decay.py
        if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
            return 0
        return int(name.split(".")[1]) + 1 if name.startswith("blocks") else 13

    assert layer_scales(names, 0.7) == {name: 0.7 ** (13 - layer_of(name)) for name in names}


def test_blocks_of_a_resnet_are_layers_and_a_model_without_blocks_is_refused() -> None:
    names = ["conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer1.0.downsample.0.weight",
             "layer1.1.bn1.bias", "layer2.0.conv1.weight", "fc.weight"]  # fmt: skip
    assert list(layer_scales(names, 0.5).values()) == [1 / 16, 1 / 16, 1 / 8, 1 / 8, 1 / 4, 1 / 2, 1]
    with pytest.raises(ConfigError, match="repeated blocks"):
        layer_scales(["0.weight", "2.weight"], 0.5)


def test_groups_have_the_scale_of_their_layer_besides_the_decay() -> None:
    model = nn.Sequential(*(nn.Sequential() for _ in range(2)))
    for index in range(2):
        model[index].add_module("fc", nn.Linear(2, 2))
    made = optimizer(model, OptimConfig(layer_decay=0.5, weight_decay=0.1, decay_norms_and_biases=False))
    assert [(group["weight_decay"], group["lr_scale"]) for group in made.param_groups] == [
        (0.1, 0.25), (0.1, 0.5), (0.0, 0.25), (0.0, 0.5)
    ]  # fmt: skip


def factors(num_steps: int, steps_per_epoch: int, **config: Any) -> list[float]:
    settings = OptimConfig(**config)
    return [factor(step, num_steps, steps_per_epoch, settings) for step in range(num_steps)]


def test_constant_stays() -> None:
    assert factors(5, 2) == [1.0] * 5


def test_cosine_starts_at_the_peak_passes_the_middle_and_ends_at_its_final_factor() -> None:
    got = factors(5, 1, schedule="cosine", final_factor=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    assert got == pytest.approx([1.0, quarter, 0.6, 1.2 - quarter, 0.2])


def test_one_cycle_rises_to_its_peak_and_falls_to_its_end() -> None:
    got = factors(11, 1, schedule="one_cycle", peak_at=0.4, start_factor=0.1, final_factor=0.01)
    assert got[0] == pytest.approx(0.1)
    assert got[2] == pytest.approx(0.55)  # half way up
    assert got[4] == pytest.approx(1.0)
    assert got[7] == pytest.approx(0.505)  # half way down
    assert got[10] == pytest.approx(0.01)
    assert got[:5] == sorted(got[:5])
    assert got[4:] == sorted(got[4:], reverse=True)


@pytest.mark.parametrize(("peak_at", "ends"), [(0.0, (1.0, 0.0)), (1.0, (0.04, 1.0))])
def test_one_cycle_may_peak_at_an_end(peak_at: float, ends: tuple[float, float]) -> None:
    got = factors(10, 1, schedule="one_cycle", peak_at=peak_at)
    assert (got[0], got[-1]) == pytest.approx(ends)


def test_multi_step_multiplies_at_each_milestone_in_epochs() -> None:
    got = factors(8, 2, schedule="multi_step", milestones=(1, 2.5), gamma=0.1)
    assert got == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_warmup_is_linear_and_the_schedule_then_continues_as_without_it() -> None:
    with_warmup = factors(12, 4, schedule="cosine", warmup_epochs=1)
    without = factors(12, 4, schedule="cosine")
    assert with_warmup[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert with_warmup[4:] == without[4:]


def test_warmup_may_end_inside_an_epoch() -> None:
    assert factors(4, 4, warmup_epochs=0.4) == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_a_run_of_one_step_has_a_learning_rate() -> None:
    assert factors(1, 1, schedule="cosine") == [1.0]
    assert factors(1, 1, schedule="one_cycle", start_factor=0.25) == [0.25]


@settings(max_examples=400, deadline=None)
@given(
    num_steps=st.integers(1, 500),
    steps_per_epoch=st.integers(1, 50),
    schedule=st.sampled_from(["constant", "cosine", "one_cycle", "multi_step"]),
    warmup=st.floats(0, 5),
    final=st.floats(0, 1),
    peak=st.floats(0, 1),
    start=st.floats(0, 1),
)
def test_factors_are_between_nothing_and_the_peak(
    num_steps: int, steps_per_epoch: int, schedule: Any, warmup: float, final: float, peak: float, start: float
) -> None:
    config = OptimConfig(
        schedule=schedule, warmup_epochs=warmup, final_factor=final, peak_at=peak, start_factor=start, milestones=(1, 3)
    )
    for step in range(num_steps):
        assert 0 <= factor(step, num_steps, steps_per_epoch, config) <= 1 + 1e-12


def test_warmup_cosine_is_torchvisions_schedule_at_each_epoch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    # As in torchvision's references/classification/train.py, stepped after each epoch.
    reference = torch.optim.lr_scheduler.SequentialLR(
        sgd,
        [
            torch.optim.lr_scheduler.LinearLR(sgd, start_factor=0.01, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=25, eta_min=0.001),
        ],
        milestones=[5],
    )
    expected = []
    for _ in range(30):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        reference.step()
    got = factors(30_000, 1000, schedule="warmup_cosine", warmup_epochs=5, warmup_factor=0.01, final_factor=0.001)
    assert got[::1000] == pytest.approx(expected, abs=1e-4)
    assert got[-1] == pytest.approx(0.001)
    assert len(set(got[:5000])) == 5000  # changes at each step, not at each epoch


def test_a_warmup_factor_is_where_the_warmup_starts() -> None:
    got = factors(10, 2, warmup_epochs=2, warmup_factor=0.2)
    assert got[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@settings(max_examples=200, deadline=None)
@given(num_steps=st.integers(2, 300), steps_per_epoch=st.integers(1, 60), warmup=st.floats(0, 20))
def test_warmup_takes_at_most_half_of_a_run_or_what_is_set(num_steps: int, steps_per_epoch: int, warmup: float) -> None:
    shape = {"schedule": "cosine", "final_factor": 0.1}
    got, without = factors(num_steps, steps_per_epoch, warmup_epochs=warmup, **shape), factors(num_steps, 1, **shape)
    length = math.ceil(min(warmup * steps_per_epoch, num_steps / 2))
    assert got[length:] == without[length:]
    assert got[:length] == pytest.approx([(step + 1) / (length + 1) for step in range(length)])
    assert length <= (num_steps + 1) // 2


def test_a_run_that_would_be_all_warmup_ends_at_a_low_learning_rate() -> None:
    got = factors(20, 10, schedule="cosine", warmup_epochs=2)  # the preset of classify with epochs=2
    assert got[9] == max(got)
    assert got[9] == pytest.approx(10 / 11)
    assert got[-1] == 0
