"""From differences to causes: which of the things that a recipe reads or keeps explains what the trials show."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.replay.compare import (
    EVALUATION,
    FORWARD,
    GRADIENTS,
    LOSS,
    SAMPLES,
    START,
)
from samebits.replay.sources import (
    CLOCK,
    ENTROPY,
    HASH,
    ITERATOR,
    MERGE,
    PROCESS,
    RANK,
    WORKER,
    Suspect,
)
from samebits.replay.state import CACHE, GENERATOR, IMPORT, STATE

SET_ORDER = "set order"
REPLACED = "replaced"
WRITTEN = "written"
UNSAVED = "unsaved"
ERROR = "error"
UNKNOWN = "unknown"
# What a recipe does while the values of a stage are made, the most likely first.
_PHASES = {
    START: ("init_weights", "build", "import"),
    SAMPLES: (SAMPLES, "open", "build", "import"),
    FORWARD: (FORWARD, "build", "import"),
    LOSS: (LOSS, FORWARD, "build", "import"),
    GRADIENTS: (LOSS, FORWARD, "build", "import"),
    EVALUATION: (EVALUATION, "open", "build", "import"),
    # The ranks differ in initial weights, samples or a micro-batch.
    ERROR: (
        "init_weights",
        SAMPLES,
        FORWARD,
        LOSS,
        "open",
        "build",
        "import",
    ),
}
# Phases that run once in a process, so that they cannot differ there.
_ONCE = ("import", "build")
# Kinds that explain a difference, the most telling first, by where it shows: when the same process computes the same
# again, or only in another process, interpreter, worker or world.
_KINDS = {
    "again": (
        GENERATOR, ENTROPY, STATE, CACHE, ITERATOR, CLOCK, PROCESS,
    ),
    "hash": (HASH, SET_ORDER, ENTROPY, IMPORT, PROCESS),
    "worker": (WORKER, PROCESS, CACHE, STATE, GENERATOR),
    "resume": (UNSAVED, CACHE, STATE, GENERATOR, ENTROPY, CLOCK, PROCESS),
    "world": (
        RANK, MERGE, PROCESS, CACHE, UNSAVED, STATE, GENERATOR, ENTROPY, IMPORT, WORKER,
        CLOCK, HASH,
    ),
    "process": (
        ENTROPY, IMPORT, PROCESS, RANK, CLOCK, CACHE, STATE, GENERATOR, WORKER,
        HASH, SET_ORDER, UNSAVED,
    ),
}  # fmt: skip


def explain(notes: Mapping[str, Any], stage: str, where: str) -> tuple[list[Suspect], str, str]:
    """Return the possible causes of a difference, the best first, and a cause and a fix in words.

    Args:
        notes: What the probes have found; see `probe`.
        stage: The stage of the first difference, a constant of `compare`, or ERROR.
        where: Which trials show it: "hash", "worker", "resume", "world" or "process".
    """
    phases = _PHASES.get(stage, _PHASES[FORWARD])
    suspects = [Suspect(**each) for each in notes["suspects"]]
    if any(each in (stage, *phases) for each, _ in notes["again"]):
        where = "again"
        phases = tuple(phase for phase in phases if phase not in _ONCE)
    kinds = (WRITTEN, REPLACED, *_KINDS[where])

    def rank(suspect: Suspect) -> tuple[object, ...]:
        # The state of the loss function before that of the model, or after it.
        is_elsewhere = suspect.what.startswith("loss") != (stage == LOSS)
        place = kinds.index(suspect.kind), phases.index(suspect.phase)
        return *place, is_elsewhere, not suspect.file

    found = [each for each in suspects if each.kind in kinds and each.phase in phases]
    found.sort(key=rank)
    best = found[0] if found else Suspect(UNKNOWN, _UNKNOWN[where])
    unit = "sample" if stage in (SAMPLES, EVALUATION) else "micro-batch"
    text, fix = _TEXTS[best.kind]
    words = {"what": best.what, "unit": unit, "seeded": _SEEDED[unit]}
    return found, text.format(**words), fix.format(**words)


def loops_over_sets(file: str) -> list[int]:
    """Return the lines of a source file that iterate over a set, other than through sorted(), len() and the like."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return [number for number, line in enumerate(lines, start=1) if _LOOP.search(line)]


# A set is a call of set or frozenset, or braces without a colon or ** (a dict).
_LOOP = re.compile(
    r"""(\bfor\ (?:(?!\ in\ ).)+\ in\ | \b(list|tuple|enumerate|iter|zip)\()
    (set\(|frozenset\(|\{(?!\*\*)[^:}]+(\}|\ for\ ))""",
    re.VERBOSE,
)


_SEEDED = {
    "sample": "Draw from torch's, numpy's or Python's global generator, which is seeded for each sample, or from the "
    "sample's key: samebits.uniform(keys, column).",
    "micro-batch": "Draw from torch's, numpy's or Python's global generator, which is seeded for each micro-batch.",
}
_TEXTS = {
    UNKNOWN: (
        "{what}",
        "Make it a function of the {unit} and of its seeded random numbers alone.",
    ),
    GENERATOR: (
        "it draws from a random generator of its own, {what}, which continues from earlier calls",
        "{seeded}",
    ),
    ENTROPY: ("it draws from an unseeded source: {what}", "Remove it. {seeded}"),
    CLOCK: ("it reads the clock: {what}", "Compute the {unit} without the time."),
    PROCESS: (
        "it reads what identifies a process, host or object: {what}",
        "Compute the {unit} without it.",
    ),
    RANK: (
        "it reads the rank or the number of processes: {what}",
        "Compute the {unit} without it.",
    ),
    WORKER: (
        "it depends on the DataLoader worker: {what}",
        "Compute the {unit} without the worker's id and seed. {seeded}",
    ),
    HASH: (
        "it calls {what}, whose result for text depends on PYTHONHASHSEED",
        "Use zlib.crc32(text.encode()) or hashlib.",
    ),
    SET_ORDER: (
        "the order of {what} of texts depends on PYTHONHASHSEED",
        "Sort it: sorted(set(...)).",
    ),
    ITERATOR: (
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
    MERGE: (
        "{what}() does not give what add() over all samples gives",
        "Count integers in add, and add the counts up in merge.",
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
