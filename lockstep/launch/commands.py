"""Command line and environment with which this package starts itself. Nothing here imports torch."""

from __future__ import annotations

import os
import sys

# -P: without it, -m puts the current folder first on sys.path, where another user's torch.py may be.
LOCKSTEP = (sys.executable, "-P", "-m", "lockstep")


def import_path() -> dict[str, str]:
    """Return a PYTHONPATH that lets a recipe import modules beside the script that called `train`."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else ""
    if not folder or folder not in sys.path:
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{before}{os.pathsep}{folder}" if before else folder}
