"""Imported by the fork server, which outlives the launcher and its workers by a moment, and then sweeps up.

The launcher removes its temporary files itself; this is for a launcher that was killed. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import os
import shutil

VARIABLE = "LOCKSTEP_TEMP"

# What is forked from the fork server leaves without this.
if os.environ.get(VARIABLE):
    atexit.register(shutil.rmtree, os.environ.pop(VARIABLE), ignore_errors=True)
