"""Runs a script in this process as `samebits launch` does in each of its workers: BATCH_SIZES SCRIPT ARGUMENTS..."""

import os
import sys

from samebits.own_loop.ending import BATCH_SIZES
from samebits.own_loop.patched import worker

os.environ[BATCH_SIZES] = sys.argv[1]
worker.main(sys.argv[2:])
