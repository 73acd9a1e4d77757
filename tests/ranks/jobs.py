"""Jobs of a rank pool: functions whose first argument is a world."""

import hashlib
import multiprocessing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.keyed import IntArray, KeyArray, keys
from samebits.data.loader import Loader
from samebits.data.order import MicroBatch, Order
from samebits.data.samples import Batch
from samebits.engine.evaluate import EvaluationStopped, evaluate
from samebits.engine.opening import StopFlag
from samebits.errors import TrainError
from samebits.parallel import reduce
from samebits.parallel.exchange import part, tree_all_reduce
from samebits.parallel.reduce import Reducer
from samebits.storage.weights import weights_sha256
from tests.ranks.networks import make, mean_loss, samples


def train(world: World, network: str, order: Order, num_steps: int, limits: dict[str, int]) -> Any:
    """Train a network with the reducer.

    Args:
        network: A name in NETWORKS. Batch norm is synchronized in "synchronized".
        limits: BUCKET_BYTES, SMALL_BYTES, FLAT_BYTES and DIRECT_SIZE, where they are to be other ones.

    Returns:
        For each step, the facts that must not depend on the world, tensors as hashes; at last the weights themselves
        and for each bucket, whether it went in chunks.
    """
    with (
        patch.object(reduce, "BUCKET_BYTES", limits.get("BUCKET_BYTES", reduce.BUCKET_BYTES)),
        patch.object(tree_all_reduce, "SMALL_BYTES", limits.get("SMALL_BYTES", tree_all_reduce.SMALL_BYTES)),
        patch.object(tree_all_reduce, "FLAT_BYTES", limits.get("FLAT_BYTES", tree_all_reduce.FLAT_BYTES)),
        patch.object(part, "DIRECT_SIZE", limits.get("DIRECT_SIZE", part.DIRECT_SIZE)),
    ):
        model, (inputs, labels) = make(network), samples(order.num_samples)
        reducer = Reducer(model, world, num_extras=2, synchronized=network == "synchronized")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        facts = []
        for step in order.steps(world, stop=num_steps):

            def run(micro: MicroBatch) -> None:
                with reducer.micro_batch(micro):
                    loss = mean_loss(model, inputs[micro.indices], labels[micro.indices])
                    reducer.backward(loss, torch.stack([loss, loss.new_tensor(float(micro.index))]))

            reducer.begin(step)
            reducer.run(run)
            # Only rank 0's flag counts.
            reducer.reduce(flag=7.0 * step.number if world.is_main else 99.0)
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            facts.append((fingerprint(grads), fingerprint(dict(model.named_buffers())), list(grads), reducer.extras,
                          reducer.norm, reducer.flag))  # fmt: skip
            optimizer.step()
        in_chunks = [getattr(one.way, "keywords", {}).get("in_chunks") for one in reducer._sum.exchanges]
    weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    return facts, weights, in_chunks


def train_on_machines(world: World, machines: tuple[int, ...], *arguments: Any) -> Any:
    """The same, where the ranks are on several machines."""
    return train(replace(world, machines=machines), *arguments)


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A hash, short enough to be read in a failed comparison."""
    return weights_sha256(tensors)[:12]


def gradient(world: World, network: str, order: Order) -> Any:
    """The gradients and buffers of an order's first step, as numpy arrays, with extras and norm."""
    model, (inputs, labels) = make(network), samples(order.num_samples)
    reducer = Reducer(model, world, num_extras=1)
    step = next(iter(order.steps(world, stop=1)))
    reducer.begin(step)
    for micro in step.micro_batches:
        with reducer.micro_batch(micro):
            loss = mean_loss(model, inputs[micro.indices], labels[micro.indices])
            reducer.backward(loss, loss.view(1))
    reducer.reduce()
    grads = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    return grads, reducer.extras[0], reducer.norm


def clip_and_undo(world: World, order: Order) -> Any:
    """A step whose gradient is scaled and whose buffers are taken back: the facts before and after."""
    model, (inputs, labels) = make("batch norm"), samples(order.num_samples)
    reducer = Reducer(model, world)
    before = fingerprint(dict(model.named_buffers()))
    step = next(iter(order.steps(world, stop=1)))
    reducer.begin(step)
    for micro in step.micro_batches:
        with reducer.micro_batch(micro):
            reducer.backward(mean_loss(model, inputs[micro.indices], labels[micro.indices]))
    reducer.reduce()
    changed = fingerprint(dict(model.named_buffers()))
    norm = reducer.norm
    reducer.scale(0.25)
    scaled = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    reducer.undo_buffers()
    return before, changed, fingerprint(dict(model.named_buffers())), norm, float(scaled)


def nan_on_one(world: World, order: Order, bad_leaf: int) -> Any:
    """A step in which one micro-batch's loss is not a number: what every rank sees of it."""
    model, (inputs, labels) = make("plain"), samples(order.num_samples)
    reducer = Reducer(model, world, num_extras=1)
    step = next(iter(order.steps(world, stop=1)))
    reducer.begin(step)
    for micro in step.micro_batches:
        with reducer.micro_batch(micro):
            loss = mean_loss(model, inputs[micro.indices], labels[micro.indices])
            if micro.index == bad_leaf:
                loss = loss * float("nan")
            reducer.backward(loss, loss.view(1))
    reducer.reduce(flag=1.0)
    return bool(np.isnan(reducer.norm)), bool(np.isnan(reducer.extras[0])), reducer.flag


def gradient_without_dropout(world: World, order: Order) -> Any:
    """The gradients of an order's first step through synchronized batch norm, as numpy arrays."""
    model, (inputs, labels) = make("synchronized"), samples(order.num_samples)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    reducer = Reducer(model, world, synchronized=True)
    step = next(iter(order.steps(world, stop=1)))

    def run(micro: MicroBatch) -> None:
        with reducer.micro_batch(micro):
            reducer.backward(mean_loss(model, inputs[micro.indices], labels[micro.indices]))

    reducer.begin(step)
    reducer.run(run)
    reducer.reduce()
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


def part_ways(world: World, order: Order, special_leaf: int) -> str:
    """Return a rank's error when one micro-batch, perhaps of another rank, does not reach the batch norm."""
    model, (inputs, labels) = make("parting ways"), samples(order.num_samples)
    reducer = Reducer(model, world, synchronized=True)
    step = next(iter(order.steps(world, stop=1)))

    def run(micro: MicroBatch) -> None:
        values = inputs[micro.indices]
        if micro.index == special_leaf:
            values = values + 1000
        with reducer.micro_batch(micro):
            reducer.backward(mean_loss(model, values, labels[micro.indices]))

    reducer.begin(step)
    try:
        reducer.run(run)
    except TrainError as error:
        return error.slots["where"]
    return "nothing"


class Seen:
    """A metric that remembers every sample that it was given, and in which company."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.right = 0

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.batches))

    def add(self, outputs: Any, batch: Batch) -> None:
        self.batches.append(batch.indices.tolist())
        self.right += int((outputs.argmax(1) == batch.targets).sum())

    def state(self) -> dict[str, Any]:
        return {"batches": self.batches, "right": self.right}

    def merge(self, state: dict[str, Any]) -> None:
        self.batches = self.batches + state["batches"]
        self.right += state["right"]

    def result(self) -> dict[str, float]:
        return {"top1": self.right / self.num_samples}


class Forgetful(Seen):
    """A metric that loses a sample."""

    def add(self, outputs: Any, batch: Batch) -> None:
        super().add(outputs, batch)
        self.batches[-1].pop()


class Broken(Seen):
    """A metric with a fault in it."""

    def result(self) -> dict[str, float]:
        return {"top1": self.right / 0}


class InMemory:
    """The samples of `samples(num)`."""

    def __init__(self, num: int) -> None:
        self.inputs, self.labels = samples(num)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        places = torch.from_numpy(indices)
        return Batch(self.inputs[places], self.labels[places], places)


def evaluated(world: World, num_samples: int, batch_size: int, num_workers: int = 0, metric: type[Seen] = Seen) -> Any:
    """The figures of an evaluation, the samples seen, and whether the model is in training again."""
    model = make("batch norm")
    progress: list[tuple[int, int]] = []

    def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        cross_entropy = nn.functional.cross_entropy(outputs, batch.targets)
        return {"cross_entropy": cross_entropy, "size": outputs.square().mean()}

    figures, merged = evaluate(
        model, InMemory(num_samples), world, loss=loss, metric=metric, batch_size=batch_size, num_workers=num_workers,
        progress=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    assert isinstance(merged, Seen)
    return figures, merged.batches, model.training, progress


def read_with_a_worker(world: World) -> Any:
    """How this process would start others by default, and what a worker reads of samples that can't be pickled."""

    class Local(InMemory):
        pass

    indices = np.arange(3)
    request = indices, keys(0, 0, indices)
    loader = Loader(Local(10), lambda: iter([request]), world.device, num_workers=1)
    inputs = loader.batch(*request).inputs
    loader.close()
    return multiprocessing.get_start_method(), torch.equal(inputs, samples(10)[0][:3])


class Asked:
    """Stands for a signal that has come."""

    def __init__(self, requested: bool) -> None:
        self.requested = requested


def stop_flags(world: World, asked_rank: int, num_calls: int) -> Any:
    """Which calls of the stop flag say so, when one rank was asked to stop before the first; step by step together."""
    import torch.distributed as dist

    flag = StopFlag(SimpleNamespace(world=world), Asked(world.rank == asked_rank))
    answers = []
    with patch("samebits.engine.opening.POLL_S", 0.0):
        for _ in range(num_calls):
            answers.append(flag())
            if world.size > 1:
                dist.barrier()
    if world.signed is not None and world.is_main:
        world.signed.store.delete_key("samebits/stop")
    return answers


def digest(values: Any) -> str:
    """A hash of anything that prints the same when it is the same."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def left_evaluation(world: World, asked: int) -> tuple[bool, int]:
    """Evaluate, while one rank is asked to stop as it has seen one batch: whether all left off, and batches seen."""
    seen = 0

    def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        nonlocal seen
        seen += 1
        return {"cross_entropy": nn.functional.cross_entropy(outputs, batch.targets)}

    try:
        evaluate(
            make("batch norm"), InMemory(48), world, loss=loss, metric=Seen, batch_size=4,
            stop=lambda: world.rank == asked and seen == 1,
        )  # fmt: skip
    except EvaluationStopped:
        return True, seen
    return False, seen
