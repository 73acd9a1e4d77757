"""Data of the scripts in this folder, and the digest that they print."""

import hashlib
import os

import torch
from torch.utils.data import TensorDataset


def data(num_samples=37):
    """Return samples with 6 features and one of 3 labels."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(features, torch.randint(0, 3, (num_samples,), generator=generator))


def print_sha256(*modules):
    """Print the digest of the modules' weights and buffers on rank 0."""
    digest = hashlib.sha256()
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    if os.environ["RANK"] == "0":
        print("sha256", digest.hexdigest())
