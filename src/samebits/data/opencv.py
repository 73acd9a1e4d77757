"""OpenCV without threads. All modules import cv2 from here; a test in tests/house checks it.

OpenCV's thread pool does not survive a fork: a forked DataLoader worker that uses it deadlocks or crashes. In a worker
the pool would also compete with the other workers for the cores.
"""

import cv2 as _cv2

_cv2.setNumThreads(0)
cv2 = _cv2
