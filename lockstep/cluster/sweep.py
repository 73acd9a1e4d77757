"""Imported by the fork server, which outlives the launcher and its workers by a moment, and then sweeps up.

The launcher removes its temporary files itself; this is for a launcher that was killed. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import os
import shutil

VARIABLE = "LOCKSTEP_TEMP"


def _sweep(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # nobody is left to tell
    os._exit(0)  # nothing is left to do, and to take torch apart would keep the process for seconds on a busy machine


# What is forked from the fork server leaves without this.
if os.environ.get(VARIABLE):
    atexit.register(_sweep, os.environ.pop(VARIABLE))
