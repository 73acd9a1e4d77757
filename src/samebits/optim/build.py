"""torch optimizers from settings, and the loading of their state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samebits.errors import CheckpointError, ConfigError
from samebits.portable import floats

if TYPE_CHECKING:
    from samebits.config.schema import OptimConfig

# Depth of each parameter in a model of repeated blocks, for a learning rate that decays from layer to layer.


# A numbered entry (blocks.3, layer2.0, encoder.layers.encoder_layer_3) with named modules inside. An entry that is a
# single layer (`stem.0.weight`) is no block.
_BLOCK = re.compile(r"(?:.*?\.)?(?:\w+[_-])?\d+(?:\.\d+)*(?=\.[^.\d][^.]*\.)")


def layer_scales(names: Sequence[str], decay: float) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter: decay ** (number of layers above it).

    As in BEiT (Bao et al., ICLR 2022) and MAE: the stem and position embeddings are layer 0, blocks are layers 1 to B,
    and the final norm and the head are layer B + 1, whose factor is 1. timm counts the final norm as one layer more.

    Raises:
        ConfigError: The model has no repeated blocks.
    """
    found = {name: match[0] for name in names if (match := _BLOCK.match(name))}
    blocks = list(dict.fromkeys(found.values()))
    if len(blocks) < 2:
        raise ConfigError(
            "optim.layer_decay needs a model of repeated blocks, and this one has none",
            given=f"parameters {', '.join(list(names)[:3])}, …",
            allowed="blocks with numbered names, such as blocks.0.norm.weight",
            fix="Set optim.layer_decay=null.",
        )
    depth = {block: index + 1 for index, block in enumerate(blocks)}
    last = max(index for index, name in enumerate(names) if name in found)
    scales = {}
    current = 0
    for index, name in enumerate(names):
        if name in found:
            current = depth[found[name]]
        elif index > last:
            current = len(blocks) + 1
        scales[name] = decay ** (len(blocks) + 1 - current)
    return scales


# Muon for a model's hidden matrices, and AdamW for the rest of its parameters, as one optimizer.
#
# torch.optim.Muon accepts matrices only. Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
# 2024, train embeddings, the output layer, norms, biases and convolutions with AdamW. With the scaling of Liu et al.,
# "Muon is scalable for LLM training", 2025 (`match_rms_adamw`), both use the same learning rate and weight decay.


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer of two kinds of parameter groups; its state is that of torch.optim.Muon and AdamW.

    Each update of a matrix depends on all of its values, so each rank needs whole parameters.

    Args:
        groups: Parameter groups. `use_muon` selects Muon for a group, whose parameters are then (O, I).
        momentum: Momentum of Muon; Nesterov's form is used.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "use_muon": False})
        self._muon = torch.optim.Muon(
            self._parameters(use_muon=True),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(
            self._parameters(use_muon=False),
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            fused=True,
        )
        # Both read their settings from the groups, which replace their own in each step.
        for group in self.param_groups:
            inner = self._muon if group["use_muon"] else self._adamw
            for name, value in inner.defaults.items():
                group.setdefault(name, value)

    def _parameters(self, *, use_muon: bool) -> list[Any]:
        return [
            each
            for group in self.param_groups
            if group["use_muon"] == use_muon
            for each in group["params"]
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss is returned
        """Update all parameters that have a gradient. Closures are not supported."""
        assert closure is None, "MuonAdamW takes no closure"
        for inner, use_muon in ((self._muon, True), (self._adamw, False)):
            # Linked at each step, because load_state_dict replaces both objects.
            inner.param_groups = [
                group for group in self.param_groups if group["use_muon"] == use_muon
            ]
            inner.state = self.state
            inner.step()  # type: ignore[no-untyped-call]  # Muon has no annotations


# LAMB: Adam with decoupled weight decay, whose update of each tensor is scaled to the tensor's norm.
#
# You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2, with
# Adam's bias correction. torch has no LAMB. As in timm and NVIDIA's implementation, tensors without weight decay (norms
# and biases) have a ratio of 1; unlike in these, gradients are not clipped here (`optim.clip_norm` does it).


class Lamb(torch.optim.Optimizer):
    """The LAMB optimizer. The norms are of whole tensors, so each rank needs whole parameters.

    Args:
        params: Parameters of any shape, or groups of them.
        eps: Added to the root of the second moment.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss is returned
        """Update all parameters that have a gradient. Closures are not supported."""
        assert closure is None, "LAMB takes no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        grad = parameter.grad
        assert grad is not None
        if not state:
            # On the CPU, so that item() waits for no GPU.
            state["step"] = torch.zeros(())
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        num_steps = int(state["step"].item())
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (
            (state["exp_avg_sq"] / (1 - floats.power(beta2, num_steps))).sqrt_().add_(group["eps"])
        )
        update = (state["exp_avg"] / (1 - floats.power(beta1, num_steps))).div_(root)
        if not group["weight_decay"]:
            parameter.sub_(update, alpha=group["lr"])
            return
        update.add_(parameter, alpha=group["weight_decay"])
        # float32 sums over millions of values would be off by 1e-4.
        norm, update_norm = (
            torch.linalg.vector_norm(each, dtype=torch.float64) for each in (parameter, update)
        )
        ratio = torch.where((norm > 0) & (update_norm > 0), norm / update_norm, 1.0).to(
            parameter.dtype
        )
        parameter.sub_(update.mul_(ratio), alpha=group["lr"])


_MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam, AdamW and LAMB


def optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Make the optimizer of all parameters that require a gradient.

    Parameters are in the model's order; those without weight decay come last. Fused implementations are used: a single
    elementwise pass, whose bits do not depend on the world. LAMB and Muon read whole tensors, after
    the reduction, on every rank. With `layer_decay`, groups have an `lr_scale`, as in timm.

    Raises:
        ConfigError: The model has no hidden matrices for muon, or no blocks for `layer_decay`.
    """
    parameters = _groups(model, config)
    shared: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    momentum = config.momentum
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, **shared, momentum=momentum, nesterov=config.nesterov, fused=True
        )
    shared["betas"] = config.betas
    if config.name == "lamb":
        return Lamb(parameters, **shared)
    if config.name == "muon":
        return MuonAdamW(parameters, **shared, momentum=momentum)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(parameters, **shared, fused=True)


def _groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Group the trained parameters by what they differ in, in the model's order within a group."""
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    matrices = _hidden_matrices(model) if config.name == "muon" else set()
    scales = (
        {}
        if config.layer_decay is None
        else layer_scales([*dict(model.named_parameters())], config.layer_decay)
    )
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
    # stable: those without decay come last
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices that Muon trains: all but embeddings and the last one, the output layer."""
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    matrices = [
        name
        for name, each in model.named_parameters()
        if each.dim() == 2 and id(each) not in embeddings
    ]
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
            if not is_right or (
                isinstance(value, Tensor) and value.shape != (() if name == "step" else shape)
            ):
                raise _different_optimizer(f"{name} of parameter {index} has another shape or type")
    optimizer.load_state_dict(
        {"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    )
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entries[name] = torch.empty_like(
                    parameter, dtype=value.dtype, requires_grad=False
                ).copy_(value)


def check_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Check that a saved state_dict has this optimizer's parameter groups and names. Values are not checked.

    Raises:
        CheckpointError: It has others.
    """
    groups = [
        group.get("params") if isinstance(group, dict) else None for group in state["param_groups"]
    ]
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
