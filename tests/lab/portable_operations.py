"""Hashes of single operations with their gradients, and of initial weights, to compare versions of torch.

    python -m tests.lab.portable_operations

Formulas of gradients, and functions in Python such as initializers, change from one version of torch to another.
"""

import hashlib

import torch
from torch import Tensor, nn

from samebits.portable.arithmetic import portable_arithmetic
from tests.unit.portable.test_more_operations import OPERATIONS

INITIALIZERS = "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_"
OPTIMIZERS = "SGD Adam AdamW Adagrad RMSprop Adadelta Rprop Muon"


def digest(*values: Tensor) -> str:
    return hashlib.sha256(b"".join(each.detach().contiguous().numpy().tobytes() for each in values)).hexdigest()[:16]


def print_digests() -> None:
    for name, (operation, values) in OPERATIONS.items():
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
        print_digests()
