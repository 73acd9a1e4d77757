"""Read samples again, and merge a metric as 1, 2 and 3 processes would: the results must have equal bits."""

import inspect
from typing import Any

import torch
from torch import nn

from samebits.check.context import Probed
from samebits.check.sizes import NUM_EVAL
from samebits.check.state import changed
from samebits.cluster import codec
from samebits.data.digests import sample_digests
from samebits.data.groups import Batches
from samebits.data.keyed import keys
from samebits.data.loader import Loader, Request
from samebits.data.order import MicroBatch
from samebits.data.samples import Batch, DatasetSamples, Samples, groups_of
from samebits.data.seeding import seed_between
from samebits.engine.build import open_data
from samebits.engine.parts import Parts

WORLDS = (1, 2, 3)


def probe_samples(probed: Probed, data: tuple[Samples, Samples], leaf: MicroBatch) -> None:
    """Probe the training and the validation samples."""
    indices = leaf.indices[: len(data[1])] % len(data[1])
    if groups_of(data[1]) is not None:
        indices = indices[:1]  # samples of several groups do not share a batch
    requests = [(leaf.indices, leaf.keys), (indices, keys(0, 0, indices))]
    for name, samples, request in zip(("training", "validation"), data, requests, strict=True):
        _probe(probed, name, samples, request)


def _probe(probed: Probed, name: str, samples: Samples, request: Request) -> None:
    loader = probed.loader(samples)
    phase = f"{name} sample"

    def read(loader: Loader) -> dict[int, str]:
        with probed.notes.during(phase):
            batch = loader.batch(*request)
        return sample_digests(batch)

    first: dict[int, str] = {}

    def differing() -> list[int]:
        again = read(loader)
        return [index for index in first if first[index] != again[index]]

    suspects, undo = changed(_roots(probed, samples), lambda: first.update(read(loader)))
    checks: dict[str, Any] = probed.notes.checks
    checks[f"reread {name}"] = differing()
    checks[f"kept {name}"] = False
    if suspects and checks[f"reread {name}"]:
        probed.notes.prove(phase, undo, lambda: read(loader), lambda: not differing())
    if suspects:
        # Other keys, as in another epoch: a dataset that keeps its samples returns those of the first reading.
        other = keys(probed.config.seed, 1, request[0])
        kept = sample_digests(loader.batch(request[0], other))
        new = _open(probed, name)
        fresh = sample_digests(probed.loader(new).batch(request[0], other))
        checks[f"kept {name}"] = kept != fresh
        if kept != fresh and not checks[f"reread {name}"]:
            probed.notes.prove(
                phase, undo, lambda: read(loader), lambda: sample_digests(loader.batch(request[0], other)) == fresh
            )
        new = _open(probed, name)  # a cache changes only at the first reading
        probed.notes.watch(phase, suspects, _roots(probed, new), lambda: read(probed.loader(new)))


def _open(probed: Probed, name: str) -> Samples:
    return open_data(probed.config, probed.build(), train=name == "training")


def _roots(probed: Probed, samples: Samples) -> dict[str, object]:
    if isinstance(samples, DatasetSamples):  # its own attribute is the user's dataset
        return probed.roots(dataset=samples.dataset, collate=samples.collate)
    return probed.roots(dataset=samples)


def probe_metric(probed: Probed, parts: Parts, model: nn.Module, samples: Samples) -> None:
    """Note the metrics of a few validation samples for each number of processes, and where the metric is defined."""
    notes = probed.notes
    groups = groups_of(samples)
    first = None if groups is None else groups[:NUM_EVAL]
    batches = Batches(min(NUM_EVAL, len(samples)), probed.config.eval_batch, first)
    loader = probed.loader(samples)
    pairs: list[tuple[Any, Batch]] = []
    model.eval()
    with torch.inference_mode(), notes.during("evaluation"):
        for number in range(len(batches)):
            indices = batches[number]
            batch = loader.batch(indices, keys(0, 0, indices))
            seed_between(probed.device, 0, int(indices[0]))
            outputs = model(batch.inputs) if parts.infer is None else parts.infer(model, batch.inputs)
            pairs.append((outputs, batch))
    with notes.during("metric"):
        results = {str(size): _merged(parts, pairs, size) for size in WORLDS}
    kind = type(parts.metric())
    merge = getattr(kind, "merge", None)
    code = getattr(merge, "__code__", None)
    file = inspect.getsourcefile(kind) if code is not None else None
    notes.checks["metric"] = {
        "name": kind.__name__,
        "line": [file, code.co_firstlineno] if code is not None and file else None,
        "results": results,
    }


def _merged(parts: Parts, pairs: list[tuple[Any, Batch]], size: int) -> dict[str, str]:
    """Return the metrics as a world of `size` processes has them; the error's text if they cannot be merged."""
    states = []
    for rank in range(size):
        counted = parts.metric()
        for outputs, batch in pairs[rank::size]:
            counted.add(outputs, batch)
        states.append(counted.state())
    merged = parts.metric()
    try:
        for state in states:
            # Through the codec, as between ranks: a state that cannot be sent is a fault of its own.
            merged.merge(codec.decode(codec.encode(state), torch.device("cpu")))
        return {name: repr(float(value)) for name, value in merged.result().items()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
