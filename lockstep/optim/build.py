"""From settings to a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import OptimConfig
from lockstep.errors import CheckpointError


def optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over all parameters that require a gradient, in the model's order; those that weight decay spares
    come last.

    Torch's fused form: one pass over the values, element by element, so that it changes no bit between worlds.
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
    # By the number of dimensions, as timm has it: scales and shifts of norms, and biases, have one.
    decayed = [parameter for parameter in trained if parameter.dim() > 1]
    spared = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer a saved state_dict, each tensor in the memory layout of its parameter.

    Files hold values in the order of their indices, and the fused kernels go through memory without a look at strides:
    with another layout (channels last, say) they would pair each value with another one's momentum.

    Hyperparameters are the optimizer's own: they follow from the settings, and not from a file.

    Raises:
        CheckpointError: The state is that of an optimizer over other parameters, or of another kind.
    """
    check_state(optimizer, state)
    parameters = _in_order(optimizer)
    for place, entries in state["state"].items():
        shape = parameters[place].shape
        for name, value in entries.items():
            is_right = value is None if not isinstance(value, Tensor) else value.is_floating_point()
            if not is_right or (isinstance(value, Tensor) and value.shape != (() if name == "step" else shape)):
                raise _another(f"{name} of parameter {place} has another form")
    optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entries[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def check_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """See that a saved state_dict has the groups and the names of this optimizer's; values are not looked at.

    Raises:
        CheckpointError: It has not.
    """
    groups = [group.get("params") if isinstance(group, dict) else None for group in state["param_groups"]]
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if groups != own:
        raise _another("it has other groups of parameters")
    names = {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else {"step", "exp_avg", "exp_avg_sq"}
    num_parameters = sum(map(len, own))
    for place, entries in state["state"].items():
        if not 0 <= place < num_parameters or entries.keys() != names:
            raise _another(f"it has {', '.join(sorted(entries))} for parameter {place}")


def _in_order(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _another(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's optimizer is another one: {problem[:200]}",
        fix="go on with the settings that it was written with",
    )
