"""Runs a script in this process as `samebits launch` does in each of its workers: SIZES[@TURNS] SCRIPT ARGUMENTS..."""

import os
import sys

from samebits.own_loop.ending import BATCH_SIZES
from samebits.own_loop.patched import turns, worker

os.environ[BATCH_SIZES], _, folder = sys.argv[1].partition("@")
if folder:
    os.environ[turns.VARIABLE] = folder
worker.main(sys.argv[2:])
