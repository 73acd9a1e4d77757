"""What recipes share to list the samples of a dataset: lists, unreadable samples, rows for the header of a run."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from samebits.cores import num_cores
from samebits.data.names import left_out_row, skipped_row
from samebits.errors import DataError, cannot_read
from samebits.plain_file import read_plain
from samebits.recipes.vision_config import VisionData


def read_list(path: Path, max_bytes: int, fix: str, allowed: str | None = None) -> bytes:
    """Read a file that lists samples or describes them. Raises DataError if it can't be read."""
    try:
        return read_plain(path, max_bytes)
    except OSError as error:
        raise cannot_read(DataError, path, error, fix, allowed=allowed) from error


def find_faults(names: Sequence[str], read: Callable[[str], object]) -> dict[str, str]:
    """Read all samples, and return the problem of each that cannot be read."""

    def fault(name: str) -> str:
        try:
            read(name)
        except DataError as error:
            return error.what
        return ""

    # Threads instead of processes, since decoding releases the GIL.
    with ThreadPoolExecutor(num_cores()) as pool:
        faults = dict(zip(names, pool.map(fault, names), strict=True))
    return {name: text for name, text in faults.items() if text}


def nearest_fix(name: str, names: Iterable[str], otherwise: str, fix: str = "Use {}.") -> str:
    """Return a fix with the most similar of the known names, or another fix if none is similar.

    Args:
        otherwise: The fix if none is similar.
    """
    near = difflib.get_close_matches(name, list(names), n=1)
    return fix.format(near[0]) if near else otherwise


def some(names: Sequence[str], count: int) -> str:
    """Return the first names in one line, with an ellipsis if there are more than `count`."""
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


def whole_path(path: Path) -> str:
    """Return an absolute path, as a run stores it."""
    return str(path.expanduser().absolute())


def is_another_set(data: VisionData, dataset_info: Mapping[str, Any]) -> bool:
    """Return whether data.eval names other images than those with which the run was started: they are listed now."""
    return data.eval is not None and whole_path(data.eval) != dataset_info["held_out_from"]


def listing_rows(dataset_info: Mapping[str, Any]) -> dict[str, str]:
    """Return rows of a listing for the header of a run: samples left out, or in several places; "": not shown."""
    return {
        "skipped": skipped_row(list(dataset_info.get("skipped", ()))),
        "left out": left_out_row(dataset_info.get("left_out", {})),
        **dataset_info.get("warnings", {}),
    }
