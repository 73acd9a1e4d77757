"""What the two kinds of a sharded model have in common: torch's fully_shard, and whole tensors with an owner each."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.errors import ConfigError
from samebits.malloc import return_freed_memory
from samebits.parallel.step_sum import StepSum


class ShardedReplica(ABC):
    """This rank's state of a sharded model: its part of each parameter, and all buffers.

    Args:
        parameters: This rank's part of each parameter by name, in the model's order, for the optimizer. Plain tensors
            that share their memory with the model's, (rows, ...).
    """

    is_sharded = True

    def __init__(self, model: nn.Module, world: World, parameters: Mapping[str, nn.Parameter]) -> None:
        self.module, self._world, self.parameters = model, world, dict(parameters)
        self.trained: nn.Module = nn.ParameterList(self.parameters.values())

    @abstractmethod
    def make_reducer(self, order: Order, *, exact: bool, num_extras: int, synchronized: bool, compress: str) -> StepSum:
        """See `WholeReplica.make_reducer`. Settings other than `num_extras` do not apply to a sharded model."""

    @abstractmethod
    def whole_shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter in the unsharded model."""

    @abstractmethod
    def gather(self, name: str, part: Tensor) -> Tensor | None:
        """Gather a part, (rows, ...), of a parameter or a state, on rank 0's host; None on others. Collective"""

    @abstractmethod
    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part, (rows, ...) and a view, of a complete tensor, (n, ...)."""

    def sharded_like(self, name: str, tensor: Tensor, optimizer: Optimizer) -> str | None:
        """Return the parameter that a checkpoint's tensor, of any shape, is sharded like; None if all ranks have it."""
        if not name.startswith("optimizer:"):
            name = name.removeprefix("average:")
            return name if name in self.parameters else None
        if tensor.dim() == 0:
            return None  # such as Adam's step count
        index = int(name.split(":")[1])
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        return next(other for other, part in self.parameters.items() if part is parts[index])

    def comparable(self, tensors: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
        """See `WholeReplica.comparable`. Returns the tensors that all ranks have whole: shards differ by design."""
        return {name: tensor for name, tensor in tensors.items() if self.sharded_like(name, tensor, optimizer) is None}

    def state(self) -> dict[str, Tensor]:
        """See `WholeReplica.state`. Returns this rank's parts of the parameters, in the model's own memory."""
        state: dict[str, Tensor] = self.module.state_dict()
        return {name: self.parameters[name].detach() if name in self.parameters else state[name] for name in state}

    def gather_all(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `WholeReplica.gather_all`. Gathers in rank 0's host memory; returns an empty dict on the other ranks."""
        whole = {}
        for name, tensor in state.items():
            gathered = self.gather(name, tensor) if name in self.parameters else tensor.detach().cpu()
            if gathered is not None and self._world.is_main:
                whole[name] = gathered
        return whole

    # Parameters can be changed in place only without autograd.
    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor] | None) -> None:
        """See `WholeReplica.load`. Only one tensor at a time is whole on the device."""
        for name, here in self.state().items():
            sharded = name in self.parameters
            shape = self.whole_shape(name) if sharded else here.shape
            whole = state[name].to(here.device, here.dtype) if state is not None else here.new_empty(shape)
            collectives.broadcast_tensors(self._world, [whole])
            here.copy_(self.part(name, whole) if sharded else whole)


def prepare_sharding(model: nn.Module, world: World) -> None:
    """Check that a model can be sharded, and prepare the process for memory that is freed and taken again.

    Raises:
        ConfigError: The model cannot be sharded.
    """
    _check(model, world)
    if world.device.type == "cpu":
        return_freed_memory()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # On a GPU it would move gathered weights into cuDNN's own memory, where the next gather does not write.
            module.flatten_parameters = lambda: None  # type: ignore[method-assign]  # on this object only


def _check(model: nn.Module, world: World) -> None:
    if world.device.type == "cuda" and world.backend != "nccl":
        raise ConfigError(
            f"parallel=fsdp on GPUs needs the backend nccl, not {world.backend}",
            fix="Start one process for each GPU, or set parallel=ddp.",
        )
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        problem = None
        if parameter.dim() == 0:
            problem = f"{name} is a single number"
        elif parameter.dtype != torch.float32:
            problem = f"{name} is {parameter.dtype}"
        elif seen.setdefault(id(parameter), name) != name:
            problem = f"{name} is the same parameter as {seen[id(parameter)]}"
        if problem is not None:
            raise ConfigError(f"parallel=fsdp cannot shard this model: {problem}", fix="Set parallel=ddp.")
