"""How this package starts itself in another process. Nothing here imports torch."""

from __future__ import annotations

import sys

# -P: without it, -m puts the current folder first on sys.path, where a torch.py of a stranger may lie.
LOCKSTEP = (sys.executable, "-P", "-m", "lockstep")
