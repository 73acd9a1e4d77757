"""What OpenCV transforms in portable arithmetic."""

import subprocess
import sys

import pytest

from samebits.data.opencv import check_portable
from samebits.errors import ConfigError

SCRIPT = "from samebits.data.opencv import check_portable as check; check('auto'); check('portable')"


@pytest.mark.full
def test_a_processor_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCV_CPU_DISABLE", "AVX2")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "transforms images with OpenCV, whose bits differ on this processor" in done.stderr


def test_other_arithmetic_has_no_such_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.data.opencv.cv2.checkHardwareSupport", lambda feature: False)
    check_portable("auto")
    with pytest.raises(ConfigError, match="kernels=portable"):
        check_portable("portable")
