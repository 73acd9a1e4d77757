"""Read samples again: with the same keys, which must give the same bits, and after a reading with other keys."""

from typing import Any

from samebits.check.context import Probed
from samebits.check.state import changed
from samebits.data.digests import sample_digests
from samebits.data.keyed import keys
from samebits.data.loader import Loader, Request
from samebits.data.order import MicroBatch
from samebits.data.samples import DatasetSamples, Samples, groups_of
from samebits.engine.build import open_data


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
