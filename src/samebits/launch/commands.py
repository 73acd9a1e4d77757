"""Command line and environment with which this package starts itself. Nothing here imports torch."""

import os
import sys

# Set by `samebits.train` for the command that it starts: its own process id, and where to write an error as JSON.
CALLER, ERROR_FILE = "SAMEBITS_CALLER", "SAMEBITS_ERROR_FILE"
CALL_SHA256 = "SAMEBITS_CALL_SHA256"  # of the function that `samebits.launch` has pickled
# -P: without it, -m puts the current folder first on sys.path, where a torch.py of a stranger may lie.
SAMEBITS = (sys.executable, "-P", "-m", "samebits")


def import_path() -> dict[str, str]:
    """Return a PYTHONPATH that lets a recipe import modules beside the script or notebook that called `train`."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else ""
    if hasattr(main, "get_ipython"):  # a notebook's kernel imports from the current folder
        # An empty entry stands for the current folder, wherever the other process is started.
        folder = os.getcwd() if "" in sys.path else next((path for path in sys.path if path == os.getcwd()), "")
    elif folder not in sys.path:
        folder = ""
    if not folder:
        return {}
    before = os.environ.get("PYTHONPATH")
    # Behind the user's own entries, so that these win as they do here.
    return {"PYTHONPATH": f"{before}{os.pathsep}{folder}" if before else folder}
