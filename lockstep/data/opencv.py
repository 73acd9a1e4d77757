"""OpenCV with its threads off. The package imports cv2 from here and from nowhere else; a test holds that.

OpenCV's pool of threads does not survive a fork: a reading process that finds one is lost to a deadlock or a
segmentation fault. In a reading process the pool would also compete with the other readers for the cores.
"""

from __future__ import annotations

import cv2 as _cv2

_cv2.setNumThreads(0)
cv2 = _cv2
