"""Values of a run folder, which may be a stranger's, as numbers and texts of limited length."""

from collections.abc import Mapping

from samebits.plain_file import number, shorten

_MAX_STEP = 1 << 53
_MAX_NUMBERS = 200


def count(value: object) -> int:
    """Return a JSON number as a count of steps or processes; 0 if it is none."""
    found = number(value)
    return int(found) if found is not None and 0 <= found <= _MAX_STEP else 0


def text(value: object) -> str:
    """Return a JSON string, shortened; empty if it is none."""
    return shorten(value) if isinstance(value, str) else ""


def numbers(values: object) -> dict[str, float]:
    """Return the finite numbers of a JSON object by name, at most 200."""
    if not isinstance(values, Mapping):
        return {}
    found = {}
    for name, value in values.items():
        converted = number(value)
        if converted is not None:
            found[shorten(name, 80)] = converted
        if len(found) == _MAX_NUMBERS:
            break
    return found
