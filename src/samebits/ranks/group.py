"""Collective calls of ranks on GPUs: gloo's, on CPU copies of their tensors, so that they have one order everywhere.

gloo adds the ranks' values in an order that depends on their number alone (ADR 70). NCCL's depends on which GPUs are
connected how, and it refuses two ranks of one GPU. So ranks on CPUs use gloo itself, and ranks on GPUs this group.
Each call is complete when it returns; a handle of an asynchronous call is one that is complete.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.ranks.devices import Baton

BACKEND = "samebits"
_CALLS = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "_allgather_base", "gather", "scatter", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "send", "recv",
    "recv_anysource", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "barrier",
)  # fmt: skip


class OrderedGroup(dist.ProcessGroup):
    """A process group of torch that passes calls on to gloo, with the baton given away meanwhile."""

    def __init__(self, inner: Any, name: str, baton: Baton) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._name = name
        self._baton = baton

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch's functional collectives find it."""
        return self._name

    def getGroupName(self) -> str:
        """Return the same, for torch's C++ code."""
        return self._name

    def getBackendName(self) -> str:
        """Return the name, as torch asks for it."""
        return BACKEND

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make one call, and return its complete handle."""
        copies: list[tuple[Tensor, Tensor]] = []
        given = [_on_cpu(each, copies) for each in args]
        with self._baton.given():
            work = getattr(self._inner, name)(*given, **kwargs)
            if work is not None:
                work.wait()
        for tensor, copy in copies:
            tensor.copy_(copy)
        results = next((each for each in args if isinstance(each, Tensor | list)), [])
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(results if isinstance(results, list) else [results])
        return torch._C._distributed_c10d._create_work_from_future(future)


def _on_cpu(value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Return an argument with CPU copies of its tensors, of any shape, which are noted."""
    if isinstance(value, list | tuple):
        return [_on_cpu(each, copies) for each in value]
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    copies.append((value, value.detach().cpu()))
    return copies[-1][1]


def _passed(name: str) -> Callable[..., Any]:
    def call(self: OrderedGroup, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, *args, **kwargs)

    return call


for _name in _CALLS:
    if hasattr(dist.ProcessGroup, _name):  # their names change between versions of torch
        setattr(OrderedGroup, _name, _passed(_name))


def make_known(baton: Baton) -> None:
    """Make the backend known to torch, for this process."""

    def create(given: Any, _options: Any) -> OrderedGroup:
        with baton.given():  # all ranks have to come
            inner = dist.ProcessGroupGloo(
                given.store, given.group_rank, given.group_size, given.timeout
            )
        return OrderedGroup(inner, given.group_id, baton)

    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
