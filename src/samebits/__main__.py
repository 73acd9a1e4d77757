"""`python -m samebits`, as torchrun calls it."""

import os
import sys

import samebits

# -m puts the current folder first on sys.path, where a torch.py of a stranger may lie. It stays where the package
# itself was found in it: in a checkout that is not installed.
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(samebits.__file__)))
if (
    not sys.flags.safe_path
    and sys.path
    and sys.path[0] in ("", os.getcwd())
    and os.getcwd() != _FOLDER
):
    del sys.path[0]

from samebits.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
