"""Settings that earlier versions had. Run folders of those versions are still read."""

from collections.abc import Collection, Mapping
from typing import Any

#: The value of each that had no effect, by dotted name: it is ignored, and any other value is an error.
REMOVED: Mapping[str, object] = {
    "cluster.load_balancing": False,
    "compress": "none",
    "mode": "exact",
    "watch.recheck": None,
}


def without_removed(
    settings: Mapping[str, Any], own: Collection[str] = (), above: str = ""
) -> dict[str, Any]:
    """Return settings, nested or by dotted name, without those that were removed and had no effect.

    Args:
        own: Names of settings that a recipe has now.
        above: The dotted name of the section that `settings` are in, with a dot at its end.
    """
    return {
        key: without_removed(value, own, f"{above}{key}.") if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if not _is_without_effect(f"{above}{key}", value, own)
    }


def _is_without_effect(name: str, value: object, own: Collection[str]) -> bool:
    return name in REMOVED and name not in own and value == REMOVED[name]
