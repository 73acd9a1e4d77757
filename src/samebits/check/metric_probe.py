"""Merge a metric as 1, 2 and 3 processes would: the results must have equal bits."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from samebits.check.context import Probed
from samebits.check.sizes import NUM_EVAL
from samebits.cluster import codec
from samebits.data.groups import Batches
from samebits.data.keyed import keys
from samebits.data.samples import Batch, Samples, groups_of
from samebits.data.seeding import seed_between
from samebits.engine.parts import Parts

WORLDS = (1, 2, 3)


def probe_metric(probed: Probed, parts: Parts, model: nn.Module, samples: Samples) -> None:
    """Note the metrics of a few validation samples for each number of processes, and where the metric is defined.

    Args:
        probed: The recipe.
        parts: Its parts.
        model: The model, on the device.
        samples: The validation samples.
    """
    notes = probed.notes
    batches = Batches(min(NUM_EVAL, len(samples)), probed.config.eval_batch, _first(groups_of(samples)))
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


def _first(groups: Any) -> Any:
    return None if groups is None else groups[:NUM_EVAL]
