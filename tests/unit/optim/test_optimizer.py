"""Settings become the optimizer that they name, over the parameters that are trained."""

from typing import Any

import pytest
import torch
from torch import nn

from samebits.config.schema import OptimConfig
from samebits.optim.build import optimizer


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
