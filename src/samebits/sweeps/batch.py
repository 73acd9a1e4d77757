"""A sweep as arrays of Slurm jobs, one array for the parts that wait for the same other parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samebits.launch.commands import SAMEBITS
from samebits.launch.slurm import BatchJob
from samebits.sweeps.prefixes import Part
from samebits.sweeps.runner import arguments_of
from samebits.sweeps.state_file import Sweep


def arrays_of(parts: Sequence[Part]) -> list[tuple[list[Part], int | None]]:
    """Return the arrays in the order of their submission, each with the number of the array that it waits for.

    Args:
        parts: All parts, each one after its donor.
    """
    donors = {part.donor for part in parts}
    depths: dict[str, int] = {}
    arrays: dict[tuple[int, bool], list[Part]] = {}
    for part in parts:
        depths[part.name] = 0 if part.donor is None else depths[part.donor] + 1
        arrays.setdefault((depths[part.name], part.name not in donors), []).append(part)
    places = sorted(arrays)
    return [(arrays[depth, last], places.index((depth - 1, False)) if depth else None) for depth, last in places]


def array_job(job: BatchJob, sweep: Sweep, parts: Sequence[Part], after: str | None) -> BatchJob:
    """Return the array of some parts.

    Args:
        job: Resources and options.
        sweep: The sweep.
        parts: The parts.
        after: Id of the array that it waits for; None: it starts at once.
    """
    waits = [] if after is None else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    return replace(
        job,
        command=[*SAMEBITS, "train", *sweep.arguments],
        variants=[arguments_of(sweep, part) for part in parts],
        folders=[part.name for part in parts],
        before=[*SAMEBITS, "sweep-part", str(job.run_dir)],
        options=[*job.options, *waits],
    )
