"""What a traced step computed: digests, and a few tensors. `tracer.py` collects it."""

from dataclasses import dataclass, field

from torch import Tensor

from samebits.provenance.step_log import StepRecord

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
OPERATION, CALL, GRADIENT, BATCH, SUMMED, APPLIED = "operation", "call", "gradient", "batch", "summed", "applied"
# (kind, micro-batch, number or name): an operation, a call, a gradient, the loss or the batch itself.
Key = tuple[str, int, int | str]


@dataclass
class Call:
    """One call of a module."""

    name: str  #: The module's name in the model; empty for the model itself.
    kind: str  #: Its class.
    parent: int | None  #: Number of the call that contains this one; None for the model.
    inputs: bytes  #: Digest of the tensors it was called with.
    output: bytes = b""  #: Digest of the tensors it returned.
    order: int = -1  #: Rank in the order in which calls returned.


@dataclass(frozen=True)
class Operation:
    """One operation of torch."""

    phase: str  #: FORWARD, LOSS or BACKWARD.
    name: str  #: Its name, such as aten.convolution.
    node: str  #: In the backward pass, the autograd function that ran it.
    call: int | None  #: Number of the call that it belongs to; None outside of the model.
    output: bytes  #: Digest of its results.

    @property
    def title(self) -> str:
        """The name, with the autograd function if there is one."""
        return f"{self.name} in {self.node}" if self.node else self.name


@dataclass
class MicroTrace:
    """The trace of a micro-batch."""

    indices: list[int]  #: Samples, in order.
    samples: dict[int, str] = field(default_factory=dict)  #: Digest of each sample's values.
    calls: list[Call] = field(default_factory=list)  #: Calls of modules, in the order in which they began.
    operations: list[Operation] = field(default_factory=list)  #: Operations, in the order in which they ran.
    loss: bytes = b""  #: Digest of the loss's terms.
    gradients: dict[str, bytes] = field(default_factory=dict)  #: Digest of the gradient of each parameter, by name.


@dataclass
class StepTrace:
    """The trace of a step."""

    record: StepRecord  #: The step's record.
    micro_batches: list[MicroTrace] = field(default_factory=list)  #: The micro-batches, in order.
    summed: dict[str, bytes] = field(default_factory=dict)  #: Digest of each summed gradient, by parameter.
    #: Digest of each gradient that the optimizer received, by parameter.
    applied: dict[str, bytes] = field(default_factory=dict)
    kept: dict[Key, list[Tensor]] = field(default_factory=dict)  #: The tensors of the wanted keys.
