"""Probes of a recipe in one process: read again, compute again, halve, merge; and what it reads and keeps.

The trials show that something differs. The probes show why: they run each part of the recipe again on the same data,
under a tracer of sources (`sources`) and of state (`state`).
"""

import os

from samebits.check.context import Notes, Probed
from samebits.check.data_probe import probe_metric, probe_samples
from samebits.check.guard import Record, guarded, quiet, shuffle_generators
from samebits.check.line_watch import LineWatch
from samebits.check.model_probe import probe_model
from samebits.check.sizes import small_sizes
from samebits.check.state import global_generators
from samebits.cluster.world import alone
from samebits.data.micro_batches import Alone
from samebits.engine.build import build_parts, check_not_empty, make_order, open_data
from samebits.engine.dataset_info import find_dataset_info
from samebits.module.check_model import check_trainable
from samebits.module.determinism import use_deterministic_algorithms
from samebits.portable.listing import LIST_OPERATIONS, listed_operations
from samebits.recipes.catalog import find


def probe(source: str, overrides: list[str]) -> Record:
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


def _probe(source: str, overrides: list[str], notes: Notes) -> Record:
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
    order = make_order(probed.config, data[0], 1, is_sharded=False)
    leaves = list(next(order.steps(Alone(), stop=1)).micro_batches)
    probe_samples(probed, data, leaves[0])
    model = probe_model(probed, parts, data[0], leaves)
    probe_metric(probed, parts, model, data[1])
    if parts.init_weights is not None:
        fresh = build_parts(config, lambda: spec.build(config, dataset_info))
        with notes.during("init_weights"):
            parts.init_weights(fresh.model)
    return {}
