"""Sign the messages that processes exchange through a store, so that only holders of the run's key are trusted.

A store serves every program that reaches its port. Each value is therefore written as `MAC JSON`, where MAC is the
HMAC-SHA256 of the purpose, the name of the key and the JSON. The purpose names the run and its world, so a value
cannot be copied to another key or replayed in a later run. Without a key the MAC is `-`, and only the form is checked.
"""

import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args, get_type_hints

from torch.distributed import DistError, DistStoreError, Store

from samebits.cluster.timeout import wait_until
from samebits.errors import LaunchError, from_json

LOGGER = logging.getLogger("samebits")
T = TypeVar("T")
# Longest message: the rank information of 4,096 ranks takes one megabyte.
MAX_BYTES = 16 << 20
_NO_MAC = "-"
# A value that no process writes: stands for a missing key.
_ABSENT = "?"
_MAX_WARNINGS = 16


def peek(store: Store, name: str) -> bytes | None:
    """Return the value of a key without waiting; None if there is none.

    A `check` followed by a `get` would block for minutes if another program deleted the key in between.
    """
    found = bytes(store.compare_set(name, _ABSENT, _ABSENT))
    return None if found == _ABSENT.encode() else found


def counted(store: Store, name: str) -> int:
    """Return the value of a counter; 0 if there is none.

    Raises:
        ValueError: Another program has written something else there.
    """
    return int(peek(store, name) or 0)


def read_as(kind: type[T], value: Any, least: float = -1e15, most: float = 1e15) -> T | None:
    """Return the dataclass that a JSON object describes; None if a field is missing, too much or of another type.

    Args:
        kind: The dataclass. Its fields are texts, numbers or flags, or None.
        least, most: Bounds of all numbers.
    """
    kinds = get_type_hints(kind)
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        return None
    for name, item in value.items():
        # By the type itself, since True is an int for isinstance.
        allowed = get_args(kinds[name]) or (kinds[name],)
        if type(item) not in allowed and not (type(item) is int and float in allowed):
            return None
        if type(item) in (int, float) and not least <= item <= most:  # also false for NaN
            return None
    return kind(**value)


class ForgedError(ValueError):
    """A message that no process with the run's key has written for this key of the store."""


@dataclass(frozen=True)
class Seal:
    """A run's secret key and the purpose of its signatures."""

    # Not in the repr, which logs and tracebacks show.
    key: str = field(default="", repr=False)  #: The secret; empty: messages are not signed.
    purpose: str = ""  #: The run and the part of it that messages are valid for.

    def within(self, part: str) -> "Seal":
        """Return the seal for a part of the run; its messages are valid only there."""
        return replace(self, purpose=f"{self.purpose}/{part}")

    def write(self, name: str, value: object) -> str:
        """Return a signed message with a JSON value for the key `name`."""
        text = json.dumps(value, separators=(",", ":"))
        return f"{self._mac(name, text)} {text}"

    def read(self, name: str, message: bytes) -> Any:
        """Verify a message that was found under the key `name`, and return its value.

        Raises:
            ForgedError: The signature is wrong, or the bytes are not a message.
        """
        if len(message) > MAX_BYTES:
            raise ForgedError(f"it has {len(message):,} bytes")
        try:
            mac, _, text = message.decode().partition(" ")
            if mac != _NO_MAC and not self.key:
                raise ForgedError("it is signed, and this process has no SAMEBITS_KEY")
            # In constant time: otherwise the duration would show how many characters of a MAC are right.
            if not hmac.compare_digest(mac.encode(), self._mac(name, text).encode()):
                raise ForgedError("it is not signed with this run's key")
            return json.loads(text)
        except ForgedError:
            raise
        except (ValueError, RecursionError):
            raise ForgedError("it is not a message of a run") from None

    def _mac(self, name: str, text: str) -> str:
        if not self.key:
            return _NO_MAC
        # As a JSON list, so that no two triples have the same bytes.
        message = json.dumps([self.purpose, name, text]).encode()
        return hmac.new(self.key.encode(), message, hashlib.sha256).hexdigest()


class SignedStore:
    """Signed JSON values in a store. A value with a wrong signature counts as missing, and is logged once."""

    def __init__(self, store: Store, seal: Seal) -> None:
        self.store = store
        self.seal = seal
        self.refused: dict[str, str] = {}  #: Names of refused values, with the reason.

    def clone(self) -> "SignedStore":
        """Return the same store over a connection of its own."""
        copy = SignedStore(self.store.clone(), self.seal)
        # One table for both, so that a refused key is logged once.
        copy.refused = self.refused
        return copy

    def put(self, name: str, value: object) -> None:
        """Write a value."""
        self.store.set(name, self.seal.write(name, value))

    def get(self, name: str) -> Any | None:
        """Return the value; None if it is missing or was refused."""
        found = peek(self.store, name)
        return self._read(name, found) if found is not None else None

    def get_all(self, names: Sequence[str]) -> list[Any | None]:
        """Return the values of keys that all exist, in order; None for each that was refused."""
        return [
            self._read(name, found)
            for name, found in zip(names, self.store.multi_get([*names]), strict=True)
        ]

    def wait_for(self, name: str) -> Any:
        """Wait for a value and return it.

        Raises:
            DistStoreError: There is no value within the store's timeout, or it was refused.
        """
        value = self._read(name, self.store.get(name))
        if value is None:
            raise DistStoreError(f"a message was refused: {self.refusal_cause()}")
        return value

    def put_first(self, name: str, value: object) -> Any:
        """Write a value unless a valid one exists, and return the value that is stored afterwards."""
        mine = self.seal.write(name, value)
        found = self.store.compare_set(name, "", mine)
        first = self._read(name, found)
        # Refused: another program has written it, and this value takes its place.
        if first is None:
            self.store.set(name, mine)
            return value
        return first

    def count(self, name: str) -> int:
        """Return the value of a counter; 0 if it is missing or is not a number."""
        try:
            return counted(self.store, name)
        except ValueError:
            self.refuse(name, "it is not a number")
            return 0

    def refuse(self, name: str, reason: str) -> None:
        """Record and log that a value was refused."""
        if name not in self.refused and len(self.refused) < _MAX_WARNINGS:
            self.refused[name] = reason
            LOGGER.warning("the store's key %.80r was ignored: %s", name, reason)

    def refusal_cause(self) -> str:
        """Return the probable cause of refused messages, for an error; empty if none were refused."""
        if not self.refused:
            return ""
        name, reason = next(iter(self.refused.items()))
        return (
            f"the message at {name:.80} was ignored: {reason}; either not all processes have the same SAMEBITS_KEY, "
            "or another program writes to this run's store"
        )

    def _read(self, name: str, message: bytes) -> Any | None:
        try:
            return self.seal.read(name, message)
        except ForgedError as error:
            self.refuse(name, str(error))
            return None


def count_and_linger(
    store: SignedStore, name: str, serves: bool, num_readers: Callable[[], int], limit_s: float
) -> None:
    """Note that this process has read what all have to read, or is done with the store.

    Args:
        name: Key of the counter.
        serves: This process serves the store, so it waits until all others have noted the same, or are lost.
        num_readers: Returns how many processes there are.
        limit_s: Longest wait, seconds.
    """
    with suppress(DistError):
        store.store.add(name, 1)
        if serves:
            wait_until(lambda: store.count(name) >= num_readers(), limit_s, 0.005)


def error_from_store(value: Any) -> LaunchError | None:
    """Return the error that another rank has written into the store; None if it is malformed."""
    try:
        error = from_json(
            {**value, "kind": LaunchError.__name__} if isinstance(value, dict) else value
        )
    except ValueError:
        return None
    return error if isinstance(error, LaunchError) else None
