"""torch optimizers from settings, and the loading of their state."""

from typing import Any

import torch
from torch import Tensor, nn

from samebits.config.sections import OptimConfig
from samebits.errors import CheckpointError, ConfigError
from samebits.optim.lamb import Lamb
from samebits.optim.layers import layer_scales
from samebits.optim.muon import MuonAdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam, AdamW and LAMB


def optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Make the optimizer of all parameters that require a gradient.

    Parameters are in the model's order; those without weight decay come last. Fused implementations are used: a single
    elementwise pass, whose bits do not depend on the world or on the sharding. LAMB and Muon read whole tensors, after
    the reduction, on every rank. With `layer_decay`, groups have an `lr_scale`, as in timm.

    Raises:
        ConfigError: The model has no hidden matrices for muon, or no blocks for `layer_decay`.
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
    if config.name == "lamb":
        return Lamb(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    if config.name == "muon":
        return MuonAdamW(
            parameters, lr=config.lr, momentum=config.momentum, betas=config.betas, weight_decay=config.weight_decay
        )
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def _groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Group the trained parameters by what they differ in, in the model's order within a group."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = _hidden_matrices(model) if config.name == "muon" else set()
    scales = {} if config.layer_decay is None else layer_scales([*dict(model.named_parameters())], config.layer_decay)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in trained.items():
        options: dict[str, Any] = {}
        if not config.decay_norms_and_biases:
            # By the number of dimensions, as in timm: scales and shifts of norms, and biases, have one.
            options["weight_decay"] = config.weight_decay if parameter.dim() > 1 else 0.0
        if config.name == "muon":
            options["use_muon"] = name in matrices
        if scales:
            options["lr_scale"] = scales[name]
        key = (parameter.dim() <= 1 if "weight_decay" in options else False, *options.values())
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # stable: those without decay come last


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices that Muon trains: all but embeddings and the last one, the output layer."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    matrices = [name for name, each in model.named_parameters() if each.dim() == 2 and id(each) not in embeddings]
    if len(matrices) < 2:
        raise ConfigError(
            "optim.name=muon needs a model with hidden matrices, and this one has none",
            cause="Convolutions, embeddings, norms, biases and the output layer are trained with AdamW.",
            fix="Set optim.name=adamw, or choose a model of linear layers, such as a vision transformer.",
        )
    return set(matrices[:-1])


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state_dict into an optimizer, each tensor in the memory layout of its parameter.

    Files store values in index order, but fused kernels read memory without regard to strides. With another layout,
    such as channels last, they would pair each value with another value's momentum.

    Hyperparameters stay those of the optimizer: they come from the settings, not from a file.

    Raises:
        CheckpointError: The state belongs to another kind of optimizer, or to other parameters.
    """
    check_state(optimizer, state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
    names = [set(each) for _, each in state_names(optimizer)]
    for index, entries in state["state"].items():
        if not 0 <= index < len(names) or entries.keys() != names[index]:
            raise _different_optimizer(f"it has {', '.join(sorted(entries))} for parameter {index}")


def state_names(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Return each trained parameter, of any shape, with the names of the tensors that the optimizer keeps for it.

    `step` has the shape (), the others that of the parameter.
    """
    found: list[tuple[Tensor, tuple[str, ...]]] = []
    for group in optimizer.param_groups:
        has_momentum = isinstance(optimizer, torch.optim.SGD) or group.get("use_muon", False)
        names = ("momentum_buffer",) if has_momentum else ("step", *_MOMENTS)
        found += [(parameter, names) for parameter in group["params"]]
    return found


def _different_optimizer(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint belongs to a different optimizer: {problem[:200]}",
        fix="Resume with the settings of the run that wrote it (optim.name, optim.decay_norms_and_biases).",
    )
