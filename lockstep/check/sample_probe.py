"""Reads samples again: with the same keys, which must give the same bits, and after a reading with other keys."""

from __future__ import annotations

from typing import Any

from lockstep.check.context import Probed
from lockstep.check.state import changed
from lockstep.data.keyed import keys
from lockstep.data.loader import Request
from lockstep.data.order import MicroBatch
from lockstep.data.samples import Samples
from lockstep.engine.build import open_data
from lockstep.provenance.fingerprint import sample_digests


def probe_samples(probed: Probed, data: tuple[Samples, Samples], leaf: MicroBatch) -> None:
    """Probe the training and the validation samples.

    Args:
        probed: The recipe.
        data: Its training and validation samples.
        leaf: The first micro-batch.
    """
    indices = leaf.indices[: len(data[1])] % len(data[1])
    if data[1].groups is not None:
        indices = indices[:1]  # samples of several groups do not share a batch
    requests = [(leaf.indices, leaf.keys), (indices, keys(0, 0, indices))]
    for name, samples, request in zip(("training", "validation"), data, requests, strict=True):
        _probe(probed, name, samples, request)


def _probe(probed: Probed, name: str, samples: Samples, request: Request) -> None:
    loader = probed.loader(samples)
    seen: list[dict[int, str]] = []
    phase = f"{name} sample"

    def read() -> None:
        with probed.notes.during(phase):
            batch = loader.batch(*request)
        seen.append(sample_digests(batch))

    roots = probed.roots(dataset=samples)
    suspects = changed(roots, read)
    read()
    # Other keys, as in another epoch: a dataset that keeps its samples returns those of the first reading.
    other = keys(probed.config.seed, 1, request[0])
    kept = sample_digests(loader.batch(request[0], other))
    fresh = probed.loader(open_data(probed.config, probed.build(), train=name == "training"))
    checks: dict[str, Any] = probed.notes.checks
    checks[f"reread {name}"] = [index for index in seen[0] if seen[0][index] != seen[1][index]]
    checks[f"kept {name}"] = kept != sample_digests(fresh.batch(request[0], other))
    probed.notes.watch(phase, suspects, roots, read)
