"""Check before training that a second reading of samples and a second pass of a micro-batch have the same bits.

Exact mode promises equal bits, and the engine alone cannot ensure them: a call counter in a module or a random
generator of its own makes a result depend on earlier calls, hence on the number of processes and on restarts.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits.bits import as_integers, is_same
from samebits.data.samples import Batch
from samebits.data.seeding import seed_forward, seeded
from samebits.errors import ConfigError, SamebitsError

LOGGER = logging.getLogger("samebits")


@dataclass(frozen=True)
class _Pass:
    """The result of one forward and backward pass: loss terms, gradients and changed buffers, by name."""

    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def check_same_samples(name: str, first: Mapping[int, str], again: Mapping[int, str]) -> None:
    """Compare the digests of two readings, `first` and `again`, of samples with the same keys, by index."""
    differing = [index for index, digest in first.items() if digest != again[index]]
    if not differing:
        return
    more = f", and {len(differing) - 1} more of {len(first)}" if len(differing) > 1 else ""
    raise ConfigError(
        f"{name} sample {differing[0]}{more} had other values when it was read again with the same key",
        allowed="the same sample at every reading",
        cause="The dataset counts its calls, draws from a random generator of its own, reads the clock,\n"
        "or changes its samples in place (x += noise).",
        fix="Draw from torch's, numpy's or Python's global generator, which the engine seeds for each sample, or from\n"
        "the sample's key; copy a sample before changing it.",
    )


def try_micro_batch(
    model: nn.Module,
    loss: Callable[[Any, Batch], Mapping[str, Tensor]],
    batch: Batch,
    forward_key: int,
    device: torch.device,
    *,
    twice: bool,
) -> dict[str, str]:
    """Run a micro-batch, (N, ...), forward and backward, and digest the result; the model's state is restored.

    Returns:
        Digests of initial weights, loss and gradients, by name. Empty if the pass raises an error: step 0 then raises
        the same one and reports it.

    Raises:
        ConfigError: The second pass has other bits, or a pass changed a parameter.
    """
    restore_buffers = buffers_of(model)
    weights: dict[str, int] = {}

    def run() -> _Pass:
        seed_forward(forward_key, device)
        terms = loss(model(batch.inputs), batch)
        sum(terms.values(), torch.zeros((), device=device)).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        changed = {name: buffer.clone() for name, buffer in model.named_buffers()}
        restore()
        return _Pass({name: term.detach() for name, term in terms.items()}, gradients, changed)

    def restore() -> None:
        restore_buffers()
        model.zero_grad()

    with seeded(0), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            weights = _sums(dict(model.named_parameters()))
            first = run()
            again = run() if twice else first
        except SamebitsError:
            raise
        except Exception as error:
            LOGGER.info("the trial micro-batch failed: %s", error)
            return {}
        finally:
            restore()
    now = _sums(dict(model.named_parameters()))
    if written := [name for name in weights if weights[name] != now.get(name)]:
        raise _not_repeatable(f"the forward pass wrote into {_named('parameter', written)}")
    _compare(first, again)
    return {
        "initial weights": _brief(weights),
        "loss of a trial micro-batch": _brief(_sums(first.losses)),
        "gradients of a trial micro-batch": _brief(_sums(first.gradients)),
    }


def buffers_of(model: nn.Module) -> Callable[[], None]:
    """Keep the buffers of a model and their values, and return a function that restores both."""
    # A model may count or collect values in a forward pass, different ones on each rank. The dictionaries themselves:
    # `register_buffer` would forget whether a buffer is persistent.
    kept = [
        (module._buffers, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]

    @torch.no_grad()
    def restore() -> None:
        for buffers, name, buffer, value in kept:
            # A forward pass may have bound the name to another tensor. References to the original one must stay valid.
            buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)

    return restore


def _compare(first: _Pass, again: _Pass) -> None:
    pairs = [
        ("loss term", first.losses, again.losses),
        ("gradient of", first.gradients, again.gradients),
        ("buffer", first.buffers, again.buffers),
    ]
    found = []
    for kind, one, other in pairs:
        names = [name for name in one | other if not is_same(one.get(name), other.get(name))]
        if names:
            found.append(_named(kind, names))
    if found:
        raise _not_repeatable("\n".join(found))


def _not_repeatable(what: str) -> ConfigError:
    return ConfigError(
        "the same micro-batch had other values when it was computed again",
        given=what,
        allowed="a model and a loss without a memory of earlier passes",
        cause="The model or the loss counts its calls, keeps values of an earlier pass in an attribute or a\n"
        "parameter, draws from a random generator of its own, or reads the clock.",
        fix="Draw from torch's, numpy's or Python's global generator, which the engine seeds for each\n"
        "micro-batch; keep changing state in a buffer that averaged_buffers lists, written in place.",
    )


def _named(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{kind} {names[0]}{more}"


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Sum each tensor's bits as integers: exact in any order, and one pass over the memory."""
    if not tensors:
        return {}
    # One transfer for all tensors: on a GPU, each transfer waits for the device.

    sums = torch.stack(
        [as_integers(tensor).sum(dtype=torch.int64) for tensor in tensors.values()]
    ).tolist()
    return dict(zip(tensors, sums, strict=True))


def _brief(sums: Mapping[str, int]) -> str:
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]
