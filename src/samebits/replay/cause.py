"""From differences to causes: which of the things that a recipe reads or keeps explains what the trials show."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from samebits.replay import compare, context
from samebits.replay.context import REPLACED, UNSAVED, WRITTEN
from samebits.replay.state import CACHE, GENERATOR, STATE

SET_ORDER = "set order"
IMPORT = "import"
UNKNOWN = "unknown"
# Phases in which the values of a stage are made, the most likely first.
_PHASES = {
    compare.START: ("init_weights", "build", "import"),
    compare.SAMPLES: ("training sample", "open", "build", "import"),
    compare.FORWARD: ("forward", "build", "import"),
    compare.LOSS: ("loss", "forward", "build", "import"),
    compare.GRADIENTS: ("backward", "forward", "loss", "build", "import"),
    compare.EVALUATION: ("validation sample", "metric", "evaluation", "open", "build", "import"),
}
# Kinds that differ when the same process computes the same again, the most telling first.
_SEEN_AGAIN = (
    WRITTEN, REPLACED, GENERATOR, context.ENTROPY, STATE, CACHE, context.ITERATOR, context.CLOCK, context.PROCESS,
)  # fmt: skip
# Kinds that differ only in another process, interpreter, worker or world.
_ELSEWHERE = {
    "hash": (context.HASH, SET_ORDER, context.ENTROPY, IMPORT, context.PROCESS),
    "worker": (context.WORKER, context.PROCESS, CACHE, STATE, GENERATOR),
    "resume": (UNSAVED, CACHE, STATE, GENERATOR, context.ENTROPY, context.CLOCK, context.PROCESS),
    "world": (
        context.RANK, context.PROCESS, CACHE, UNSAVED, STATE, GENERATOR, context.ENTROPY, IMPORT, context.WORKER,
        context.CLOCK, context.HASH,
    ),
    "process": (
        context.ENTROPY, IMPORT, context.PROCESS, context.RANK, context.CLOCK, CACHE, STATE, GENERATOR, context.WORKER,
        context.HASH, SET_ORDER,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """A possible cause.

    Attributes:
        kind: A constant of `sources`, `state`, `context` or this module.
        what: The call, or the path of the state.
        file: The user's source file; empty if it is not known.
        line: The line in it.
        phase: What the recipe was doing.
        acts: Whether the result was seen to differ by it alone; None for what was not tried.
    """

    kind: str
    what: str
    file: str = ""
    line: int = 0
    phase: str = ""
    acts: bool | None = None


def candidates(notes: dict[str, Any], stage: str, where: str) -> list[Cause]:
    """Return the possible causes of a difference, the best first.

    Args:
        stage: The stage of the first difference, a constant of `compare`.
        where: "again" if the same process shows the difference when it computes the same again; otherwise which
            trials show it: "hash", "worker", "resume", "world" or "process".
    """
    later = (compare.BUFFERS, compare.WEIGHTS, compare.OPTIMIZER, compare.RANKS)
    phases = _PHASES[compare.FORWARD if stage in later else stage]
    kinds = _SEEN_AGAIN if where == "again" else _ELSEWHERE[where]
    found = [cause for cause in _all(notes) if cause.phase in phases and cause.kind in kinds]
    if where == "again":  # what happens once, before the first sample, cannot differ in one process
        found = [cause for cause in found if cause.phase not in ("import", "build", "open")]
    if any(cause.acts for cause in found):
        found = [cause for cause in found if cause.acts]
    elif where == "again" and any(
        notes["checks"].get(f"other than state {phase}") for phase in phases
    ):
        kinds = tuple(sorted(kinds, key=lambda kind: kind in (GENERATOR, STATE, CACHE)))
    if stage == compare.LOSS:  # the state of the loss function before that of the model
        found.sort(key=lambda cause: not cause.what.startswith("loss"))
    return sorted(
        found,
        key=lambda cause: (kinds.index(cause.kind), phases.index(cause.phase), not cause.file),
    )


def _all(notes: dict[str, Any]) -> Iterable[Cause]:
    for each in notes["sources"]:
        yield Cause(each["kind"], each["what"], each["file"], each["line"], each["phase"])
    for each in notes["state"]:
        kind = IMPORT if each["phase"] == "import" else each["kind"]
        name = each["path"]
        what = f"{name} ({each['what']})" if kind == GENERATOR else name
        yield Cause(kind, what, each["file"], each["line"], each["phase"], each.get("acts"))
    sets = [(file, line) for file in notes.get("files", []) for line in loops_over_sets(file)]
    for phase in ("open", "build", "training sample", "forward"):
        for file, line in sets:
            yield Cause(SET_ORDER, "a set", file, line, phase)


@cache
def loops_over_sets(file: str) -> tuple[int, ...]:
    """Return the lines of a source file that iterate over a set, other than through sorted(), len() and the like."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    lines = []
    for node in ast.walk(tree):
        loops: Sequence[ast.expr] = ()
        if isinstance(node, ast.For):
            loops = [node.iter]
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp):
            loops = [each.iter for each in node.generators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "list",
            "tuple",
            "enumerate",
            "iter",
            "zip",
        ):
            loops = node.args
        lines += [loop.lineno for loop in loops if _is_set(loop)]
    return tuple(sorted(set(lines)))


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "enumerate" and node.args:
        return _is_set(node.args[0])
    is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "frozenset")
    return is_call or isinstance(node, ast.Set | ast.SetComp)


def explain(cause: Cause | None, stage: str, where: str) -> tuple[str, str]:
    """Return a cause and a fix in words.

    Args:
        cause, stage: The cause, None if none was found, and the stage of the difference.
        where: As for `candidates`.
    """
    unit = "sample" if stage in (compare.SAMPLES, compare.EVALUATION) else "micro-batch"
    if cause is None:
        return _UNKNOWN[
            where
        ], f"Make it a function of the {unit} and of its seeded random numbers alone."
    text, fix = _TEXTS[cause.kind]
    return text.format(what=cause.what, unit=unit), fix.format(unit=unit, seeded=_SEEDED[unit])


_SEEDED = {
    "sample": "Draw from torch's, numpy's or Python's global generator, which is seeded for each sample, or from the "
    "sample's key: samebits.uniform(keys, column).",
    "micro-batch": "Draw from torch's, numpy's or Python's global generator, which is seeded for each micro-batch.",
}
_TEXTS = {
    GENERATOR: (
        "it draws from a random generator of its own, {what}, which continues from earlier calls",
        "{seeded}",
    ),
    context.ENTROPY: ("it draws from an unseeded source: {what}", "Remove it. {seeded}"),
    context.CLOCK: ("it reads the clock: {what}", "Compute the {unit} without the time."),
    context.PROCESS: (
        "it reads what identifies a process, host or object: {what}",
        "Compute the {unit} without it.",
    ),
    context.RANK: (
        "it reads the rank or the number of processes: {what}",
        "Compute the {unit} without it.",
    ),
    context.WORKER: (
        "it depends on the DataLoader worker: {what}",
        "Compute the {unit} without the worker's id and seed. {seeded}",
    ),
    context.HASH: (
        "it calls {what}, whose result for text depends on PYTHONHASHSEED",
        "Use zlib.crc32(text.encode()) or hashlib.",
    ),
    SET_ORDER: (
        "the order of {what} of texts depends on PYTHONHASHSEED",
        "Sort it: sorted(set(...)).",
    ),
    context.ITERATOR: (
        "it takes the next value of an iterator ({what}), which continues from earlier calls",
        "Compute the value from the sample's index or key.",
    ),
    STATE: (
        "{what} changes at each call, so a result depends on the calls before",
        "Compute it from the {unit} alone; in a module, keep state in a buffer that is written in place "
        "and listed in averaged_buffers.",
    ),
    CACHE: (
        "{what} returns values of earlier calls",
        "Cache only what does not depend on random numbers, or cache before the augmentation.",
    ),
    IMPORT: (
        "it draws from {what} while the recipe is imported, before anything is seeded",
        "Draw it in build(), in train_data or in dataset_info(), where the generators are seeded.",
    ),
    REPLACED: (
        "forward replaces buffer {what} instead of writing into it",
        "Change it in place: self.NAME.copy_(...) or self.NAME.add_(...).",
    ),
    WRITTEN: (
        "forward writes into parameter {what}",
        "Keep changing state in a buffer that is written in place and listed in averaged_buffers.",
    ),
    UNSAVED: (
        "buffer {what} changes in training and is not saved (persistent=False), so a resumed run starts without it",
        "Register it without persistent=False.",
    ),
}
_UNKNOWN = {
    "again": "it differs each time it is computed; nothing that check can trace explains it",
    "hash": "it depends on PYTHONHASHSEED: the order of a set, or hash() of a text",
    "worker": "it depends on the DataLoader worker process that reads it",
    "resume": "it depends on state that a checkpoint does not contain",
    "world": "it depends on which process computes it, or after what",
    "process": "it differs in each new process",
}
