"""Networks have recorded bits in portable arithmetic, and an evaluation has those of training."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.portable.arithmetic import portable_arithmetic

# Of `python -m tests.unit.portable.networks`, on any processor.
RECORDED = """\
residual cd08f6790befb804
recurrent ae3d650ddb684cf1
attention 0bcc32949ff8a676
decoder 57a459506a879c10
"""
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        pytest.param({}, 1, id="the fastest kernels of this processor"),
        pytest.param({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, 1, id="no vectors"),
        pytest.param(
            {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, 2, id="AVX2, two threads", marks=FULL
        ),
        pytest.param({"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, 4, id="no VNNI", marks=FULL),
        pytest.param({"MKL_CBWR": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}, 1, id="SSE4", marks=FULL),
        pytest.param({"ATEN_CPU_CAPABILITY": "default"}, 4, id="no vectors, four threads", marks=FULL),
    ],
)
def test_networks_have_the_recorded_hashes(variables: dict[str, str], threads: int) -> None:
    command = [sys.executable, "-m", "tests.unit.portable.networks", str(threads)]
    found = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert found.stdout == RECORDED, found.stderr[-2_000:]


X = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(0))

CALLS: dict[str, Callable[[], Tensor]] = {
    **{
        f"interpolate {mode}": partial(F.interpolate, X, scale_factor=2, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "var": lambda: X.var(),
    "var, biased": lambda: X.var(unbiased=False),
    "var, dim": lambda: X.var(1),
    "var, dim, biased": lambda: X.var(1, False),
    "var, dims, kept": lambda: X.var((2, 3), True, True),
    "var, correction": lambda: X.var(1, correction=2),
    "std, biased": lambda: X.std(unbiased=False),
    "std, dims": lambda: X.std((1, 3), False, True),
    "var_mean": lambda: torch.cat([each.flatten() for each in torch.var_mean(X, 1, False)]),
    "std_mean": lambda: torch.cat([each.flatten() for each in torch.std_mean(X, (2, 3))]),
    "norm": lambda: X.norm(dim=1),
    "vector_norm": lambda: torch.linalg.vector_norm(X, dim=(1, 2)),
    "logsumexp": lambda: X.logsumexp(1),
    "softmax": lambda: X.softmax(1),
    "linear": lambda: F.linear(X, X[0, 0]),
    "matmul": lambda: X @ X.mT,
    "einsum": lambda: torch.einsum("nchw,mchw->nm", X, X),
    "conv2d": lambda: F.conv2d(X, X[:, :, :3, :3], padding=1),
    "conv2d, same": lambda: F.conv2d(X, X[:, :, :3, :2], padding="same"),
    "batch_norm": lambda: F.batch_norm(X, torch.zeros(3), torch.ones(3)),
    "layer_norm": lambda: F.layer_norm(X, (7, 6)),
    "group_norm": lambda: F.group_norm(X, 3),
    "instance_norm": lambda: F.instance_norm(X),
    "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(X, (3, 2)),
    "max_pool2d": lambda: F.max_pool2d(X, 2),
    "cross_entropy": lambda: F.cross_entropy(X, torch.zeros(2, 7, 6, dtype=torch.int64), label_smoothing=0.1),
    "binary_cross_entropy": lambda: F.binary_cross_entropy_with_logits(X, X.sigmoid()),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(X, X.abs()),
    "cosine_similarity": lambda: F.cosine_similarity(X, X.abs()),
    "normalize": lambda: F.normalize(X),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X),
    "pixel_shuffle": lambda: F.pixel_shuffle(X.view(1, 4, 9, 7), 2),
    "silu": lambda: F.silu(X),
    "mish": lambda: F.mish(X),
    "rand": lambda: torch.rand(3, 4, generator=torch.Generator().manual_seed(0)),
    "randn": lambda: torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_evaluation_has_the_bits_of_training(name: str) -> None:
    with portable_arithmetic():
        expected = CALLS[name]()
        with torch.inference_mode():
            found = CALLS[name]()
    assert torch.equal(found, expected)
