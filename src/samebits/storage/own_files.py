"""Recognize files that `samebits export` has written, the only existing files that it may overwrite."""

import json
import zipfile
from pathlib import Path

_MOST_BYTES = 1 << 20
FIELD = "samebits"
# The start of an ONNX file in protobuf: field 1 as a number. The metadata key: field 1 as a string of 8 bytes.
_ONNX_HEAD, _ONNX_KEY = b"\x08", b"\x0a\x08" + FIELD.encode()


def is_export(path: Path) -> bool:
    """Return whether `samebits export` wrote a file, according to the file's metadata."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            size = path.stat().st_size
            if zipfile.is_zipfile(file):  # torch-export
                return any(name.endswith(f"/{FIELD}.json") for name in zipfile.ZipFile(file).namelist())
            # `is_zipfile` has moved the position to the end.
            file.seek(0)
            head = file.read(8)
            length = int.from_bytes(head, "little")
            # Read as the length of a safetensors header, the first bytes of an ONNX file exceed the file's size by far.
            if head[:1] == _ONNX_HEAD and length > size:
                file.seek(max(0, size - _MOST_BYTES))  # ONNX stores the metadata behind the graph
                return _ONNX_KEY in file.read()
            header = json.loads(file.read(min(length, _MOST_BYTES)))  # safetensors
            return FIELD in header.get("__metadata__", {})
    # RecursionError: Python's JSON parser raises it for deep nesting. Any such file is another program's.
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, zipfile.BadZipFile):
        return False
