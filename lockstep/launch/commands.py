"""Command line and environment with which this package starts itself. Nothing here imports torch."""

from __future__ import annotations

import os
import sys

# Set by `lockstep.train` for the command that it starts: its own process id, and where to write an error as JSON.
CALLER, ERROR_FILE = "LOCKSTEP_CALLER", "LOCKSTEP_ERROR_FILE"
# -P: without it, -m puts the current folder first on sys.path, where a torch.py of a stranger may lie.
LOCKSTEP = (sys.executable, "-P", "-m", "lockstep")


def import_path() -> dict[str, str]:
    """Return a PYTHONPATH that lets a recipe import modules beside the script that called `train`."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else ""
    if not folder or folder not in sys.path:
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{before}{os.pathsep}{folder}" if before else folder}
