"""Read `metrics.jsonl`, to which a run may be appending, within limits: the run folder may be a stranger's."""

import io
from pathlib import Path
from typing import Any

from samebits.config.plain_file import parse_json
from samebits.report.records import FILE_NAME
from samebits.run_views.files import count, number, read_part

_MAX_BYTES = 256 * 1024 * 1024  # of a file
_MAX_RECORDS = 500_000  # of a file: about 500 MB of memory and 10 s
_MAX_LINE_BYTES = 256 * 1024
_MAX_LINE_MEMORY_BYTES = 4 * 1024 * 1024


def read_curve_records(run: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of a run that have kind, step and epoch, and whether the file has more than are read."""
    content = read_part(run / FILE_NAME, _MAX_BYTES + 1, is_end=False)
    records: list[dict[str, Any]] = []
    for index, line in enumerate(io.BytesIO(content)):
        if index == _MAX_RECORDS:
            return records, True
        # A line counts once it ends with a line feed: the last one may be half-written.
        if not line.endswith(b"\n") or len(line) > _MAX_LINE_BYTES:
            continue
        try:
            record = parse_json(line, _MAX_LINE_MEMORY_BYTES)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            epoch = number(record.get("epoch"))
            if epoch is not None and epoch >= 0:
                records.append({**record, "step": count(record.get("step")), "epoch": epoch})
    return records, len(content) > _MAX_BYTES
