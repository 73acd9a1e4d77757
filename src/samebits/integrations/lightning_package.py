"""Lightning's package: `lightning.pytorch`, or `pytorch_lightning` in a script that imports only that.

The two have the same content but different classes, and a Trainer accepts only strategies of its own.
"""

import sys
from importlib import import_module
from typing import Any

from samebits.errors import ConfigError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
MISSING = "Run: pip install 'samebits[lightning]'"


def find(module: str, name: str) -> Any:
    """Return a class or function of Lightning by its module, such as "strategies", and name.

    Raises:
        ConfigError: Lightning is not installed, or is a version that lacks it.
    """
    first, second = PACKAGES
    if first not in sys.modules and second in sys.modules:
        first, second = second, first
    try:
        try:
            package = import_module(first)
        except ModuleNotFoundError:
            first, package = second, import_module(second)
        return getattr(import_module(f"{package.__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigError("Lightning is not installed", cause=error, fix=MISSING) from None
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this version of Lightning has no {module}.{name}",
            given=f"{first} {getattr(package, '__version__', '')}",
            cause=error,
            fix="Install a version that docs/lightning.md lists.",
        ) from None
