"""Calls of operations that torch's sample inputs do not reach, by their names in the tables: arguments and options."""

from typing import Any

import torch
from torch import Tensor


def _ramp(*shape: int) -> Tensor:
    """Values from -2 to 2, without order."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 % n).view(shape) / n - 0.5) * 4.0


X, Y, W = _ramp(4, 6), _ramp(4, 6).flip(0) + 0.1, _ramp(4, 6).abs()
LINE, IMAGE, VOLUME = _ramp(2, 3, 8), _ramp(2, 3, 6, 8), _ramp(1, 2, 4, 5, 6)
N, J = torch.arange(6), torch.tensor([0, 2, 1, 3])
HALF, SMALL = torch.tensor(0.5), (torch.arange(1024).view(32, 32) % 5).char()
BOXES = torch.tensor([[0.0, 0.5, 0.5, 4.0, 5.0], [1.0, 1.0, 0.0, 6.0, 3.5]])
IS_LARGE = X > 0

CALLS: dict[str, tuple[Any, ...]] = {
    **{f"__{side}shift__.{kind}": (N, 1 if kind == "Scalar" else N) for side in "lr" for kind in ("Scalar", "Tensor")},
    **{
        f"_foreach_{name}.{kind}": ([X, Y], {"Scalar": 0.3, "List": [Y, X], "ScalarList": [0.3, 3.0]}[kind])
        for name in ("add_", "sub_", "mul", "mul_", "div", "div_")
        for kind in ("Scalar", "List", "ScalarList")
    },
    **{f"_foreach_{name}.Tensor": ([X, Y], HALF) for name in ("add_", "mul", "mul_", "div", "div_")},
    "_foreach_copy_": ([X, X], [Y, W]), "_foreach_zero_": ([X, Y],), "_foreach_norm.Scalar": ([X, Y],),
    "_foreach_lerp_.Scalar": ([X, Y], [Y, W], 0.3), "_foreach_lerp_.ScalarList": ([X, Y], [Y, W], [0.3, 0.7]),
    "_foreach_lerp_.List": ([X, Y], [Y, W], [W, W]),
    **{f"bitwise_{name}.Scalar": (N, 3) for name in ("and", "or", "xor")},
    **{f"bitwise_{name}.Scalar_Tensor": (3, N) for name in ("and", "or", "xor")},
    "_index_put_impl": (X, [J], Y, True), "_is_all_true": (IS_LARGE,), "_is_any_true": (IS_LARGE,),
    "all.dims": (IS_LARGE, [0, 1]), "any.dims": (IS_LARGE, [0]), "count_nonzero.dim_IntList": (X, [1]),
    "_native_batch_norm_legit.no_stats": (IMAGE, None, None, True, 0.1, 1e-5),
    "_pack_padded_sequence": (LINE, torch.tensor([3, 2]), True), "_reshape_alias": (X, [6, 4], [4, 1]),
    **{f"_upsample_nearest_exact{d}d": (x, size) for d, x, size in
       ((1, LINE, [5]), (2, IMAGE, [5, 11]), (3, VOLUME, [3, 5, 9]))},
    **{f"upsample_nearest{d}d": (x, size) for d, x, size in ((2, IMAGE, [5, 11]), (3, VOLUME, [3, 5, 9]))},
    **{f"{name}2d_backward": (_ramp(2, 3, 5, 11), [5, 11], [2, 3, 6, 8])
       for name in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"{name}3d_backward": (_ramp(1, 2, 3, 5, 9), [3, 5, 9], [1, 2, 4, 5, 6])
       for name in ("upsample_nearest", "_upsample_nearest_exact")},
    "_upsample_nearest_exact1d_backward": (_ramp(2, 3, 5), [5], [2, 3, 8]),
    "_upsample_bicubic2d_aa": (IMAGE, [4, 5], False),
    "_upsample_bicubic2d_aa_backward": (_ramp(2, 3, 4, 5), [4, 5], [2, 3, 6, 8], False),
    "upsample_linear1d": (LINE, [5], False), "upsample_linear1d_backward": (_ramp(2, 3, 5), [5], [2, 3, 8], False),
    "_weight_norm_interface": (X, W[:, :1]),
    "_weight_norm_interface_backward": (Y, X, W[:, :1], X.norm(dim=1, keepdim=True), 0),
    "affine_grid_generator": (_ramp(2, 2, 3), [2, 3, 4, 5], False), "arange.start": (2, 7),
    "avg_pool3d": (VOLUME, [2, 2, 3], [1, 2, 2], [1, 0, 1]),
    "avg_pool3d_backward": (_ramp(1, 2, 2, 2, 2), VOLUME, [2, 2, 3], [2, 2, 3], [0, 0, 0], False, True, None),
    "binary_cross_entropy_with_logits": (X, W / 2, None, W[0]),
    "mse_loss": (X, Y), "mse_loss_backward": (HALF, X, Y, 1),
    "bucketize.Scalar": (0.3, X[0].sort()[0]), "searchsorted.Scalar": (X[0].sort()[0], 0.3),
    "clamp": (X, -0.5, 0.7), "clamp_max": (X, 0.3), "threshold": (X, 0.2, 5.0), "frac": (X,), "log10": (W + 0.1,),
    "convolution_overrideable": (IMAGE, _ramp(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "copysign.Scalar": (X, -1.0), "floor_divide.Scalar": (X, 0.35), "fmod.Scalar": (X, 0.35), "pow.Scalar": (1.5, X),
    "remainder.Scalar_Tensor": (2.5, W + 0.1), "xlogy.Scalar_Other": (X, 2.0), "xlogy.Scalar_Self": (2.0, W + 0.1),
    "cummax": (X, 1), "cummin": (X, 0), "sort.stable": (X,), "unique_dim": (J.view(2, 2), 0), "vdot": (X[0], Y[0]),
    "fill.Tensor": (X, HALF), "is_same_size": (X, Y), "isin.Scalar_Tensor": (3, N), "isin.Tensor_Scalar": (N, 3),
    "lift": (X,), "lift_fresh_copy": (X,),
    "native_channel_shuffle": (_ramp(2, 4, 3, 3), 2), "view.dtype": (N, torch.float64),
    "nll_loss2d_forward": (IMAGE, torch.arange(96).view(2, 6, 8) % 3, None, 1, -100),
    "nll_loss2d_backward": (HALF, IMAGE, torch.arange(96).view(2, 6, 8) % 3, None, 1, -100, torch.tensor(96.0)),
    "norm.Scalar": (X,), "norm.ScalarOpt_dtype": (X, 2), "norm.ScalarOpt_dim_dtype": (X, 2, [1], False),
    "_int_mm": (SMALL, SMALL.T),
    "repeat_interleave.Tensor": (J,), "softplus": (X,), "softplus_backward": (Y, X, 1.0, 20.0),
    **{f"reflection_pad{d}d": (x, [1, 2] * d) for d, x in ((2, IMAGE), (3, VOLUME))},
    "replication_pad3d": (VOLUME, [1, 2] * 3),
    "reflection_pad2d_backward": (_ramp(2, 3, 9, 11), IMAGE, [1, 2] * 2),
    **{f"{name}_pad3d_backward": (_ramp(1, 2, 7, 8, 9), VOLUME, [1, 2] * 3) for name in ("reflection", "replication")},
    "torchvision::roi_align": (IMAGE, BOXES, 1.0, 2, 3, 2, True),
    "torchvision::_roi_align_backward": (_ramp(2, 3, 2, 3), BOXES, 1.0, 2, 3, 2, 3, 6, 8, 2, True),
    "torchvision::nms": (BOXES[:, 1:], torch.tensor([0.4, 0.7]), 0.3),
}  # fmt: skip
_UPDATE = {"lr": 0.1, "weight_decay": 0.01, "maximize": False}
_SGD = {**_UPDATE, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}
_ADAM = {**_UPDATE, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "amsgrad": True}
OPTIONS: dict[str, dict[str, Any]] = {"div.Scalar_mode": {"rounding_mode": "floor"}, "sort.stable": {"stable": True}}
OPTIONS |= {f"norm.ScalarOpt_{name}": {"dtype": torch.float32} for name in ("dtype", "dim_dtype")}
CALLS["div.Scalar_mode"] = (X, 0.35)
for _kind, _lr in (("", 0.1), (".tensor_lr", torch.tensor(0.1))):
    CALLS[f"_fused_sgd_{_kind}"], OPTIONS[f"_fused_sgd_{_kind}"] = ([X], [Y], [W]), {**_SGD, "lr": _lr}
    for _name in ("_fused_adam_", "_fused_adamw_"):
        CALLS[_name + _kind] = ([X], [Y], [Y * 0.1], [W], [W], [torch.tensor(3.0)])
        OPTIONS[_name + _kind] = {**_ADAM, "lr": _lr}
