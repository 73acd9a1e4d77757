"""Ranks on fewer GPUs than ranks: each rank sees as many as there are ranks, and reaches the one that it was dealt.

    script on rank 5        torch.cuda.set_device(5)    model.to("cuda:5")    DDP(model, device_ids=[5])
    this process                         |                     |                        |
    CUDA_VISIBLE_DEVICES=0               +------------- cuda:0, the only one ------------+

Ranks of one GPU take turns: a rank holds the baton while it computes, and gives it away in each collective call, where
it waits for the others anyway. So the activations of one rank are alive at a time.

With `--cuda-on-cpu` the GPU that each rank was dealt is the CPU.
"""

import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

VISIBLE = "CUDA_VISIBLE_DEVICES"
ONE_GPU = "cuda:0"
CPU = "cpu"
# A rank that waits this long for its turn continues without: the one before it may wait for a file of this one.
PATIENCE_S = 60.0
# With less free memory than this share, a rank that gives the baton away hands cached memory back.
SHORT_OF_MEMORY = 0.2


def replaces(owner: Any, *names: str) -> Callable[[Callable[..., Any]], None]:
    """Decorate what replaces functions of torch, and gets the plain one as its first argument."""

    def decorate(function: Callable[..., Any]) -> None:
        for name in names:
            plain = getattr(owner, name)

            def replaced(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
                return function(plain, *args, **kwargs)

            new = wraps(plain)(replaced)
            setattr(owner, name, new)
            # Modules of torch have imported some of them by name, such as that of device meshes.
            for module in [
                each for key, each in sys.modules.items() if key.startswith("torch.distributed")
            ]:
                if vars(module).get(name) is plain:
                    setattr(module, name, new)

    return decorate


def deal(rank: int, num_ranks: int, gpus: Sequence[str]) -> str:
    """Return the GPU of a rank among the ranks of a machine: neighbors share one."""
    return gpus[rank * len(gpus) // num_ranks]


def mapped(device: Any, place: str = ONE_GPU) -> Any:
    """Return what stands for a GPU in a call, which is `place`; other values as they are."""
    if isinstance(device, str) and re.fullmatch(r"cuda(:\d+)?", device):
        return place
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device(place)
    if isinstance(device, int) and not isinstance(device, bool):
        return 0 if place == ONE_GPU else place
    return device


class DealtDevice(TorchFunctionMode):
    """Lets all calls of torch that name a GPU reach `place`: the only GPU of this process, or the CPU."""

    def __init__(self, place: str = ONE_GPU) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with other devices."""
        name = getattr(func, "__name__", "")
        if self._place == CPU and name in ("cuda", "pin_memory"):  # it is there already
            return args[0]
        if self._place == CPU and func is torch.device:  # scripts look at the type of their device
            return func(*args, **(kwargs or {}))
        # An integer is a device only as the first argument of these two.
        is_move = name in ("to", "cuda")
        args = tuple(
            mapped(each, self._place)
            if not isinstance(each, int) or (is_move and number == 1)
            else each
            for number, each in enumerate(args)
        )
        given = {
            key: mapped(each, self._place) if key == "device" else each
            for key, each in (kwargs or {}).items()
        }
        return func(*args, **given)


# What scripts call of torch.cuda and torch.accelerator besides moving tensors, where the GPU is the CPU.
_WITHOUT_EFFECT = (
    "set_device", "set_device_index", "synchronize", "empty_cache", "init", "ipc_collect", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "set_rng_state", "set_rng_state_all",
)  # fmt: skip
_NO_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _gives(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _DoneAtOnce:
    """What stands for a stream or an event of a GPU: all work is done when a call returns."""

    query = _gives(True)
    is_capturing = _gives(False)
    elapsed_time = _gives(0.0)
    synchronize = wait_stream = wait_event = wait = record = _gives(None)


def use_cpu_as_gpu(rank: int, num_ranks: int) -> None:
    """Let the script see a GPU for each rank that is the CPU, for the rest of this process."""
    DealtDevice(CPU).__enter__()  # type: ignore[no-untyped-call]
    no_state = torch.empty(0, dtype=torch.uint8)
    values = {
        "is_available": True, "is_bf16_supported": True, "device_count": num_ranks, "current_device": rank,
        "current_device_index": rank, "current_accelerator": torch.device("cuda"), "get_device_name": CPU,
        "get_rng_state": no_state, "get_rng_state_all": [no_state] * num_ranks,
        "device": nullcontext(), "device_index": nullcontext(), "stream": nullcontext(),
        **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), _DoneAtOnce()),
        **dict.fromkeys(_WITHOUT_EFFECT), **dict.fromkeys(_NO_BYTES, 0),
    }  # fmt: skip
    for module in (torch.cuda, torch.accelerator):
        for name in values.keys() & vars(module):
            setattr(module, name, _gives(values[name]))
    _map_locations(CPU)
    # Its thread would ask for a GPU.
    DataLoader.pin_memory = property(_gives(False), _gives(None))  # type: ignore[assignment]

    @replaces(DistributedDataParallel, "__init__")
    def wrap(plain: Any, wrapper: Any, module: Any, *_: Any, **kwargs: Any) -> None:
        # Without the numbers of GPUs, which a module on a CPU does not have.
        plain(wrapper, module, **{**kwargs, "device_ids": None, "output_device": None})


def use_dealt_device(num_ranks: int) -> None:
    """Let the script see a GPU for each rank, for the rest of this process."""
    DealtDevice().__enter__()  # type: ignore[no-untyped-call]
    torch.cuda.device_count = torch.accelerator.device_count = lambda: num_ranks
    for name in ("set_device_index", "device_index"):
        setattr(torch.accelerator, name, _with_mapped_device(getattr(torch.accelerator, name)))
    plain = torch._utils._get_device_index

    def index(*args: Any, **kwargs: Any) -> int:
        found: int = plain(*args, **kwargs)
        return min(found, 0)

    # Modules of torch import it by its name.
    for module in [each for name, each in sys.modules.items() if name.startswith("torch.")]:
        if getattr(module, "_get_device_index", None) is not None:
            module._get_device_index = index  # type: ignore[attr-defined]
    _map_locations(ONE_GPU)


def _with_mapped_device(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(device: Any) -> Any:
        return plain(mapped(device))

    return call


def _map_locations(place: str) -> None:
    @replaces(torch, "load")
    def load(plain: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {
                mapped(old, place): mapped(new, place) for old, new in map_location.items()
            }
        return plain(f, mapped(map_location, place), *args, **kwargs)


class Baton:
    """A lock that the ranks of one GPU share, in a file.

    Args:
        path: The file; empty: this rank has its GPU for itself.
    """

    def __init__(self, path: str = "") -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600) if path else -1

    def take(self) -> None:
        """Wait for this rank's turn. It continues without after `PATIENCE_S`: only memory depends on turns."""
        end = time.monotonic() + PATIENCE_S
        while self._handle >= 0 and time.monotonic() < end:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.001)

    def give(self) -> None:
        """Let another rank compute."""
        if self._handle < 0:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            if free < SHORT_OF_MEMORY * total:
                torch.cuda.empty_cache()
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let others compute until the block ends."""
        self.give()
        try:
            yield
        finally:
            self.take()
