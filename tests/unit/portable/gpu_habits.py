"""A GPU's habits on the CPU: what portable arithmetic may not depend on, done to each operation below it.

torch's CUDA kernels divide by a number by multiplying with its reciprocal, contract a * b + c, add in other orders and
tiles, and have other elementary functions and random numbers. Entered before portable arithmetic, this mode gets the
operations that portable forms consist of; entered alone, those of torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.portable import convolution, functions, products

aten = torch.ops.aten
# Functions of a library, whose last place is another one on a GPU. float32 from float64's root is not.
LAST_PLACES = "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan sinh cosh tanh erf erfinv sigmoid pow"
LAST_PLACES += " _softmax _log_softmax gelu silu mish softplus logsumexp sigmoid_backward tanh_backward gelu_backward"
LAST_PLACES += " _softmax_backward_data _log_softmax_backward_data native_layer_norm native_group_norm"
LAST_PLACES += " native_batch_norm native_layer_norm_backward native_batch_norm_backward"
LAST_PLACES += " convolution_backward _fused_adamw_ _fused_adam_"
DRAWS = frozenset({"uniform_", "normal_", "bernoulli_", "exponential_", "rand", "randn", "native_dropout", "bernoulli"})


class GpuHabits(TorchDispatchMode):
    """Computes as a GPU may; `draws`: other random numbers too."""

    def __init__(self, seed: int = 0, *, draws: bool = True) -> None:
        super().__init__()
        self.draws = draws
        self.generator = torch.Generator().manual_seed(seed)
        self.used: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = func.name().partition("::")[2].partition(".")[0]
        stem = name if name.startswith("_") else name.removesuffix("_")
        if not (args and isinstance(args[0], Tensor) and args[0].is_floating_point()) and name not in DRAWS:
            return func(*args, **options)
        if name in DRAWS:
            return self._drawn(func, args, options)
        habit: Callable[..., Any] | None = getattr(self, f"_{stem}", None)
        if habit is None:
            result = func(*args, **options)
            return self._other_last_places(result) if stem in LAST_PLACES.split() else result
        result = habit(*args, **options)
        if result is None:
            return func(*args, **options)
        self.used.add(stem)
        if "out" in options:
            return options["out"].copy_(result)
        return args[0].copy_(result) if name != stem else result

    def _drawn(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Other random numbers, where the operation has no generator of its own."""
        if not self.draws:
            return func(*args, **options)
        state = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        result = func(*args, **options)
        self.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(state)
        return result

    def _other_last_places(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._other_last_places(each) for each in result)
        if not isinstance(result, Tensor) or result.dtype not in (torch.float32, torch.float64):
            return result
        up = torch.rand(result.shape, generator=self.generator) < 0.3
        return result.copy_(torch.where(up, torch.nextafter(result, torch.full((), math.inf).to(result)), result))

    def _div(self, x: Tensor, y: Any, **options: Any) -> Tensor | None:
        if isinstance(y, Tensor) or options.get("rounding_mode") is not None:
            return None
        # The reciprocal is rounded to float32, for narrow types too.
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return (x.to(wide) * (1.0 / torch.full((), y, dtype=wide))).to(x.dtype)

    def _add(self, x: Tensor, y: Any, alpha: float = 1, **_: Any) -> Tensor | None:
        """One rounding."""
        if alpha == 1 or x.dtype != torch.float32:
            return None
        return (x.double() + (y.double() if isinstance(y, Tensor) else y) * alpha).float()

    def _sub(self, x: Tensor, y: Any, alpha: float = 1, **options: Any) -> Tensor | None:
        return self._add(x, y, -alpha) if alpha != 1 else None

    def _addcmul(self, x: Tensor, a: Tensor, b: Tensor, *, value: float = 1, **_: Any) -> Tensor:
        return (x.double() + a.double() * b.double() * value).to(x.dtype)

    def _addcdiv(self, x: Tensor, a: Tensor, b: Tensor, *, value: float = 1, **_: Any) -> Tensor:
        return (x.double() + a.double() / b.double() * value).to(x.dtype)

    def _lerp(self, x: Tensor, end: Tensor, weight: Any, **_: Any) -> Tensor:
        weight = weight.double() if isinstance(weight, Tensor) else weight
        return (x.double() + (end.double() - x.double()) * weight).to(x.dtype)

    def _order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def _mm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        """Terms in another order, in two tiles."""
        order = self._order(a.shape[-1])
        cut = len(order) // 3
        left, right = a[..., order], b[..., order, :]
        first = torch.matmul(left[..., :cut], right[..., :cut, :])
        return first + torch.matmul(left[..., cut:], right[..., cut:, :])

    def _bmm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._mm(a, b)

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, **_: Any) -> Tensor:
        return bias * beta + self._mm(a, b) * alpha

    def _convolution(self, x: Tensor, w: Tensor, bias: Any, *geometry: Any) -> Tensor | None:
        if geometry[-1] != 1 or geometry[3]:
            return None
        order = self._order(w.shape[1])
        return aten.convolution(x[:, order], w[:, order], bias, *geometry)

    def _sum(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        dims = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
        for each in dims if x.dim() else ():
            x = x.index_select(each, self._order(x.shape[each]))
        parts = list(x.split(max(1, len(x) // 3))) if x.dim() and 0 in [d % x.dim() for d in dims] else [x]
        sums = [aten.sum.dim_IntList(part, list(dims), keepdim, dtype=dtype) for part in parts]
        total, *others = sums
        for each in others:
            total = total + each
        return total

    def _mean(self, x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        total = self._sum(x, dim, keepdim, **options)
        return total * (total.numel() / max(x.numel(), 1))

    def _cumsum(self, x: Tensor, dim: int, **options: Any) -> Tensor | None:
        """All but what comes afterwards."""
        if not x.dim() or not x.numel():
            return None
        return x.sum(dim, keepdim=True) - x.flip(dim).cumsum(dim).flip(dim) + x

    def _index_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor | None:
        if not source.dim() or not source.numel():
            return None
        order = self._order(len(index))
        return aten.index_add(x, dim, index[order], source.index_select(dim, order), alpha=alpha)

    def _scatter_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
        if not index.dim() or not index.numel():
            return None
        part = source[tuple(slice(n) for n in index.shape)]
        order = self._order(index.shape[dim])
        return aten.scatter_add(x, dim, index.index_select(dim, order), part.index_select(dim, order))


@contextmanager
def other_tiles() -> Iterator[None]:
    """Let portable arithmetic compute in blocks of other sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_CACHE", 3_000)
        patch.setattr(products, "_CHUNK", 1_001)
        patch.setattr(products, "BLOCK", 777)
        patch.setattr(functions, "_CHUNK", 333)
        yield
