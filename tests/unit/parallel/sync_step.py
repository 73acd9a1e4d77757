"""One step with synchronized batch norm in one process."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.data.order import Order
from samebits.parallel.reduce import Reducer

HERE = alone("cpu")
Forward = Callable[[nn.Module, Tensor], Tensor]


def call(model: nn.Module, inputs: Tensor) -> Tensor:
    outputs: Tensor = model(inputs)
    return outputs


def objective(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over the samples whose gradient differs from value to value."""
    return (outputs.float().flatten(1) * targets.flatten(1)).sum(1).tanh().mean()


def train_step(
    model: nn.Module, reducer: Reducer, inputs: Tensor, targets: Tensor, micro_batch: int, forward: Forward = call
) -> list[Tensor]:
    """One step without an update; the outputs in the order of the samples."""
    num = len(inputs)
    (step,) = Order(num, num, micro_batch, seed=num).steps(HERE, stop=1)
    outputs: list[Any] = [None] * num

    def run(micro: Any) -> None:
        with reducer.micro_batch(micro):
            result = forward(model, inputs[micro.indices])
            for index, output in zip(micro.indices, result.detach(), strict=True):
                outputs[index] = output
            reducer.backward(objective(result, targets[micro.indices]))

    reducer.begin(step)
    reducer.run(run)
    reducer.reduce()
    return outputs
