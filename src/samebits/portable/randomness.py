"""Random numbers that are equal on every device: a counter-based hash of a key that the CPU's generator draws.

torch's generators differ between CPU and CUDA, and its normal numbers between processors. Number i of a draw with key k
is SplitMix64's finalizer of k + i * 0x9E3779B97F4A7C15 (`data/keyed.py` has the same). The state stays in torch's own
generator, so seeds and checkpoints work as ever. Arguments are those of torch's operations (ATen).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn

from samebits.portable import floats
from samebits.portable.functions import COS, SIN, log64, poly, power, sqrt
from samebits.portable.grid import exact_sum, over

_CHUNK = 1 << 15
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_STEP, _FIRST, _SECOND = (
    _signed(each) for each in (_GOLDEN, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _hashes(n: int, device: torch.device, generator: Generator | None) -> Iterator[Tensor]:
    """Yield n int64 of 63 random bits, in chunks of an even size (but the last)."""
    if generator is not None and generator.device.type != "cpu":
        generator = None
    key = int(torch.randint(-(2**63), 2**63 - 1, (), generator=generator))
    for start in range(0, n, _CHUNK):
        x = torch.arange(start, min(start + _CHUNK, n), device=device)
        # int64 wraps around, as uint64 does
        x.mul_(_STEP).add_(_signed((key + _GOLDEN) & (1 << 64) - 1))
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            x.bitwise_xor_((x >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)
        x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))
        yield (x >> 1) & ((1 << 63) - 1)


def _fill(x: Tensor, generator: Generator | None, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Write into a tensor, in the order of its elements, what a function makes of an even number of random bits."""
    n = x.numel()
    if not n:
        return x
    parts = [convert(bits) for bits in _hashes(n + n % 2, x.device, generator)]
    return x.copy_(torch.cat(parts)[:n].view(x.shape))


def uniform(
    x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None
) -> Tensor:
    """Fill with uniform numbers of 24 bits in [low, high)."""

    def numbers(bits: Tensor) -> Tensor:
        return ((bits >> 39).double() * 2.0**-24 * (high - low) + low).to(x.dtype)

    return _fill(x, generator, numbers)


def normal(
    x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None
) -> Tensor:
    """Fill with normal numbers: sqrt(-2 log u) times cosine and sine of 2 pi v (Box and Muller, 1958)."""
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")

    def numbers(bits: Tensor) -> Tensor:
        u, v = ((bits >> 31).double() * 2.0**-32).view(-1, 2).unbind(1)
        radius = sqrt((log64(1.0 - u) * -2.0).float()).double()
        pairs = torch.stack(_cos_sin(v), dim=1).mul_(radius[:, None])
        return (pairs.view(-1) * std + mean).to(x.dtype)

    return _fill(x, generator, numbers)


def _cos_sin(v: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of 2 pi v, 0 <= v < 1."""
    quarter = torch.round(v * 4.0)
    rest = (v - quarter * 0.25) * (2.0 * math.pi)  # at most an eighth of the circle
    square = rest * rest
    cosine = poly(square, COS)
    sine = poly(square, SIN).mul_(rest)
    k = quarter.long() & 3
    is_odd = (k & 1).bool()
    is_second = (k & 2).bool()
    first = torch.where(is_odd, -sine, cosine)
    second = torch.where(is_odd, cosine, sine)
    return torch.where(is_second, -first, first), torch.where(is_second, -second, second)


def normal_around(
    mean: Tensor | float, std: Tensor | float, *, generator: Generator | None = None
) -> Tensor:
    """Return normal numbers with a mean and a deviation of each: float64 ones, times std, plus mean, rounded."""
    if (torch.as_tensor(std) < 0).any():
        raise RuntimeError("normal expects all elements of std >= 0.0")
    like = torch.as_tensor(mean + std)
    drawn = normal(
        torch.empty(like.shape, dtype=torch.float64, device=like.device), generator=generator
    )
    return (drawn * std + mean).to(like.dtype)


def bernoulli(
    x: Tensor, p: float | Tensor | None = None, *, generator: Generator | None = None
) -> Tensor:
    """Fill with 1 at probability p, else 0. Without p, return a new tensor for the probabilities in x."""
    if p is None or isinstance(p, Tensor):
        numbers = uniform(
            torch.empty(
                x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
            ),
            generator=generator,
        )
        return (numbers < (x if p is None else p)).to(x.dtype)
    limit = p * 2.0**24
    return _fill(x, generator, lambda bits: (bits >> 39 < limit).to(x.dtype))


def exponential(x: Tensor, rate: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Fill with exponential numbers: -log(1 - u) / rate, of uniform numbers u."""
    units = uniform(torch.empty(x.shape, device=x.device), generator=generator)
    return x.copy_(log64(1.0 - units.double()) * (-1.0 / rate))


def dirichlet(alpha: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Return shares (..., n) that add up to 1: gamma numbers over their sum, by Marsaglia and Tsang (2000)."""
    wide = alpha.double()
    shape = torch.where(wide < 1.0, wide + 1.0, wide) - 1.0 / 3.0
    step = 1.0 / sqrt(shape * 9.0)
    gamma = torch.zeros_like(wide)
    pending = torch.ones_like(wide, dtype=torch.bool)
    while pending.any():
        x = normal(torch.empty_like(wide), generator=generator)
        u = uniform(torch.empty_like(wide), generator=generator)
        v = x * step + 1.0
        v = v * v * v
        logs = log64(v.clamp(min=2.0**-900))
        accepted = pending & (v > 0) & (log64(u) < x * x * 0.5 + shape - shape * v + shape * logs)
        gamma = torch.where(accepted, shape * v, gamma)
        pending = pending & ~accepted
    u = uniform(torch.empty_like(wide), generator=generator)
    gamma = torch.where(wide < 1.0, gamma * power(u, 1.0 / wide), gamma)
    return (gamma / exact_sum(gamma, (-1,), keepdim=True).clamp(min=2.0**-900)).to(alpha.dtype)


def integer(x: Tensor, low: int, high: int, *, generator: Generator | None = None) -> Tensor:
    """Fill with whole numbers in [low, high)."""
    return _fill(x, generator, lambda bits: low + bits % (high - low))


def permutation(n: int, device: torch.device, *, generator: Generator | None = None) -> Tensor:
    """Return 0 to n - 1 in a random order, (n,) int64: the order of n hashes."""
    if not n:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat(list(_hashes(n, device, generator))).argsort(stable=True)


def dropout(x: Tensor, p: float, training: bool | None) -> tuple[Tensor, Tensor]:
    """Return x / (1 - p) where kept and 0 elsewhere, and what was kept."""
    if training is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = bernoulli(torch.empty(x.shape, device=x.device), 1.0 - p) > 0
    return x * kept * (1.0 / (1.0 - p) if p < 1 else 0.0), kept


_LIKELY = (
    0.3  # of numbers within the bounds; from here on, normal numbers are drawn, below uniform ones
)


@contextmanager
def in_torch_init() -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` draw as here, also where a package has imported it by name."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = draw_truncated_normal
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@torch.no_grad()
def draw_truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Generator | None = None
) -> Tensor:
    """Fill a tensor of any shape with normal numbers between `a` and `b`: those that are rejected are drawn again.

    Each round draws numbers for the whole tensor.
    """
    below_a, below_b = (0.5 + 0.5 * floats.erf((x - mean) / std * 0.5**0.5) for x in (a, b))
    if below_b - below_a > _LIKELY:
        low, high = (tensor.new_tensor(x, device="cpu").item() for x in (a, b))
        result = tensor.normal_(mean, std, generator=generator)
        while (rejected := (result < low) | (result > high)).any():
            result = torch.where(
                rejected, torch.empty_like(result).normal_(mean, std, generator=generator), result
            )
        return tensor.copy_(result)
    peak = (max(a, min(mean, b)) - mean) / std
    peak = -0.5 * (peak * peak)

    def is_rejected(x: Tensor) -> Tensor:
        log_density = over(x - mean, std).pow_(2).mul_(-0.5).sub_(peak)
        return torch.empty_like(x).uniform_(generator=generator).log_() > log_density

    result = tensor.uniform_(a, b, generator=generator)
    rejected = is_rejected(result)
    while rejected.any():
        drawn = torch.empty_like(result).uniform_(a, b, generator=generator)
        result = torch.where(rejected, drawn, result)
        rejected = rejected & is_rejected(drawn)
    return tensor.copy_(result)
