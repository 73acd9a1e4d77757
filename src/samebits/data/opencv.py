"""OpenCV without threads. All modules import cv2 from here; a test in tests/house checks it.

OpenCV's thread pool does not survive a fork: a forked DataLoader worker that uses it deadlocks or crashes. In a worker
the pool would also compete with the other workers for the cores.
"""

import cv2 as _cv2

from samebits.errors import ConfigError

_cv2.setNumThreads(0)
cv2 = _cv2
_AVX2 = 11  # the number of CV_CPU_AVX2, which OpenCV's Python module does not name


def check_portable(kernels: str) -> None:
    """Check that OpenCV transforms images here with the bits of other processors, if `kernels` is portable.

    Raises:
        ConfigError: It does not: `warpAffine`, `GaussianBlur` and `resize` round otherwise without AVX2.
    """
    if kernels == "portable" and not cv2.checkHardwareSupport(_AVX2):
        raise ConfigError(
            "kernels=portable: this recipe transforms images with OpenCV, whose bits differ on this processor",
            given="a processor without AVX2",
            allowed="x86-64 processors with AVX2",
            fix="Train on one of these, or set kernels=auto.",
        )
