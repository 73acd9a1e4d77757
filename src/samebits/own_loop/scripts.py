"""Recognize a script with an exact loop. Imports no torch, so that a wrong source is answered at once."""

import ast
from pathlib import Path

from samebits.errors import ConfigError


def is_script(source: str) -> bool:
    """Return whether a source is a script with an exact loop, not a recipe file. Reads it without running it.

    Raises:
        ConfigError: It is a script without one.
    """
    path = Path(source)
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False
    if any(isinstance(node, ast.FunctionDef) and node.name == "build" for node in tree.body):
        return False
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called)
    # exact, and the integrations' ExactStrategy, ExactAccelerator, ExactTrainer.
    if not any(name == "exact" or name.startswith("Exact") for name in names):
        raise ConfigError(
            f"{source} has no exact loop and is no recipe",
            allowed="a script that calls samebits.exact, or a recipe file with build(config)",
            fix="Add the lines of docs/own-loop.md to the script: model, optimizer, loader = samebits.exact(...). "
            "Or give --global-batch and --micro-batch, as for samebits launch.",
        )
    return True
