"""Probes of a recipe in one process: each part runs twice, under tracers of what it reads and of what it keeps.

The trials show that something differs. The probes show what may be the reason: the sources that a part reads
(`sources`), the state that changes while it runs (`state`), and whether it differs when it runs again.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.data.division import Alone
from samebits.data.keyed import keys
from samebits.data.loader import Loader
from samebits.data.order import MicroBatch
from samebits.data.samples import Batch, Samples, sample_digests
from samebits.data.seeding import seed_forward, seeded
from samebits.engine import build
from samebits.engine.evaluate import evaluate, evaluating, options_of
from samebits.frames import Line
from samebits.module.check_model import check_trainable
from samebits.module.determinism import use_deterministic_algorithms
from samebits.portable.mode import LIST_OPERATIONS, listed_operations
from samebits.provenance.self_check import buffers_of
from samebits.recipes.catalog import find
from samebits.replay import trial
from samebits.replay.cause import REPLACED, SET_ORDER, UNSAVED, WRITTEN, loops_over_sets
from samebits.replay.compare import EVALUATION, FORWARD, GRADIENTS, LOSS, ROOT, SAMPLES
from samebits.replay.sources import SourceTracer, Suspect
from samebits.replay.state import (
    CACHE,
    GENERATOR,
    GLOBAL,
    STATE,
    Cell,
    changed,
    find_cells,
    line_watch,
    user_modules,
)
from samebits.replay.trace import digest, digests, gradients

Loss = Callable[[Any, Batch], Mapping[str, Tensor]]
Results = dict[tuple[str, str], str]  # a digest or value by stage and name
Part = tuple[Mapping[str, object], Callable[[int], Results]]


def probe(source: str, overrides: list[str]) -> dict[str, Any]:
    """Probe a recipe in this process, and return what was found, as plain values.

    Returns:
        suspects: What it reads and keeps.
        again: The first results that differ when this process computes them again: stage and name.
        losses: Each loss term of a batch and of its halves.
        settings: Settings that make its steps small.
        operations: See `listed_operations`.
        error, line: See `guarded`. The rest is complete up to the point at which the recipe raised the error.
    """
    trial.shuffle_generators()
    found = _Probe()
    with trial.quiet():
        os.environ[LIST_OPERATIONS] = "1"
        try:
            answer = trial.guarded(partial(found.run, source, overrides))
        finally:
            del os.environ[LIST_OPERATIONS]
    suspects = [asdict(each) for each in (*found.tracer.found, *found.suspects)]
    return {**found.notes, "suspects": suspects, "operations": listed_operations(), **answer}


class _Probe:
    """A recipe that is probed, and what was found so far."""

    def __init__(self) -> None:
        self.tracer = SourceTracer()
        self.suspects: list[Suspect] = []  # state that changes
        self.notes: dict[str, Any] = {"again": [], "losses": {}, "settings": []}

    def run(self, source: str, overrides: list[str]) -> dict[str, Any]:
        """Run all probes."""
        during = self.tracer.during
        with line_watch(GLOBAL) as lines, during("import"):
            spec = find(source)
            spec.load_module()
        self._add_state("import", GLOBAL, lines)
        config = spec.load(overrides).config
        world = alone(config.device)
        use_deterministic_algorithms(config, world.device)
        with during("build"):
            dataset_info = build.find_dataset_info(spec, config)
            parts = build.build_parts(config, lambda: spec.build(config, dataset_info))
            check_trainable(parts.model)
        with during("open"):
            train = build.open_data(config, parts, train=True)
            validation = build.open_data(config, parts, train=False)
        build.check_not_empty({"training": len(train), "validation": len(validation)})
        self.notes["settings"] = trial.small_sizes(config, len(train))
        config = spec.load([*overrides, *self.notes["settings"]]).config
        model = build.prepare_model(parts.model, config, world.device)
        order = build.make_order(config, train)
        leaves = list(next(order.steps(Alone(), stop=1)).micro_batches)
        # A cache changes at the first reading only.
        new = build.open_data(config, parts, train=True)
        reads = [self._reading(samples, leaves[0], config.seed) for samples in (train, new)]
        self._repeat(SAMPLES, *reads)
        loader = Loader(train, lambda: iter(()), world.device, channels_last=config.channels_last)
        self._repeat(FORWARD, *2 * [self._forward(model, parts.loss, loader, leaves)])
        self._halves(model, parts.loss, loader, max(leaves, key=len))

        def evaluation(number: int) -> Results:
            few = trial.Slice(validation, trial.EVAL_BATCH)
            options = {**options_of(parts, config), "num_workers": 0}
            with during(EVALUATION):
                metrics, _ = evaluate(model, few, world, **options)
            return {(EVALUATION, name): repr(value) for name, value in metrics.items()}

        self._repeat(EVALUATION, *2 * [(_dataset(validation), evaluation)])
        if parts.init_weights is not None:
            with during("init_weights"):
                parts.init_weights(model)
        for module in user_modules().values():
            file = str(module.__file__)
            for number in loops_over_sets(file):
                self.suspects.append(Suspect(SET_ORDER, "a set", file, number, "build"))
        return {}

    def _reading(self, samples: Samples, leaf: MicroBatch, seed: int) -> Part:
        # In another epoch a sample has other keys: a dataset that keeps its samples then returns those of before.
        every = [leaf.keys, keys(seed, 1, leaf.indices)]

        def read(number: int) -> Results:
            loader = Loader(samples, lambda: iter(()), torch.device("cpu"))
            with self.tracer.during(SAMPLES):
                batch = loader.batch(leaf.indices, every[number])
            values = sample_digests(batch)
            return {(SAMPLES, str(index)): value for index, value in values.items()}

        return _dataset(samples), read

    def _forward(
        self, model: nn.Module, loss: Loss, loader: Loader, leaves: Sequence[MicroBatch]
    ) -> Part:
        restore = buffers_of(model)
        device = next(model.parameters()).device

        def run(number: int) -> Results:
            leaf = leaves[-number]
            batch = loader.batch(leaf.indices, leaf.keys)
            restore()
            model.zero_grad(set_to_none=True)
            with seeded(0):
                seed_forward(leaf.forward_key, device)
                with self.tracer.during(FORWARD):
                    outputs = model(batch.inputs)
                with self.tracer.during(LOSS):
                    terms = loss(outputs, batch)
                    total = torch.stack([term.float() for term in terms.values()]).sum()
                    total.backward()
            found = {(FORWARD, ROOT): digest(outputs)}
            found |= {(LOSS, name): value for name, value in digests(terms).items()}
            values = digests(gradients(model))
            return found | {(GRADIENTS, name): value for name, value in values.items()}

        return {"model": model, "loss": loss}, run

    def _repeat(self, phase: str, first: Part, second: Part) -> None:
        """Note the state that changes in a part of the recipe, and whether a result differs after another call.

        Args:
            phase: What the recipe is doing.
            first, second: What state is reachable from; and a call, which is made with 0, then with 1 and 0.
        """
        results: list[Results] = []
        suspects = changed(partial(_cells, first[0]), lambda: results.append(first[1](0)))
        now = _cells(second[0])
        with line_watch({path: now[path] for path in suspects if path in now}) as lines:
            second[1](1)
            results.append(second[1](0))
        self._add_state(phase, suspects, lines)
        one, other = results
        self.notes["again"] += [key for key in one if one[key] != other.get(key)][:1]

    def _halves(self, model: nn.Module, loss: Loss, loader: Loader, leaf: MicroBatch) -> None:
        """Compute each loss term of a batch, its first and its second half, in evaluation mode."""
        half = len(leaf) // 2
        found: list[dict[str, float]] = []
        # A model may return something else in evaluation mode, or the batch has one sample.
        with suppress(Exception), evaluating(model), torch.no_grad():
            for rows in (slice(0, 2 * half), slice(0, half), slice(half, 2 * half)):
                batch = loader.batch(leaf.indices[rows], leaf.keys[rows])
                with seeded(leaf.forward_key):
                    terms = loss(model(batch.inputs), batch)
                found.append({name: float(term) for name, term in terms.items()})
            self.notes["losses"] = {name: [each[name] for each in found] for name in found[0]}

    def _add_state(self, phase: str, cells: Mapping[str, Cell], lines: Mapping[str, Line]) -> None:
        for path, cell in cells.items():
            line = lines.get(path, ("", 0))
            # Without a line of the user, these are the state of a library's module.
            if path in lines or cell.kind in (GENERATOR, CACHE, STATE):
                self.suspects.append(Suspect(cell.kind, path, *line, phase))


def _dataset(samples: Samples) -> dict[str, object]:
    # An adapter's own attribute is the user's dataset.
    return {"dataset": getattr(samples, "dataset", samples)}


def _cells(roots: Mapping[str, Any]) -> dict[str, Cell]:
    """Find state, also in modules of the user and in the model, which forward may use in a wrong way."""
    found = find_cells({**roots, **user_modules()})
    model = roots.get("model", nn.Module())
    saved = model.state_dict()
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = Cell(WRITTEN, partial(digest, parameter))
    for name, buffer in model.named_buffers():
        # A buffer that is not saved must not change at all: a resumed run would start without its value.
        cell = Cell(UNSAVED, partial(digest, buffer))
        if name in saved:
            cell = Cell(REPLACED, partial(_identity, model, name))
        found[f"model.{name}"] = cell
    return found


def _identity(model: nn.Module, name: str) -> int:
    return id(model.get_buffer(name))
