"""What a traced step computed: digests, and a few tensors. `tracer.py` collects it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from samebits.provenance.step_log import StepRecord

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
OPERATION, CALL, GRADIENT, BATCH, SUMMED, APPLIED = "operation", "call", "gradient", "batch", "summed", "applied"
# (kind, micro-batch, number or name): an operation, a call, a gradient, the loss or the batch itself.
Key = tuple[str, int, int | str]


@dataclass
class Call:
    """One call of a module.

    Attributes:
        name: The module's name in the model; empty for the model itself.
        kind: Its class.
        parent: Number of the call that contains this one; None for the model.
        inputs: Digest of the tensors it was called with.
        output: Digest of the tensors it returned.
        order: Rank in the order in which calls returned.
    """

    name: str
    kind: str
    parent: int | None
    inputs: bytes
    output: bytes = b""
    order: int = -1


@dataclass(frozen=True)
class Operation:
    """One operation of torch.

    Attributes:
        phase: FORWARD, LOSS or BACKWARD.
        name: Its name, such as aten.convolution.
        node: In the backward pass, the autograd function that ran it.
        call: Number of the call that it belongs to; None outside of the model.
        output: Digest of its results.
    """

    phase: str
    name: str
    node: str
    call: int | None
    output: bytes

    @property
    def title(self) -> str:
        """The name, with the autograd function if there is one."""
        return f"{self.name} in {self.node}" if self.node else self.name


@dataclass
class MicroTrace:
    """The trace of a micro-batch.

    Attributes:
        indices: Samples, in order.
        samples: Digest of each sample's values.
        calls: Calls of modules, in the order in which they began.
        operations: Operations, in the order in which they ran.
        loss: Digest of the loss's terms.
        gradients: Digest of the gradient of each parameter, by name.
    """

    indices: list[int]
    samples: dict[int, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    loss: bytes = b""
    gradients: dict[str, bytes] = field(default_factory=dict)


@dataclass
class StepTrace:
    """The trace of a step.

    Attributes:
        record: The step's record.
        micro_batches: The micro-batches, in order.
        summed: Digest of each summed gradient, by parameter.
        applied: Digest of each gradient that the optimizer received, by parameter.
        kept: The tensors of the wanted keys.
    """

    record: StepRecord
    micro_batches: list[MicroTrace] = field(default_factory=list)
    summed: dict[str, bytes] = field(default_factory=dict)
    applied: dict[str, bytes] = field(default_factory=dict)
    kept: dict[Key, list[Tensor]] = field(default_factory=dict)
