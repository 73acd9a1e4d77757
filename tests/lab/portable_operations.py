"""Hashes of functions, of single operations with their gradients, and of initial weights, to compare versions of torch
and processors.

    python -m tests.lab.portable_operations

Formulas of gradients, and functions in Python such as initializers, change from one version of torch to another.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

from samebits.portable.arithmetic import portable_arithmetic
from tests.unit.portable.test_formulas import GATHERING

INITIALIZERS = "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_"
FUNCTIONS = "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan erf sigmoid tanh relu"
FUNCTIONS_OF_LAYERS = "gelu silu mish softplus softshrink"
NUM_VALUES = 50_000
OPTIMIZERS = "SGD Adam AdamW Adagrad RMSprop Adadelta Rprop Muon"


def digest(*values: Tensor) -> str:
    return hashlib.sha256(b"".join(each.detach().contiguous().numpy().tobytes() for each in values)).hexdigest()[:16]


def print_functions() -> None:
    """Any bits, multiples of 2^-16 up to 16, and borders, in float32 and float64."""
    rng = np.random.default_rng(0)
    ends = [0.0, 2.0**-149, 2.0**-126, 2.0**-12, 1.0, 4.0, 88.7, 150.0, 2.0**20, 3.4028235e38, np.inf, np.nan]
    for dtype, bits in ((np.float32, np.uint32), (np.float64, np.uint64)):
        any_bits = rng.integers(0, np.iinfo(bits).max, NUM_VALUES, dtype=bits, endpoint=True).view(dtype)
        usual = rng.integers(-(2**20), 2**20, NUM_VALUES) / 2.0**16
        borders = np.array([*ends, *np.negative(ends)], dtype)
        x = torch.from_numpy(np.concatenate([any_bits, usual.astype(dtype), borders]))
        for place, names in ((torch, FUNCTIONS), (nn.functional, FUNCTIONS_OF_LAYERS)):
            for name in names.split():
                result = getattr(place, name)(x)
                # The sign of NaN is the processor's.
                print(name, x.dtype, digest(torch.where(result.isnan(), torch.nan, result)))


def print_digests() -> None:
    for name, (operation, values) in GATHERING.items():
        inputs = [each.clone().requires_grad_() for each in values]
        result = operation(*inputs)
        weights = torch.arange(result.numel()).view(result.shape) / result.numel()
        print(name, digest(result, *torch.autograd.grad((result * weights).sum(), inputs)))
    for name in INITIALIZERS.split():
        torch.manual_seed(0)
        print(name, digest(getattr(nn.init, name)(torch.empty(8, 6))))
    for name in OPTIMIZERS.split():
        torch.manual_seed(0)
        model = nn.Linear(8, 6, bias=False)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        print(name, digest(model.weight))


if __name__ == "__main__":
    with portable_arithmetic():
        print_functions()
        print_digests()
