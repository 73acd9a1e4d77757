"""The memory that decoding takes is what the limits on pixels are computed with."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samebits.data import images

FULL = pytest.mark.full
_MEASURE = """
import sys
from pathlib import Path
from samebits.data.images import EncodedImage

def kilobytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = kilobytes()
EncodedImage(sys.argv[1]).pixels()
print((kilobytes() - before) << 10)
"""
_SIDE_PX = 4000


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize(
    ("form", "mode", "options", "allowed"),
    [
        ("PNG", "RGBA", {}, images._OTHERS_BYTES_PER_PIXEL),
        pytest.param("WEBP", "RGBA", {}, images._BYTES_PER_PIXEL["WEBP"], marks=FULL),
        pytest.param("TIFF", "F", {"compression": "tiff_deflate"}, images._BYTES_PER_PIXEL["TIFF"], marks=FULL),
        pytest.param("JPEG", "CMYK", {"progressive": True}, images._BYTES_PER_PIXEL["progressive"], marks=FULL),
        ("JPEG", "RGB", {}, images.BASELINE_BYTES_PER_PIXEL),
    ],
)
def test_decoding_takes_no_more_memory_than_is_computed(
    tmp_path: Path, form: str, mode: str, options: dict[str, Any], allowed: int
) -> None:
    path = tmp_path / "a"
    Image.new(mode, (_SIDE_PX, _SIDE_PX)).save(path, form, **options)
    answer = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, check=True, timeout=180
    )
    room = 56 << 20  # for the strips of a conversion, what is loaded with the first image, and huge pages
    assert int(answer.stdout) - path.stat().st_size - room <= allowed * _SIDE_PX**2
