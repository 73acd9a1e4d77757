"""Whether all ranks have the same script and data, and before each epoch the same weights and optimizer state."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.keyed import keys
from samebits.data.samples import sample_digests
from samebits.data.seeding import seeded
from samebits.errors import DataError
from samebits.own_loop.guard import fault
from samebits.own_loop.samples import LoaderSource
from samebits.own_loop.session import ExactLoop
from samebits.parallel.checksum import checksums
from samebits.portable.scripts import own_kernels
from samebits.provenance.fingerprint import code_digests, digest_of_sizes

NUM_SAMPLES = 4  # that are read, spread over the dataset
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MAX_ITEMS = 100  # of a list that is compared


def check_equal_state(loop: ExactLoop, world: World) -> None:
    """Compare the ranks. Called on all of them.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    if world.size == 1:
        return
    for values in _compare(world, {"": loop.habits.has_drawn}).values():
        raise fault("drawn", given=values)
    names = _compare(world, {"position": loop.step, **checksums(loop.state())})
    for name, values in names.items():
        raise fault("ranks", given=values, step=loop.step, name=name, num=len(names))
    # A warning: what forward only notes, such as its last loss, changes no result.
    for name, values in _compare(world, _attributes(loop.modules)).items():
        if world.is_main:
            warnings.warn(
                f"the attribute {name} of the model differs between the ranks ({values}): forward sets it from the "
                "batches that a rank sees. If forward also reads it, results depend on the number of processes. Set it "
                "before training, or call the model once with the same batch on all ranks.",
                stacklevel=2,
            )


def _attributes(modules: Sequence[nn.Module]) -> dict[str, str]:
    """Return the plain values of the modules' attributes, such as numbers and lists of them, as text by name."""
    return {
        f"{number}.{name}.{key}" if number else f"{name}.{key}".lstrip("."): repr(value)
        for number, root in enumerate(modules)
        for name, module in root.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _MAX_ITEMS and all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def check_same_script(world: World, settings: Mapping[str, Any]) -> None:
    """Compare the script, its modules and the settings of `exact` between the ranks. Called on all of them.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""  # a notebook has none
    kernels = own_kernels()
    mine = {**settings, "kernels": kernels, **code_digests(script)}
    if kernels == "auto":
        mine["version of torch"] = torch.__version__
    for name, values in _compare(world, mine).items():
        raise fault("script", given=values, name=name)


def check_same_order(world: World, loop: ExactLoop) -> None:
    """Compare the order of the parameters in the optimizers between the ranks. Called on all of them.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    for values in _compare(world, {"": loop.order}).values():
        raise fault("order", given=values, there="on another rank")


def check_same_data(world: World, source: LoaderSource, seed: int) -> None:
    """Compare the ranks' datasets: number of samples, sizes of files, and a few samples. Called on all ranks.

    Each of these samples is read twice, also on one process.

    Every rank computes its share of one order. With a split or a shuffle that is not seeded, index 5 is another sample
    on each rank: some samples would be used twice in an epoch and others never, and no later check could find it.

    Raises:
        DataError: They differ; the same error on all ranks.
    """
    mine = _describe(source, seed)
    for name, values in _compare(world, mine).items():
        raise DataError(
            f"the ranks have different data: {name}",
            given=values,
            cause="A split or a shuffle without a seed, or other files on one machine.",
            fix="Seed everything that chooses samples, and give all ranks the same files.",
        )


def _compare(world: World, mine: Mapping[str, Any]) -> dict[str, str]:
    """Return the names under which ranks have different values, with these values as text. Called on all ranks."""
    # One digest first, since all values would be sent to all ranks otherwise.
    if world.size == 1 or collectives.are_equal(world, mine):
        return {}
    by_rank = collectives.all_gather_object(world, mine)
    names = dict.fromkeys(name for own in by_rank for name in own)
    # What all ranks have is named first: a script in another folder also lacks the files of its folder.
    in_order = sorted(names, key=lambda name: any(name not in own for own in by_rank))
    values = {name: [str(own.get(name, "missing")) for own in by_rank] for name in in_order}
    return {
        name: ", ".join(f"rank {rank}: {value[:20]}" for rank, value in enumerate(found))[:300]
        for name, found in values.items()
        if len(set(found)) > 1
    }


def _describe(source: LoaderSource, seed: int) -> dict[str, str]:
    samples = source.samples
    found = {
        "number of samples": f"{len(samples):,}",
        "sizes of its files": digest_of_sizes(samples) or "none",
    }
    indices = np.unique(np.linspace(0, len(samples) - 1, NUM_SAMPLES, dtype=np.int64))
    requests = [(each, keys(seed, 0, each)) for each in indices.reshape(-1, 1)] * 2
    # In a worker, as in training: open files of some libraries do not survive a fork.
    with seeded(seed):
        loader = source.open(
            lambda: iter(requests), torch.device("cpu"), num_workers=min(1, source.num_workers)
        )
        try:
            for number, request in enumerate(requests):
                digests = sample_digests(loader.raw(*request))
                mine = {f"sample {index}": digest for index, digest in digests.items()}
                if number >= len(requests) // 2 and any(found[name] != mine[name] for name in mine):
                    raise fault("samples", number=request[0][0])
                found |= mine
        finally:
            loader.close()
    return found
