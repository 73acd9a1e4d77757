"""List the operations of a run in portable arithmetic, for `samebits check`: how many, and all that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samebits.portable.mode import NoPortableForm, PortableMode

# A process that has this variable computes what has no portable form as torch does, and lists it.
LIST_OPERATIONS = "SAMEBITS_LIST_OPERATIONS"

_modes: list[ListingMode] = []


class ListingMode(PortableMode):
    """Replaces operations by portable ones, and notes those that have no portable form instead of refusing them."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, NoPortableForm] = {}
        _modes.append(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch adds its own to each class that has none

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except NoPortableForm as error:
            self.refused.setdefault(error.operation, error)
            return func(*args, **(kwargs or {}))


def listed_operations() -> dict[str, Any] | None:
    """Return what this process has computed, as plain JSON; None without a `ListingMode`.

    Returns:
        portable: the number of operations; refused: for each other one what, cause, fix and where.
    """
    if not _modes:
        return None
    used = {func.name().partition(".")[0] for mode in _modes for func in mode.functions}
    refused = {name: each for mode in _modes for name, each in mode.refused.items()}
    portable = used - {name.partition(" ")[0].partition(".")[0] for name in refused}
    return {"portable": len(portable), "refused": [{"what": each.what, **each.slots} for each in refused.values()]}
