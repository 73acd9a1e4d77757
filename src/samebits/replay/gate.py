"""`samebits gate`: whether a change of the code has changed the training, by its first steps and a small text file.

    first call       train some steps, twice      -> train.gate.json, to commit
    later calls      train them again             -> same bits, or the first step, module and operation that differ

The result decides: losses, gradients, buffers, weights and optimizer state of each step, and the evaluation. Samples
and modules only show where a difference begins, so a module that was renamed, split or wrapped is no difference.

The file has a digest of all tensors of a kind, and one of 18 bits for each module and parameter: enough to find the
first of them that differs, once the whole digests do.
"""

import base64
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from samebits import scratch
from samebits.errors import ConfigError
from samebits.plain_file import parse_json, read_plain
from samebits.recipes.catalog import find
from samebits.replay import compare
from samebits.replay.check import Progress, in_interpreter
from samebits.replay.check_script import FIRST, launched, observe
from samebits.replay.trace import Call, MicroTrace, StepTrace, Trace
from samebits.storage.run_folder import check_target, write_atomically

NUM_STEPS = 20
_FORMAT = "samebits gate 2"
_MAX_BYTES = 1 << 26
_CHARS = 3  # of a short digest, in base64
_SHOWN = 3  # operations of a module
# What decides whether training is the same.
_RESULT = (compare.LOSS, compare.GRADIENTS, compare.BUFFERS, compare.WEIGHTS, compare.OPTIMIZER)
_VALUES = {"loss": "loss", "norm": "gradient norm", "lr": "learning rate"}
Summary = dict[str, Any]  # the content of a file
_DATA = "(data)"
_OPTIMIZER = "(optimizer)"


@dataclass(frozen=True)
class GateSource:
    """What to train."""

    name: str  #: A recipe, or a script.
    given: list[str]  #: Settings of the recipe, or arguments of the script.
    #: Ranks of a script of `samebits launch`; 0: it has an exact loop; None: it is a recipe.
    ranks: int | None


@dataclass(frozen=True)
class GateDifference:
    """The first difference from the file."""

    step: int | None  #: The step, from 0; None before the first step and in the evaluation.
    phase: str  #: Part of the step, such as "forward".
    module: str = ""  #: The module, with its class.
    operation: str = ""  #: Its operation, of both where they differ; all of them if there are more.
    what: str = ""  #: What the two values are, such as "loss".
    before: str = ""  #: The value in the file.
    now: str = ""  #: The value now.


@dataclass(frozen=True)
class GateResult:
    """The result of a call."""

    file: Path  #: The file.
    num_steps: int  #: Number of steps.
    is_written: bool = False  #: Whether this call has written the file, instead of comparing.
    difference: GateDifference | None = None  #: The first difference; None: there is none.

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON."""
        return {**asdict(self), "file": str(self.file), "is_same": self.difference is None}


def default_file(source: str) -> Path:
    """Return the path of a source's file: train.gate.json beside train.py."""
    path = Path(source)
    if path.suffix in (".py", ".yaml", ".yml"):
        return path.with_suffix(".gate.json")
    return Path(f"{source.replace('/', '-')}.gate.json")


def recorded_ranks(file: Path) -> int | None:
    """Return the ranks of the script that a file is of; None if there is no file, or it is of something else.

    Raises:
        ConfigError: It is not a file of this command.
    """
    return _read(file).get("ranks") if file.exists() else None


def gate(
    source: GateSource,
    file: Path,
    num_steps: int | None = None,
    *,
    is_update: bool = False,
    within: float | None = None,
    show: Progress = lambda activity, done, total: None,
) -> GateResult:
    """Train the first steps of a source, and compare them with its file, or write the file.

    Args:
        file: The file. It is written if it does not exist.
        num_steps: Number of steps; None: those of the file, or 20.
        is_update: Write the file again.
        within: Compare losses, gradient norms and metrics with this relative tolerance, instead of bits.
        show: Called with (activity, done, total).

    Raises:
        ConfigError: The source cannot be trained, gives other bits each time, or the file cannot be compared.
    """
    before = _read(file) if file.exists() else None
    if before is not None:
        if not is_update:
            _check_same_source(source, before, num_steps, file)
        # What is not given stays as it was.
        source = replace(source, given=source.given or before["given"])
        num_steps = num_steps or len(before["steps"])
    num_steps = num_steps or NUM_STEPS
    if before is None or is_update:
        check_target(file, lambda _: True)
        return _write(source, file, num_steps, show)
    show("training", 0, 1)
    trace = _trace(source, num_steps)
    now = _summary(source, trace)
    found = (
        _first_difference(before, now, trace) if within is None else _beyond(before, now, within)
    )
    if found is not None and before["environment"] != now["environment"]:
        raise _other_environment(before["environment"], now["environment"], file)
    return GateResult(file, len(before["steps"]), difference=found)


def _write(source: GateSource, file: Path, num_steps: int, show: Progress) -> GateResult:
    traces = []
    for done in range(2):
        show("training, twice", done, 2)
        traces.append(_trace(source, num_steps))
    one, other = (_summary(source, trace) for trace in traces)
    if (found := _first_difference(one, other, traces[1])) is not None:
        raise ConfigError(
            f"{source.name} trains to other bits each time, so no change of it can be seen",
            given="\n".join(lines(found)),
            fix=f"Find the cause first: samebits check {source.name}",
        )
    write_atomically(file, _text(one).encode())
    return GateResult(file, len(one["steps"]), is_written=True)


def _trace(source: GateSource, num_steps: int) -> Trace:
    """Train the first steps in a new process, and return their trace."""
    with scratch.scratch_folder(Path(tempfile.gettempdir())) as folder:
        if source.ranks is not None:
            command = [source.name, *source.given]
            world = launched(source.ranks)[0] if source.ranks else FIRST
            return observe(command, world, folder / "0", num_steps, "gate").trace
        # compile: hooks would change what it generates.
        settings = [*source.given, "compile=false"]
        find(source.name).load(settings).config.check_inputs()
        # The same for each call: otherwise the order of a set of texts would be another one.
        with in_interpreter(source.name, settings, folder / "answer", "0", num_steps) as wait:
            answer = wait()
        if (error := answer.get("error")) is not None:
            raise error
        return Trace.from_plain(answer)


# The summary of a trace, as it is in the file.


def _summary(source: GateSource, trace: Trace) -> Summary:
    first = next(_micro_batches(step)[0] for step in trace.steps.values())
    operations: dict[str, list[str]] = {}
    for each in first.operations:
        if each.call is not None:
            operations.setdefault(_title(first.calls[each.call]), []).append(each.name)
    return {
        "format": _FORMAT,
        "given": source.given,
        **({"ranks": source.ranks} if source.ranks else {}),
        "environment": trace.environment,
        "modules": [[_title(call), call.parent] for call in first.calls],
        "operations": operations,
        "start": _shorts(trace.start["initial weights"].values()),
        "steps": [_step(step) for step in trace.steps.values()],
        "evaluation": trace.evaluation,
    }


def _step(step: StepTrace) -> dict[str, Any]:
    micro_batches = _micro_batches(step)
    whole = {
        "order": [list(each.samples) for each in micro_batches],
        compare.SAMPLES: [list(each.samples.values()) for each in micro_batches],
        compare.LOSS: [list(each.loss.values()) for each in micro_batches],
        **{stage: list(getattr(step, stage).values()) for stage in _RESULT[1:]},
    }
    # Passes of a step may have different calls, such as those of two networks.
    same_calls = zip_longest(*(each.calls for each in micro_batches))
    forward = [
        [getattr(each, name, "") for each in calls]
        for calls in same_calls
        for name in ("inputs", "output")
    ]
    return {
        "values": {name: repr(value) for name, value in step.values.items()},
        **{name: _digest(value) for name, value in whole.items()},
        compare.FORWARD: _shorts(forward),
        "by parameter": _shorts(step.gradients.values()),
    }


def _traced(summary: Summary, number: int) -> StepTrace:
    """Return a step of a summary as a trace of one micro-batch, whose values have positions for names."""
    step = summary["steps"][number]
    forward = _parts(step[compare.FORWARD])
    calls = [
        Call(title, "", parent, inputs=forward[2 * at], output=forward[2 * at + 1])
        for at, (title, parent) in enumerate(summary["modules"][: len(forward) // 2])
    ]
    samples = {step["order"]: step[compare.SAMPLES]}
    return StepTrace(
        {"0": MicroTrace(samples, calls, loss={"": step[compare.LOSS]})},
        # Last where they are read backward: short digests may be equal by chance.
        gradients={"": step[compare.GRADIENTS], **_by_position(step["by parameter"])},
        buffers={"": step[compare.BUFFERS]},
        weights={"": step[compare.WEIGHTS]},
        optimizer={"": step[compare.OPTIMIZER]},
    )


def _micro_batches(step: StepTrace) -> list[MicroTrace]:
    return list(step.micro_batches.values())


def _title(call: Call) -> str:
    return f"{call.name or 'the model'} ({call.kind})"


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _shorts(values: Iterable[Any]) -> str:
    every = (hashlib.sha256(repr(value).encode()).digest() for value in values)
    return "".join(base64.b64encode(each).decode()[:_CHARS] for each in every)


def _parts(text: str) -> list[str]:
    return [text[at : at + _CHARS] for at in range(0, len(text), _CHARS)]


def _by_position(text: str) -> dict[str, str]:
    return {str(at): short for at, short in enumerate(_parts(text))}


def _text(summary: Summary) -> str:
    """Return the file's text: one line for each entry and step, so that a diff of two files can be read."""
    rows = []
    for name, value in summary.items():
        text = json.dumps(value)
        if name == "steps":
            text = "[\n" + ",\n".join(f"  {json.dumps(step)}" for step in value) + "\n]"
        rows.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _read(file: Path) -> Summary:
    """Read a file that `_write` has written.

    Raises:
        ConfigError: It is none.
    """
    try:
        found = parse_json(read_plain(file, _MAX_BYTES))
        if found["format"] == _FORMAT and found["steps"]:
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{file} is not a file of this version of samebits gate",
        fix="Give another --file, or remove it.",
    )


# The comparison of two summaries.


def _first_difference(before: Summary, now: Summary, trace: Trace) -> GateDifference | None:
    """Return the first difference. `trace`: that of `now`, which has the names of its parameters."""
    starts = compare.unequal(_by_position(before["start"]), _by_position(now["start"]))
    if starts is not None:
        name = _named(trace.start["initial weights"], starts[1])
        return GateDifference(None, "initial weights", _module_of(now, name), what=name)
    for number, (one, other) in enumerate(zip(before["steps"], now["steps"], strict=False)):
        if any(one[stage] != other[stage] for stage in (*_RESULT, "values")):
            return _in_step(number, before, now, trace)
    return _at_end(before, now, lambda one, other: one == other)


def _at_end(
    before: Summary, now: Summary, is_same: Callable[[str, str], bool]
) -> GateDifference | None:
    """Return what differs after steps that are the same: their number, or a metric of the evaluation."""
    if len(before["steps"]) != len(now["steps"]):
        counts = [str(len(each["steps"])) for each in (before, now)]
        return GateDifference(None, "number of steps", "", "", "steps", *counts)
    one, other = before["evaluation"], now["evaluation"]
    for name in {**one, **other}:
        if name not in one or name not in other or not is_same(one[name], other[name]):
            values = one.get(name, "none"), other.get(name, "none")
            return GateDifference(None, "evaluation", "", "", name, *values)
    return None


def _in_step(number: int, before: Summary, now: Summary, trace: Trace) -> GateDifference:
    one, other = before["steps"][number], now["steps"][number]
    found = compare.difference_of_step(_traced(before, number), _traced(now, number))
    stage = "" if found is None else found.stage
    operation = ""
    if stage == compare.SAMPLES:
        place = "samples" if one["order"] != other["order"] else "sample values", _DATA
    elif found is not None and stage == compare.FORWARD:
        titles = [
            each["modules"][at or 0][0] for each, at in zip((before, now), found.calls, strict=True)
        ]
        place = stage, titles[1]
        operation = _operations(before, now, titles)
    elif stage == compare.LOSS:
        place = stage, stage
    elif stage == compare.GRADIENTS and one["values"]["norm"] == other["values"]["norm"]:
        place = "clipping of the gradient", _OPTIMIZER
    elif found is not None and stage == compare.GRADIENTS:
        name = _named(list(trace.steps.values())[number].gradients, found.name)
        place = "backward", _module_of(now, name)
    elif stage == compare.BUFFERS:
        place = stage, "(the model)"
    else:
        is_rate = one["values"]["lr"] != other["values"]["lr"]
        place = "learning rate" if is_rate else "update", _OPTIMIZER
    return GateDifference(number, *place, operation, *_values(one["values"], other["values"]))


def _values(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the first value of a step that differs, by name, and both values."""
    for name, title in _VALUES.items():
        if one[name] != other[name]:
            return title, one[name], other[name]
    return "", "", ""


def _operations(before: Summary, now: Summary, titles: Sequence[str]) -> str:
    """Return the operation of a module that has changed; if the operations are the same, all of them."""
    old, new = (
        summary["operations"].get(title, [])
        for summary, title in zip((before, now), titles, strict=True)
    )
    for one, other in zip([*old, "none"], [*new, "none"], strict=False):
        if one != other:
            return f"{one} before, {other} now"
    several = list(dict.fromkeys(new))
    more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
    return ", ".join(several[:_SHOWN]) + more


def _named(digests: Iterable[str], position: str) -> str:
    """Return the name of a tensor by its position; the last one where no short digest differs."""
    names = list(digests)
    return names[int(position or -1)] if names else ""


def _module_of(summary: Summary, tensor: str) -> str:
    """Return the title of the module of a tensor."""
    name = tensor.rpartition(".")[0] or "the model"
    titles = (title for title, _ in summary["modules"])
    return next((title for title in titles if title.rpartition(" (")[0] == name), name)


def _beyond(before: Summary, now: Summary, within: float) -> GateDifference | None:
    """Return the first loss, gradient norm or metric that differs by more than a tolerance."""

    def is_close(one: str, other: str) -> bool:
        return one == other or math.isclose(float(one), float(other), rel_tol=within)

    for number, (one, other) in enumerate(zip(before["steps"], now["steps"], strict=False)):
        for name in ("loss", "norm"):
            values = one["values"][name], other["values"][name]
            if not is_close(*values):
                return GateDifference(number, _VALUES[name], "", "", _VALUES[name], *values)
    return _at_end(before, now, is_close)


def _check_same_source(
    source: GateSource, before: Summary, num_steps: int | None, file: Path
) -> None:
    counted = len(before["steps"])
    for name, given, was in (
        ("steps", num_steps, counted),
        ("settings", source.given or None, before["given"]),
        ("ranks", source.ranks or None, before.get("ranks")),
    ):
        if given not in (None, was):
            raise ConfigError(
                f"{file} was written with other {name}",
                given=f"now {given}, in the file {was or 'none'}",
                fix="Leave them out, which uses those of the file; or write it again: add --update.",
            )


def _other_environment(
    before: Mapping[str, str], now: Mapping[str, str], file: Path
) -> ConfigError:
    changed = [
        f"{each.name}: {each.a} in the file, {each.b} here" for each in compare.changes(before, now)
    ]
    return ConfigError(
        f"{file} cannot be compared here: other versions or another processor compute other bits",
        given="\n".join(changed),
        fix="Run it where the file was written, compare with --within 1e-4, or write the file for kernels=portable, "
        "whose bits are equal on all processors.",
    )


def lines(found: GateDifference) -> list[str]:
    """Return the lines that report a difference to the user."""
    step = "" if found.step is None else f"step {found.step:,}"
    module = f"module {found.module}" if found.module else ""
    texts = [f"differs    {', '.join(filter(None, (step, found.phase, module)))}"]
    if found.operation:
        texts.append(f"           operation {found.operation}")
    if found.before:
        texts.append(f"           {found.what}: {found.before} before, {found.now} now")
    return texts
