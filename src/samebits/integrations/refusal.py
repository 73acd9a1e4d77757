"""What a framework can be configured with that cannot be exact: tables of (whether it is given, what, why, fix)."""

from typing import NamedTuple

from samebits.errors import ConfigError


class Refusal(NamedTuple):
    """A configuration that is refused."""

    is_given: object  #: Whether it is given.
    what: str  #: The configuration with its value.
    why: str  #: Why training with it cannot be exact.
    fix: str  #: What to do.
    allowed: str = ""  #: What can be given.


def accumulation(num_steps: int) -> Refusal:
    """Return the refusal of `gradient_accumulation_steps`."""
    why = "global_batch counts all samples of a step, so accumulation follows from it."
    what, fix = f"gradient_accumulation_steps is {num_steps}", "Leave out gradient_accumulation_steps."
    return Refusal(num_steps != 1, what, why, fix)


def refuse(*rows: Refusal) -> None:
    """Refuse the first configuration that is given."""
    for row in rows:
        if row.is_given:
            raise ConfigError(row.what, allowed=row.allowed, cause=row.why, fix=row.fix)
