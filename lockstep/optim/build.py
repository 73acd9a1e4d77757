"""torch optimizers from settings, and the loading of their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.sections import OptimConfig
from lockstep.errors import CheckpointError


def optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Make the optimizer of all parameters that require a gradient.

    Parameters are in the model's order; those without weight decay come last. Fused implementations are used: a single
    elementwise pass, whose bits do not depend on the world or on the sharding.
    """
    parameters = _groups(model, config)
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=True,
        )
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def _groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.decay_norms_and_biases:
        return [{"params": trained}]
    # By the number of dimensions, as in timm: scales and shifts of norms, and biases, have one.
    decayed = [parameter for parameter in trained if parameter.dim() > 1]
    undecayed = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state_dict into an optimizer, each tensor in the memory layout of its parameter.

    Files store values in index order, but fused kernels read memory without regard to strides. With another layout,
    such as channels last, they would pair each value with another value's momentum.

    Hyperparameters stay those of the optimizer: they come from the settings, not from a file.

    Raises:
        CheckpointError: The state belongs to another kind of optimizer, or to other parameters.
    """
    check_state(optimizer, state)
    parameters = _in_order(optimizer)
    for index, entries in state["state"].items():
        shape = parameters[index].shape
        for name, value in entries.items():
            is_right = value is None if not isinstance(value, Tensor) else value.is_floating_point()
            if not is_right or (isinstance(value, Tensor) and value.shape != (() if name == "step" else shape)):
                raise _different_optimizer(f"{name} of parameter {index} has another shape or type")
    optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entries[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def check_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Check that a saved state_dict has this optimizer's parameter groups and names. Values are not checked.

    Raises:
        CheckpointError: It has others.
    """
    groups = [group.get("params") if isinstance(group, dict) else None for group in state["param_groups"]]
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if groups != own:
        raise _different_optimizer("it has other parameter groups")
    names = {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else {"step", "exp_avg", "exp_avg_sq"}
    num_parameters = sum(map(len, own))
    for index, entries in state["state"].items():
        if not 0 <= index < num_parameters or entries.keys() != names:
            raise _different_optimizer(f"it has {', '.join(sorted(entries))} for parameter {index}")


def _in_order(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _different_optimizer(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint belongs to a different optimizer: {problem[:200]}",
        fix="Resume with the settings of the run that wrote it (optim.name, optim.decay_norms_and_biases).",
    )
