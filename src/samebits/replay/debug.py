"""`samebits debug`: any step of a past run again, on one process, with its batch, activations and gradients.

record       `--when` is answered by the run's record of its steps, `--sample` by the order of its samples
replay       from the nearest checkpoint before the step; each step is compared with the record
trace        the step itself, with all of its tensors; the model is then as it was before the step
"""

import code
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.bits import tensors_in
from samebits.data.samples import Batch
from samebits.errors import ConfigError
from samebits.extras import is_installed
from samebits.provenance.record import APPLIED, StepRecord
from samebits.replay.folders import read_run
from samebits.replay.segments import compare_step
from samebits.replay.stepper import ReplayedRun
from samebits.replay.trace import CALL, SUMMED, StepTrace, returned
from samebits.storage.run_folder import check_run_path

_SHOWN = 8  # samples


class Gradients(dict[str, Tensor]):
    """The gradient of each parameter, summed over the step and before clipping."""

    def norms(self) -> dict[str, float]:
        """Return the 2-norm of each, the largest first."""
        norms = {name: float(gradient.double().norm()) for name, gradient in self.items()}
        # NaN compares with nothing.
        return dict(sorted(norms.items(), key=lambda each: (not math.isnan(each[1]), -each[1])))


class DebugBatch:
    """All samples of a step, in the order of its micro-batches.

    Attributes:
        inputs, targets, indices: See `Batch`; a list for each micro-batch where they cannot be joined.
        names: The file of each sample; its index in a dataset without a file for each.
        micro_batches: The batches, as the model gets them.
    """

    def __init__(self, micro_batches: Sequence[Batch], files: Sequence[Any] | None) -> None:
        self.micro_batches = list(micro_batches)
        self.inputs = _joined([each.inputs for each in micro_batches])
        self.targets = _joined([each.targets for each in micro_batches])
        self.indices = torch.cat([each.indices for each in micro_batches])
        numbers = self.indices.tolist()
        self.names = [str(number if files is None else files[number]) for number in numbers]

    def __len__(self) -> int:
        return len(self.indices)

    def save(self, path: str = "batch.png") -> None:
        """Draw the images of the batch, (N, C, H, W) or (N, H, W), into a PNG file."""
        from samebits.report.pictures import draw_sheet

        images = next((each for each in tensors_in(self.inputs) if each.dim() >= 3), None)
        if images is None or len(images) != len(self):
            raise ValueError("the inputs are no images of shape (N, C, H, W) or (N, H, W)")
        tiles = []
        for image in images.float().nan_to_num():
            channels = image.reshape(-1, *image.shape[-2:])
            few = channels[: 3 if len(channels) >= 3 else 1]
            scaled = (few - few.min()) / (few.max() - few.min()).clamp_min(1e-12) * 255
            tiles.append(scaled.byte().permute(1, 2, 0).squeeze(-1).contiguous().cpu().numpy())
        draw_sheet("batch", tiles, [Path(name).name for name in self.names], Path(path))


def _joined(values: Sequence[Any]) -> Any:
    """Join the values of micro-batches along the first dimension; a list of them where that is not possible."""
    first = values[0]
    if isinstance(first, Tensor):
        is_alike = all(each.dim() and each.shape[1:] == first.shape[1:] for each in values)
        return torch.cat(list(values)) if is_alike else list(values)
    if isinstance(first, Mapping):
        return {name: _joined([each[name] for each in values]) for name in first}
    return list(values)


class Session:
    """A run at one of its steps.

    Args:
        side: The run.
        report: Called with each line of the report.

    Attributes:
        names: What the prompt and `--print` know, by name.
    """

    def __init__(self, side: ReplayedRun, report: Callable[[str], None]) -> None:
        self._side = side
        self._say = report
        self._number = 0
        self.names: dict[str, Any] = {
            "model": side.job.model, "optimizer": side.job.optimizer, "torch": torch, "run": self,
            "step": lambda count=1: self.go(self._number + count),
            "back": lambda count=1: self.go(self._number - count),
        }  # fmt: skip

    def go(self, number: int) -> None:
        """Replay a step: all tensors of it, and the model and the optimizer as they were before it.

        Raises:
            ConfigError: The run has no such step.
        """
        side = self._side
        last = side.job.num_steps - 1
        if not 0 <= number <= last:
            raise ConfigError(
                f"the run has no step {number:,}",
                allowed=f"0 to {last:,}",
                fix="Give one of its steps; they are counted from 0.",
            )
        start = side.starts(number)[-1]
        if not start <= side.step_number <= number:
            side.go_to(start)
        begun = side.step_number
        records = []
        while side.step_number < number:
            records.append(side.step())
        before = side.snapshot()
        plan = side.plan()
        record, trace = side.trace(lambda key: key[0] in (CALL, SUMMED))
        side.restore(before)
        self._number = number
        batches = [
            side.loader.batch(each.indices, each.keys, again=True) for each in plan.micro_batches
        ]
        files = getattr(side.job.train_data, "files", None)
        if files is not None and len(files) != len(side.job.train_data):
            files = None  # such as the shards of a dataset
        batch = DebugBatch(batches, files)
        self.names |= {
            "batch": batch,
            "record": record,
            "loss": record.loss,
            "activations": _activations(trace),
            "gradients": Gradients(
                {
                    str(name): kept[0]
                    for (kind, _, name), kept in trace.kept.items()
                    if kind == SUMMED
                }
            ),
        }
        self._report(begun, [*records, record], batch, trace)

    def _report(
        self, begun: int, records: Sequence[StepRecord], batch: DebugBatch, trace: StepTrace
    ) -> None:
        side = self._side
        log = side.recorded.log
        num_known = sum(log.get(each.step) is not None for each in records)
        found = (compare_step(log.get(each.step), each) for each in records)
        difference = next(filter(None, found), None)
        origin = f"the state before step {begun:,}" if begun else "the initial weights"
        if difference is not None:
            text = (
                f"step {difference.step:,} DIFFERS from the record: {difference.name} recorded "
                f"{difference.recorded}, replayed {difference.replayed}"
            )
        elif num_known == len(records):
            text = f"steps {begun:,}-{self._number:,} equal the record, bit for bit"
            if num_known == 1:
                text = f"step {begun:,} equals the record, bit for bit"
        else:
            text = f"the record has no step {begun + num_known:,}"
            text += "; those before it are equal, bit for bit" * bool(num_known)
        now = records[-1]
        self._say(f"replay     {text}; from {origin}, on 1 process")
        names = ", ".join(batch.names[:_SHOWN]) + (" …" if len(batch) > _SHOWN else "")
        self._say(
            f"step       {now.step:,}: loss {now.loss!r}, gradient norm {now.norm!r}, lr {now.lr!r}"
        )
        self._say(
            f"batch      {len(batch)} samples in {len(trace.micro_batches)} micro-batches: {names}"
        )
        for line in _first_nonfinite(batch, trace, now, self.names["gradients"]):
            self._say(line)


def _activations(trace: StepTrace) -> dict[str, Any]:
    """Return the output of each module by name, of all micro-batches; a list where they cannot be joined."""
    found: dict[str, list[Tensor]] = {}
    for index, micro_batch in enumerate(trace.micro_batches.values()):
        for number, call in enumerate(micro_batch.calls):
            found.setdefault(call.name, []).extend(trace.kept[CALL, index, number])
    return {name: _joined(tensors) for name, tensors in found.items() if tensors}


def _first_nonfinite(
    batch: DebugBatch, trace: StepTrace, record: StepRecord, gradients: Mapping[str, Tensor]
) -> Iterator[str]:
    """Describe the first value of the step that is not finite: a sample, a module's output, or a gradient."""
    at = 0
    for index, (read, micro_batch) in enumerate(
        zip(batch.micro_batches, trace.micro_batches.values(), strict=True)
    ):
        names = batch.names[at : at + len(read)]
        at += len(read)
        for tensor in tensors_in(read.inputs):
            if (row := _bad_row(tensor)) is not None:
                yield f"not finite sample {names[row]}, row {row} of micro-batch {index}: as it was read"
                return
        for number, call in returned(micro_batch.calls):
            rows = [_bad_row(tensor) for tensor in trace.kept[CALL, index, number]]
            row = next((each for each in rows if each is not None), None)
            if row is not None:
                who = f", sample {names[row]}" if row < len(names) else ""
                yield f"not finite output of module {call.name or 'the model'} ({call.kind}), micro-batch {index}{who}"
                return
    if not math.isfinite(record.loss):
        yield "not finite the loss, although the model's outputs are finite"
        return
    # In the order of the backward pass.
    for name in reversed(list(gradients)):
        if not bool(gradients[name].isfinite().all()):
            yield f"not finite gradient of {name}, although the loss is finite"
            return


def _bad_row(tensor: Tensor) -> int | None:
    """Return the first row of a tensor, (N, ...), with a value that is not finite."""
    if not tensor.is_floating_point() or not tensor.dim() or bool(tensor.isfinite().all()):
        return None
    return int((~tensor.isfinite()).reshape(len(tensor), -1).any(dim=1).nonzero()[0])


def find_step(side: ReplayedRun, step: int | None, when: str, sample: int | None) -> int:
    """Return the step that the user asks for.

    Args:
        step, when, sample: A step; an expression of loss, norm, lr, step and nonfinite; a sample that the step reads.

    Raises:
        ConfigError: There is none.
    """
    log = side.recorded.log
    first = step or 0
    if when:
        for number in range(max(first, log.first_step), log.stop):
            record = log.get(number)
            assert record is not None
            is_finite = record.outcome == APPLIED and math.isfinite(record.loss + record.norm)
            values = {name: getattr(record, name) for name in ("step", "loss", "norm", "lr")}
            if evaluated(when, {**values, "nonfinite": not is_finite}):
                return number
        if "nonfinite" in when and log.stop < side.job.num_steps:
            return log.stop  # a run that has stopped at it has not recorded it
        raise ConfigError(f"no step of the record has {when}", fix="Give another condition.")
    if sample is not None:
        job = side.job
        for plan in job.order.steps(job.world, start=first, stop=job.num_steps):
            if any((each.indices == sample).any() for each in plan.micro_batches):
                return plan.number
        raise ConfigError(
            f"no step reads sample {sample:,}",
            allowed=f"0 to {len(job.train_data) - 1:,}",
            fix="Give the index of a training sample.",
        )
    return first


def evaluated(expression: str, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression of the user's command line.

    Raises:
        ConfigError: It fails.
    """
    try:
        # The user's own code, as in the prompt.
        return eval(expression, dict(names))
    except Exception as error:
        known = ", ".join(name for name in names if name != "torch")
        raise ConfigError(
            f"{expression} raised {type(error).__name__}: {error}",
            allowed=f"a Python expression of {known}",
            fix="Correct it.",
        ) from None


@contextmanager
def session(
    run: Path,
    overrides: Sequence[str],
    report: Callable[[str], None],
    *,
    step: int | None,
    when: str,
    sample: int | None,
) -> Iterator[Session]:
    """Open a run at a step; see `find_step`. Nothing is written into its folder.

    Raises:
        SamebitsError: The run cannot be opened or replayed, or has no such step.
    """
    check_run_path(run)
    with ExitStack() as stack:
        side = ReplayedRun("the run", read_run(run), overrides, None, stack)
        number = find_step(side, step, when, sample)
        opened = Session(side, report)
        opened.go(number)
        yield opened


def prompt(opened: Session) -> None:
    """Open a prompt, until the user leaves it: IPython on a terminal that has it, otherwise Python's."""
    if is_installed("IPython") and sys.stdin.isatty():
        import IPython

        IPython.start_ipython(argv=["--no-banner"], user_ns=opened.names)
        return
    code.interact(banner="", local=opened.names, exitmsg="")
