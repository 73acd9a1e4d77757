"""Frozen parts of a model, which training does not change."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn
from torch.nn.modules.batchnorm import (
    _BatchNorm,  # the base class of all batch norms has no public name
)

from samebits.errors import ConfigError, wrapped


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze parameters of a model; called by a recipe's `build`.

    Frozen parameters require no gradient, so the optimizer never sees them, weight decay included. Batch norms inside a
    frozen module, and those whose own parameters are frozen, use their running statistics and do not update them.

    Args:
        model: The model; changed in place.
        patterns: Names of modules or parameters, with * for any text: `backbone`, `layer1.*`, `*.bias`. A module
            includes everything inside it.

    Returns:
        The names of the frozen parameters, in the model's order.

    Raises:
        ConfigError: A pattern matches nothing in the model, or no trainable parameter is left.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    frozen: set[str] = set()  # of modules and parameters
    for pattern in patterns:
        found = {name for name in [*modules, *parameters] if _is_within(name, pattern)}
        if not found:
            raise _unknown(pattern, [*modules, *parameters])
        frozen |= found
    for name in frozen & parameters.keys():
        parameters[name].requires_grad_(False)
    for name, module in modules.items():
        own = [f"{name}.{each}".lstrip(".") for each, _ in module.named_parameters(recurse=False)]
        if isinstance(module, _BatchNorm) and (name in frozen or (own and frozen.issuperset(own))):
            module.eval()
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "everything is frozen, so there is nothing to train",
            given=", ".join(patterns),
            fix="Freeze fewer layers.",
        )
    return [name for name in parameters if name in frozen]


def _is_within(name: str, pattern: str) -> bool:
    """Return whether a module or parameter matches a pattern, or a module around it does."""
    names = accumulate(name.split("."), "{}.{}".format)
    return any(fnmatchcase(each, pattern) for each in names if each)


def _unknown(pattern: str, names: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(pattern, names, n=3)
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names if name))
    shown = f"{', '.join(tops[:12])}{', …' if len(tops) > 12 else ''}"
    return ConfigError(
        f"{pattern} is no part of the model",
        allowed=wrapped(f"{shown}, names inside them, and * for any text"),
        fix=wrapped(
            f"Use {' or '.join(near)}."
            if near
            else "Use names of modules or parameters of this model."
        ),
    )
