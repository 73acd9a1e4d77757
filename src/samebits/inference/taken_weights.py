"""Which weights of a run folder `eval`, `predict` and `export` take, in one line for the user."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samebits.errors import CheckpointError, printable
from samebits.provenance.run_files import RunFiles
from samebits.report.format import metric_name, metric_value

_MAX_NAME = 40


def describe_weights(run: Path, which: str) -> str:
    """Name the weights that a command takes, and the best ones if they are others.

    The final weights are the default, because theirs is the SHA-256 that a run prints and that `samebits verify`
    confirms. The best ones are chosen by the validation set, so their value there is too high by some chance.

    Returns:
        The line; empty for a file, and if the folder does not have the values. A second one if there is no statement.
    """
    if not run.is_dir():
        return ""
    files = RunFiles(run)
    best = _known(lambda: files.best)
    if which == "best":
        return _join(f"best checkpoint{_at(best.get('step'))}", _value(best, best.get("value")))
    if which != "last":
        return f"checkpoint {printable(which)}"
    result = _known(lambda: files.result)
    if not os.path.lexists(run / "weights.safetensors"):
        return "newest checkpoint, because the run is not complete"
    metrics = result.get("metrics")
    last = _value(best, metrics.get(best.get("metric")) if isinstance(metrics, dict) else None)
    if not last:
        return ""
    is_best = best.get("step") == result.get("steps")
    line = _join(f"final weights{_at(result.get('steps'))}{', the best of the run' * is_best}", last)
    better = _value(best, best.get("value")).rpartition(" ")[2]
    line = line if is_best or not better else _join(f"{line}; --checkpoint best{_at(best.get('step'))}", better)
    missing = "provenance.json is missing, so nothing states which weights the run had"
    return line if files.has_statement else f"{line}\n{missing}"


def _known(read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return read()
    except CheckpointError:
        return {}  # what opens the weights reports it


def _at(step: object) -> str:
    return f" (step {step:,})" if isinstance(step, int) and 0 <= step < 1 << 63 else ""


def _value(best: Mapping[str, Any], value: object) -> str:
    """Format a value of the run's metric; empty if the folder, which may be a stranger's, has none."""
    name = best.get("metric")
    if not (isinstance(name, str) and len(name) <= _MAX_NAME and isinstance(value, int | float) and abs(value) < 1e300):
        return ""
    return f"{printable(metric_name(name))} {metric_value(name, value)}"


def _join(line: str, value: str) -> str:
    return f"{line}: {value}" if value else line
