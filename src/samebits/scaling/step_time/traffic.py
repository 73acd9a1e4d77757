"""What a step's exchange sends, counted by running the exchange of single ranks on tensors without memory.

The messages of a rank depend on the step and the world, and on no value. So one rank's exchange runs alone, on torch's
meta device: its messages are counted, and arrive at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch import nn

from samebits.cluster.world import World, alone
from samebits.config.schema import RunConfig
from samebits.data.micro_batches import even_shares, num_micro_batches
from samebits.engine.job import MAX_TERMS
from samebits.errors import ConfigError
from samebits.parallel.bucket import Bucket
from samebits.parallel.compress import Compression, make_buckets
from samebits.parallel.exchange.halving import make_all_reduce
from samebits.parallel.exchange.tree_all_reduce import Message, Work, post
from samebits.parallel.reduce import BUCKET_BYTES
from samebits.parallel.running import RunningBuffers
from samebits.parallel.tree import Node, rank_nodes


@dataclass(frozen=True)
class MessageRound:
    """Messages of a bucket that are under way at the same time, of the rank that has the most.

    Attributes:
        messages: Number of messages that it sends.
        num_bytes: Bytes that it sends or receives, the larger number.
        between_bytes: Those to or from other machines.
        added_bytes: Bytes received that are added to its own.
    """

    messages: int
    num_bytes: int
    between_bytes: int
    added_bytes: int


@dataclass(frozen=True)
class CountedWorld(World):
    """A world of which one rank runs, whose messages are only counted."""

    posted: list[list[Message]] = field(default_factory=list)


@post.register
def _(world: CountedWorld, messages: Sequence[Message]) -> list[Work]:
    world.posted.append(list(messages))
    return []


def check_countable(config: RunConfig) -> None:
    """Check that the settings' exchange can be counted.

    Raises:
        ConfigError: They use another one than Samebits's all-reduce of gradients.
    """
    obstacles = {
        f"parallel={config.parallel}": config.parallel != "ddp",
        "batch_norm=sync": config.batch_norm == "sync",
        "compress=powersgd": config.compress == "powersgd",
    }
    for name, is_there in obstacles.items():
        if is_there:
            raise ConfigError(f"the step time of {name} cannot be predicted", fix="Plan the run without this setting.")


def count_traffic(config: RunConfig, model: nn.Module, size: int, per_node: int) -> list[list[MessageRound]]:
    """Count the messages of a step, by bucket and round.

    Args:
        config: The settings, which `check_countable` accepts.
        model: The model, on the meta device.
        size: Number of ranks.
        per_node: Ranks of each machine.
    """
    how = Compression(config.compress, config.powersgd_rank)
    is_exact = config.mode == "exact" or how.is_16bit
    num_leaves = num_micro_batches(config.global_batch, config.micro_batch)
    shares = even_shares(num_leaves, size)
    nodes = rank_nodes(shares, num_leaves) if is_exact else [[share] if share[0] < share[1] else [] for share in shares]
    counted: list[list[MessageRound]] = []
    for rank in sorted({0, size - 1}):
        world = _world(rank, size)
        for number, bucket in enumerate(_buckets(model, world, how, is_exact)):
            rounds = _rounds(bucket, world, nodes, per_node)
            if number == len(counted):
                counted.append(rounds)
            else:
                counted[number] = _most(counted[number], rounds)
    return counted


def _world(rank: int, size: int) -> CountedWorld:
    here = alone("cpu")
    values = {each.name: getattr(here, each.name) for each in fields(World)}
    return CountedWorld(**values | {"rank": rank, "size": size, "backend": "counted"})


def _buckets(model: nn.Module, world: World, how: Compression, is_exact: bool) -> list[Bucket]:
    """Return the buckets that `Reducer` makes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tail = 1 + MAX_TERMS + len(trained) + len(RunningBuffers(model))
    return make_buckets(trained[::-1], tail, world, how, exact=is_exact, max_bytes=BUCKET_BYTES)[0]


def _rounds(bucket: Bucket, world: CountedWorld, nodes: list[list[Node]], per_node: int) -> list[MessageRound]:
    bucket.nodes = [(node, bucket.flat()) for node in nodes[world.rank]]
    exchange = make_all_reduce(bucket, world, nodes, 0)
    for part in (exchange.start, exchange.middle, exchange.finish):
        part()
    rounds = [_count(messages, world.rank // per_node, per_node) for messages in world.posted]
    world.posted.clear()
    return rounds


def _count(messages: list[Message], node: int, per_node: int) -> MessageRound:
    sent = [message for message in messages if not message.is_receive]
    received = [message for message in messages if message.is_receive]
    between = [[each for each in some if each.peer // per_node != node] for some in (sent, received)]
    return MessageRound(
        messages=len(sent),
        num_bytes=max(_bytes(sent), _bytes(received)),
        between_bytes=max(map(_bytes, between)),
        added_bytes=_bytes([message for message in received if message.tag % 64 < 63]),  # 63: complete sums
    )


def _bytes(messages: Sequence[Message]) -> int:
    return sum(message.values.nbytes for message in messages)


def _most(one: list[MessageRound], other: list[MessageRound]) -> list[MessageRound]:
    """Return the rounds of two ranks with the larger numbers; a rank may have fewer rounds."""
    none = MessageRound(0, 0, 0, 0)
    length = max(len(one), len(other))
    return [
        MessageRound(*(max(getattr(a, each.name), getattr(b, each.name)) for each in fields(MessageRound)))
        for a, b in zip(one + [none] * (length - len(one)), other + [none] * (length - len(other)), strict=True)
    ]
