"""Probes of a recipe in one process: read again, compute again, halve, merge; and what it reads and keeps.

The trials show that something differs. The probes show why: they run each part of the recipe again on the same data,
under a tracer of sources (`sources`) and of state (`state`).
"""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samebits.cluster import collectives
from samebits.cluster.world import alone
from samebits.data.division import Alone, Batches
from samebits.data.keyed import keys
from samebits.data.loader import Loader, Request
from samebits.data.order import MicroBatch
from samebits.data.samples import Batch, DatasetSamples, Samples, groups_of, sample_digests
from samebits.data.seeding import seed_between, seed_forward, seeded
from samebits.engine.build import (
    build_parts,
    check_not_empty,
    find_dataset_info,
    make_order,
    open_data,
    prepare_model,
)
from samebits.engine.evaluate import evaluating
from samebits.engine.parts import Parts
from samebits.module.check_model import check_trainable
from samebits.module.determinism import use_deterministic_algorithms
from samebits.portable.mode import LIST_OPERATIONS, listed_operations
from samebits.recipes.catalog import find
from samebits.replay.compare import difference_of_step
from samebits.replay.context import REPLACED, UNSAVED, WRITTEN, Notes, Probed
from samebits.replay.state import Cell, LineWatch, changed, global_generators
from samebits.replay.trace import Recorder, StepTrace, digest
from samebits.replay.trial import (
    NUM_EVAL,
    guarded,
    quiet,
    shuffle_generators,
    small_sizes,
)

# Probes of the samples and the metric: read again, and merge as 1, 2 and 3 processes would; bits must be equal.


WORLDS = (1, 2, 3)


def probe_samples(probed: Probed, data: tuple[Samples, Samples], leaf: MicroBatch) -> None:
    """Probe the training and the validation samples."""
    indices = leaf.indices[: len(data[1])] % len(data[1])
    if groups_of(data[1]) is not None:
        indices = indices[:1]  # samples of several groups do not share a batch
    requests = [(leaf.indices, leaf.keys), (indices, keys(0, 0, indices))]
    for name, samples, request in zip(("training", "validation"), data, requests, strict=True):
        _probe_dataset(probed, name, samples, request)


def _probe_dataset(probed: Probed, name: str, samples: Samples, request: Request) -> None:
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
                phase,
                undo,
                lambda: read(loader),
                lambda: sample_digests(loader.batch(request[0], other)) == fresh,
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
            outputs = (
                model(batch.inputs) if parts.infer is None else parts.infer(model, batch.inputs)
            )
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


def _merged(parts: Parts, pairs: list[tuple[Any, Batch]], size: int) -> dict[str, str] | str:
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
            merged.merge(collectives.decode(collectives.encode(state), torch.device("cpu")))
        return {name: repr(float(value)) for name, value in merged.result().items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


# Probes of the model and the loss: a micro-batch, another one, and the first again; a batch and its halves.


MAX_PASSES = 12  # of one micro-batch, where the model or the loss keeps state


class _Model:
    """The recipe's model on its device, which can be set back to its first state."""

    def __init__(self, probed: Probed, parts: Parts) -> None:
        self.probed = probed
        self.parts = parts
        self.model = prepare_model(parts.model, probed.config, probed.device)
        self.recorder = Recorder([self.model])
        self.own_state: list[Cell] = []  # what the last pass has changed
        modules = self.model.named_modules()
        self._buffers = [
            (path, module, name, buffer, None if buffer is None else buffer.clone())
            for path, module in modules
            for name, buffer in module._buffers.items()
        ]
        self._weights = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }

    def run(self, batch: Batch, forward_key: int) -> StepTrace:
        """Run forward and backward, and return what was computed. The model's own state is set back."""
        during = self.probed.notes.during
        seed_forward(forward_key, self.probed.device)
        self.recorder.start(0, {})
        with during("forward"):
            outputs = self.model(batch.inputs)
        self.recorder.end_forward()
        with during("loss"):
            terms = self.parts.loss(outputs, batch)
            total = torch.stack([term.float() for term in terms.values()]).sum()
        self.recorder.loss(terms)
        with during("backward"):
            total.backward()
        found = self.recorder.step({})
        self.own_state = self._changed()
        self._set_back()
        return found

    def _changed(self) -> list[Cell]:
        """Return what a pass changed of the state that the engine knows."""
        found = []
        for path, module, name, buffer, value in self._buffers:
            full = f"{path}.{name}" if path else name
            if module._buffers[name] is not buffer:
                found.append(Cell(full, REPLACED, "buffer", partial(_identity, module, name)))
            # It is not in the state_dict, so a resumed run would not have its value.
            elif name in module._non_persistent_buffers_set and _bits(buffer) != _bits(value):
                found.append(Cell(full, UNSAVED, "buffer", partial(_bits, buffer)))
        for name, weight in self.model.named_parameters():
            if _bits(weight) != _bits(self._weights[name]):
                found.append(Cell(name, WRITTEN, "parameter", partial(_bits, weight)))
        return found

    @torch.no_grad()
    def _set_back(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for _, module, name, buffer, value in self._buffers:
            # The original object, since forward may have put another one in its place.
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._weights[name])


def probe_model(
    probed: Probed, parts: Parts, train: Samples, leaves: list[MicroBatch]
) -> nn.Module:
    """Probe the model and the loss, and return the model as it was built."""
    loader = probed.loader(train)
    notes = probed.notes
    batches = [loader.batch(leaf.indices, leaf.keys) for leaf in leaves[:2]]
    tried = _Model(probed, parts)
    passes: list[StepTrace] = []

    def run(number: int = 0) -> None:
        passes.append(tried.run(batches[number], leaves[number].forward_key))

    def advance(num_passes: int) -> None:
        for number in range(num_passes):
            run(number % len(batches))

    def difference() -> Any:
        run()
        found = difference_of_step(passes[0], passes[-1])
        return found and (found.stage, found.name, found.detail)

    roots = probed.roots(model=tried.model, loss=parts.loss)
    with seeded(0):
        suspects, undo = changed(roots, run)
        own_state = tried.own_state
        run(len(batches) - 1)
        notes.checks["repeat"] = difference()
        num_passes = 2
        # A counter may act in a few passes only, such as each fourth one.
        while suspects and notes.checks["repeat"] is None and num_passes < MAX_PASSES:
            notes.checks["repeat"], num_passes = difference(), num_passes + 1
        if suspects and notes.checks["repeat"] is not None:
            notes.prove("forward", undo, lambda: advance(num_passes), lambda: difference() is None)
        notes.watch("forward", suspects, roots, run)
        _watch_own_state(notes, own_state, run)
        tried.recorder.remove()
        notes.phase = "loss"
        notes.checks["loss"] = _halves(tried, loader, max(leaves, key=len))
    return tried.model


def _watch_own_state(notes: Notes, changed: list[Cell], run: Callable[[], None]) -> None:
    if changed:
        with LineWatch({cell.path: cell for cell in changed}) as watch:
            run()
        notes.phase = "forward"
        # Without a line of the user, it is the state of a library's module.
        notes.add_state([cell for cell in changed if cell.path in watch.lines], watch.lines)


def _halves(tried: _Model, loader: Any, leaf: MicroBatch) -> dict[str, list[float]]:
    """Compute each loss term of a batch and of its halves, in evaluation mode.

    Returns:
        Of each term: [whole, first half, second half], all finite; empty if the loss cannot be computed like this.
    """
    size = len(leaf) // 2 * 2
    found: dict[str, list[float]] = {}
    try:
        with evaluating(tried.model), torch.no_grad():
            for rows in (slice(0, size), slice(0, size // 2), slice(size // 2, size)):
                batch = loader.batch(leaf.indices[rows], leaf.keys[rows])
                seed_forward(leaf.forward_key, tried.probed.device)
                terms: Mapping[str, Tensor] = tried.parts.loss(tried.model(batch.inputs), batch)
                for name, term in terms.items():
                    found.setdefault(name, []).append(float(term))
    except (
        Exception
    ):  # a model may return something else in evaluation mode, or the batch has one sample
        return {}
    return {
        name: three
        for name, three in found.items()
        if len(three) == 3 and all(map(math.isfinite, three))
    }


def _identity(module: nn.Module, name: str) -> int:
    return id(module._buffers[name])


def _bits(tensor: Tensor | None) -> str | None:
    return None if tensor is None else digest(tensor)


def probe(source: str, overrides: list[str]) -> dict[str, Any]:
    """Probe a recipe in this process, and return what was found."""
    shuffle_generators()
    notes = Notes()
    with quiet():
        os.environ[LIST_OPERATIONS] = "1"
        try:
            answer = guarded(lambda: _probe(source, overrides, notes))
        finally:
            del os.environ[LIST_OPERATIONS]
    return {**notes.to_plain(), **answer, "operations": listed_operations()}


def _probe(source: str, overrides: list[str], notes: Notes) -> dict[str, Any]:
    cells = global_generators()
    with LineWatch(cells) as watch, notes.during("import"):
        spec = find(source)
        spec.load_module()
    notes.add_state([cells[name] for name in watch.lines], watch.lines)
    config = spec.load(overrides).config
    device = alone(config.device).device
    use_deterministic_algorithms(config, device)
    with notes.during("build"):
        dataset_info = find_dataset_info(spec, config)
    probed = Probed(spec, config, dataset_info, device, notes)
    with notes.during("build"):
        parts = probed.build()
        check_trainable(parts.model)
    with notes.during("open"):
        data = open_data(config, parts, train=True), open_data(config, parts, train=False)
    check_not_empty({"training": len(data[0]), "validation": len(data[1])})
    notes.settings = small_sizes(config, len(data[0]))
    probed.config = spec.load([*overrides, *notes.settings]).config
    order = make_order(probed.config, data[0])
    leaves = list(next(order.steps(Alone(), stop=1)).micro_batches)
    probe_samples(probed, data, leaves[0])
    model = probe_model(probed, parts, data[0], leaves)
    probe_metric(probed, parts, model, data[1])
    if parts.init_weights is not None:
        fresh = build_parts(config, lambda: spec.build(config, dataset_info))
        with notes.during("init_weights"):
            parts.init_weights(fresh.model)
    return {}
