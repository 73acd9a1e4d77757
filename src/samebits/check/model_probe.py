"""Compute a micro-batch, another one, and the first again; and the loss of a batch and of its halves."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samebits.check.compare import first_in_pass
from samebits.check.context import REPLACED, UNSAVED, WRITTEN, Probed
from samebits.check.digest import ModuleRecorder, digests, gradients
from samebits.check.line_watch import LineWatch
from samebits.check.state import Cell, changed
from samebits.data.order import MicroBatch
from samebits.data.samples import Batch, Samples
from samebits.data.seeding import seed_forward, seeded
from samebits.engine.build import prepare_model
from samebits.engine.evaluate import evaluating
from samebits.engine.parts import Parts

Pass = dict[str, Any]
MAX_PASSES = 12  # of one micro-batch, where the model or the loss keeps state


class _Model:
    """The recipe's model on its device, which can be set back to its first state."""

    def __init__(self, probed: Probed, parts: Parts) -> None:
        self.probed, self.parts = probed, parts
        self.model = prepare_model(parts.model, probed.config, probed.device)
        self.recorder = ModuleRecorder(self.model)
        modules = self.model.named_modules()
        self._buffers = [
            (path, module, name, buffer, None if buffer is None else buffer.clone())
            for path, module in modules
            for name, buffer in module._buffers.items()
        ]
        self._weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def run(self, batch: Batch, forward_key: int) -> Pass:
        """Run forward and backward, and return what was computed. The model's own state is set back."""
        during = self.probed.notes.during
        seed_forward(forward_key, self.probed.device)
        events = self.recorder.start()
        with during("forward"):
            outputs = self.model(batch.inputs)
        self.recorder.stop()
        with during("loss"):
            terms = self.parts.loss(outputs, batch)
            total = torch.stack([term.float() for term in terms.values()]).sum()
        with during("backward"):
            total.backward()
        found: Pass = {
            "modules": events,
            "loss": digests({name: term.detach() for name, term in terms.items()}),
            "gradients": gradients(self.model),
            "buffers": digests(dict(self.model.named_buffers())),
        }
        found["own state"] = [cell.path for cell in self.cells() if self._is_changed(cell)]
        self._set_back()
        return found

    def cells(self) -> list[Cell]:
        """Return the state that the engine knows: replaced buffers, written parameters, buffers without a file."""
        found = []
        for path, module, name, buffer, _ in self._buffers:
            full = f"{path}.{name}" if path else name
            found.append(Cell(full, REPLACED, "buffer", partial(_identity, module, name)))
            # It is not in the state_dict, so a resumed run would not have its value.
            if buffer is not None and name in module._non_persistent_buffers_set:
                found.append(Cell(full, UNSAVED, "buffer", partial(_bits, buffer)))
        weights = self.model.named_parameters()
        return [*found, *(Cell(name, WRITTEN, "parameter", partial(_bits, weight)) for name, weight in weights)]

    def _is_changed(self, cell: Cell) -> bool:
        if cell.kind == WRITTEN:
            return cell.read() != _bits(self._weights[cell.path])
        for path, _, name, buffer, value in self._buffers:
            if (f"{path}.{name}" if path else name) == cell.path:
                return cell.read() != (id(buffer) if cell.kind == REPLACED else _bits(value))
        return False

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


def probe_model(probed: Probed, parts: Parts, train: Samples, leaves: list[MicroBatch]) -> nn.Module:
    """Probe the model and the loss, and return the model as it was built."""
    loader, notes = probed.loader(train), probed.notes
    batches = [loader.batch(leaf.indices, leaf.keys) for leaf in leaves[:2]]
    tried = _Model(probed, parts)
    passes: list[Pass] = []

    def run(number: int = 0) -> None:
        passes.append(tried.run(batches[number], leaves[number].forward_key))

    def advance(num_passes: int) -> None:
        for number in range(num_passes):
            run(number % len(batches))

    def difference() -> Any:
        run()
        return first_in_pass(passes[0], passes[-1])

    roots = probed.roots(model=tried.model, loss=parts.loss)
    with seeded(0):
        suspects, undo = changed(roots, run)
        run(len(batches) - 1)
        notes.checks["repeat"], num_passes = difference(), 2
        # A counter may act in a few passes only, such as each fourth one.
        while suspects and notes.checks["repeat"] is None and num_passes < MAX_PASSES:
            notes.checks["repeat"], num_passes = difference(), num_passes + 1
        if suspects and notes.checks["repeat"] is not None:
            notes.prove("forward", undo, lambda: advance(num_passes), lambda: difference() is None)
        notes.watch("forward", suspects, roots, run)
        _watch_own_state(tried, passes[0]["own state"], run)
        tried.recorder.remove()
        notes.phase = "loss"
        notes.checks["loss"] = _halves(tried, loader, max(leaves, key=len))
    return tried.model


def _watch_own_state(tried: _Model, paths: list[str], run: Callable[[], None]) -> None:
    cells = {f"{cell.kind} {cell.path}": cell for cell in tried.cells() if cell.path in paths}
    if cells:
        with LineWatch(cells) as watch:
            run()
        lines = {cell.path: watch.lines[name] for name, cell in cells.items() if name in watch.lines}
        tried.probed.notes.phase = "forward"
        # Without a line the state did not change: a cell of another kind has the same path.
        tried.probed.notes.add_state([cell for name, cell in cells.items() if name in watch.lines], lines)


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
    except Exception:  # a model may return something else in evaluation mode, or the batch has one sample
        return {}
    return {name: three for name, three in found.items() if len(three) == 3 and all(map(math.isfinite, three))}


def _identity(module: nn.Module, name: str) -> int:
    return id(module._buffers[name])


def _bits(tensor: Tensor | None) -> str | None:
    return None if tensor is None else digests({"": tensor})[""]
