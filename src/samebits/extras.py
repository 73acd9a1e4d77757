"""Optional packages: the extras of the distribution, and the error for one that is not installed.

The core needs torch, numpy and little else. What a recipe or an export needs beside that is an extra in
pyproject.toml; tests/house/test_extras.py compares both.
"""

import sys
from importlib.util import find_spec

from samebits.errors import ConfigError

DISTRIBUTION = "samebits"

# Extra -> the modules that it installs.
EXTRAS = {
    "classify": ("cv2", "simplejpeg", "torchvision"),
    "hub": ("huggingface_hub",),
    "lmdb": ("lmdb",),
    "notebook": ("ipykernel", "pandas"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "parquet": ("pyarrow",),
    "pose": ("cv2", "faster_coco_eval", "scipy", "simplejpeg"),
    "segment": ("cv2", "faster_coco_eval", "simplejpeg", "torchvision"),
    "sign": ("cryptography", "securesystemslib"),
    "text": ("cv2", "rapidfuzz", "simplejpeg"),
    "timm": ("timm",),
    "trackers": ("tensorboard",),
}


def pip_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be found. It is not imported."""
    if module in sys.modules:
        return sys.modules[module] is not None  # None blocks an import
    return find_spec(module) is not None


def require(extra: str, what: str, *modules: str) -> None:
    """Check that the modules of an extra are installed, or those of them that are named."""
    if missing := [name for name in modules or EXTRAS[extra] if not is_installed(name)]:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{what} needs {', '.join(missing)}, which {verb} not installed",
            fix=f"Run {pip_line(extra)}.",
        )


def extra_with(module: str) -> str | None:
    """Return the first extra that installs a top-level module, or None."""
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def require_recipe(recipe: str) -> None:
    """Check that what a recipe needs is installed. Raises ConfigError if a package is missing."""
    if recipe in EXTRAS:
        require(recipe, f"recipe {recipe}")
