"""Signs what processes leave for each other in a store, so that only processes with the run's key are heard.

A store answers everybody who reaches its port. Each value is therefore written as `MAC JSON`, where MAC is the
HMAC-SHA256 of the purpose, the name of the key and the JSON. The purpose names the run and its world, so that a value
cannot be copied to another place or kept for a later run. Without a key the MAC is `-`, and only the form is checked.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

LOGGER = logging.getLogger("lockstep")
# The longest message: what 4,096 ranks say of themselves takes one megabyte.
MAX_BYTES = 16 << 20
_NO_MAC = "-"
# What no process writes: stands for a key that is not there.
_ABSENT = "?"
_MAX_WARNINGS = 16


def peek(store: Store, name: str) -> bytes | None:
    """The value of a key, or None where there is none; never waits.

    A `check` with a `get` behind it would wait for minutes where another program deletes the key in between.
    """
    found = bytes(store.compare_set(name, _ABSENT, _ABSENT))
    return None if found == _ABSENT.encode() else found


def counted(store: Store, name: str) -> int:
    """The value of a counter; 0 where there is none.

    Raises:
        ValueError: Another program has written something else there.
    """
    return int(peek(store, name) or 0)


class ForgedError(ValueError):
    """A message that no process with the run's key has written for this place."""


@dataclass(frozen=True)
class Seal:
    """A run's key, and what its signatures are for.

    Attributes:
        key: Empty: messages are not signed.
        purpose: Which run, and which part of it.
    """

    key: str = field(default="", repr=False)
    purpose: str = ""

    def within(self, part: str) -> Seal:
        """The seal for a part of the run: its messages are valid there alone."""
        return replace(self, purpose=f"{self.purpose}/{part}")

    def write(self, name: str, value: object) -> str:
        """A message with a JSON value."""
        text = json.dumps(value, separators=(",", ":"))
        return f"{self._mac(name, text)} {text}"

    def read(self, name: str, message: bytes) -> Any:
        """The value of a message.

        Raises:
            ForgedError: Its signature is wrong, or it is no message.
        """
        if len(message) > MAX_BYTES:
            raise ForgedError(f"it has {len(message):,} bytes")
        try:
            mac, _, text = message.decode().partition(" ")
            if mac != _NO_MAC and not self.key:
                raise ForgedError("it is signed, and this process has no LOCKSTEP_KEY")
            if not hmac.compare_digest(mac.encode(), self._mac(name, text).encode()):
                raise ForgedError("it is not signed with this run's key")
            return json.loads(text)
        except ForgedError:
            raise
        except (ValueError, RecursionError):
            raise ForgedError("it is no message of a run") from None

    def _mac(self, name: str, text: str) -> str:
        if not self.key:
            return _NO_MAC
        message = json.dumps([self.purpose, name, text]).encode()
        return hmac.new(self.key.encode(), message, hashlib.sha256).hexdigest()


class SignedStore:
    """JSON values in a store. A value that is not ours is taken as one that is not there, and logged once.

    Attributes:
        store: The store itself, for counters.
        seal: The key, and what for.
        refused: Names of values that were not ours, with the reason.
    """

    def __init__(self, store: Store, seal: Seal) -> None:
        self.store, self.seal = store, seal
        self.refused: dict[str, str] = {}

    def clone(self) -> SignedStore:
        """The same through a connection of its own."""
        copy = SignedStore(self.store.clone(), self.seal)
        copy.refused = self.refused
        return copy

    def put(self, name: str, value: object) -> None:
        """Leave a value."""
        self.store.set(name, self.seal.write(name, value))

    def get(self, name: str) -> Any | None:
        """The value, or None where there is none of ours."""
        found = peek(self.store, name)
        return self._read(name, found) if found is not None else None

    def get_all(self, names: Sequence[str]) -> list[Any | None]:
        """The values, in order, all of which somebody has left."""
        return [self._read(name, found) for name, found in zip(names, self.store.multi_get([*names]), strict=True)]

    def wait_for(self, name: str) -> Any:
        """The value, once somebody has left it.

        Raises:
            DistStoreError: Nobody has left one for as long as the store's timeout, or what is there is not ours.
        """
        value = self._read(name, self.store.get(name))
        if value is None:
            raise DistStoreError(f"a message was refused: {self.refusal_cause()}")
        return value

    def put_first(self, name: str, value: object) -> Any:
        """Leave a value where there is none of ours yet; the one that is there then."""
        mine = self.seal.write(name, value)
        found = self.store.compare_set(name, "", mine)
        first = self._read(name, found)
        if first is None:
            self.store.set(name, mine)
            return value
        return first

    def count(self, name: str) -> int:
        """The value of a counter; 0 where there is none, or something else."""
        try:
            return counted(self.store, name)
        except ValueError:
            self.refuse(name, "it is no number")
            return 0

    def refuse(self, name: str, reason: str) -> None:
        """Note that a value is not ours, or of another form than it should have."""
        if name not in self.refused and len(self.refused) < _MAX_WARNINGS:
            self.refused[name] = reason
            LOGGER.warning("the store's key %.80r was ignored: %s", name, reason)

    def refusal_cause(self) -> str:
        """What to suspect where messages were refused; empty if none were."""
        if not self.refused:
            return ""
        name, reason = next(iter(self.refused.items()))
        return (
            f"the message at {name:.80} was ignored: {reason}; either not all processes have the same LOCKSTEP_KEY, "
            "or another program writes to this run's store"
        )

    def _read(self, name: str, message: bytes) -> Any | None:
        try:
            return self.seal.read(name, message)
        except ForgedError as error:
            self.refuse(name, str(error))
            return None


class AgentStore(SignedStore):
    """What torch's agent needs of a store, with its values signed."""

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a text."""
        self.put(key, value.decode() if isinstance(value, bytes) else value)

    def get(self, key: str) -> bytes:
        """The text, once somebody has left it."""
        return str(self.wait_for(key)).encode()

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Leave several texts."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several texts, once somebody has left all of them."""
        return [self.get(key) for key in keys]
