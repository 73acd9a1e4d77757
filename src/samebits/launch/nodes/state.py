"""Store the state of torch's rendezvous as signed JSON instead of torch's pickle.

torch's own backend unpickles any value in the store, so every program that reaches its port could run code on every
machine. This backend ignores a state that was not signed with the run's key: it returns the last valid state that this
node has read, and the next write replaces the forged one.
"""

from __future__ import annotations

import pickle
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

# torch pickles this state. It is written as signed JSON instead, hence the private classes.
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

from samebits.cluster.signed import ForgedError, SignedStore

_KEY = "rendezvous"
_NONE = "none"


class StateInStore(RendezvousBackend):
    """Backend of torch's rendezvous that stores signed JSON.

    Args:
        store: The run's store, shared by all nodes.
    """

    def __init__(self, store: SignedStore) -> None:
        self._store, self._seal = store, store.seal
        self._number = 0  # number of the newest state read: an older one is refused as a replay
        self._last = _RendezvousState()
        self._call(lambda raw: raw.compare_set(_KEY, "", _NONE))

    @property
    def name(self) -> str:
        """Return the backend's name, for torch's records."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and a token for `set_state`; None if no node has written one."""
        found = self._call(lambda raw: raw.get(_KEY))
        return None if found == _NONE.encode() else (self._pickled(found), found)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write a state if the present one matches the token.

        Returns:
            The state stored afterwards, its token, and whether it is the new one.
        """
        # Safe to unpickle: torch's code in this process pickled these bytes, and unpickles the returned ones.
        plain = to_plain(pickle.loads(state))
        # One more than the newest number that was read: a state that is written again later is older, and refused.
        message = self._seal.write(_KEY, {"number": self._number + 1, "state": plain})
        expected = token if isinstance(token, bytes) else _NONE
        found = self._call(lambda raw: raw.compare_set(_KEY, expected, message))
        if found == _NONE.encode():
            return None
        return self._pickled(found), found, found == message.encode()

    def _pickled(self, message: bytes) -> bytes:
        try:
            content = self._seal.read(_KEY, message)
            number, state = _parsed(content)
            if number < self._number:
                raise ForgedError("it is older than one that this node has seen")
            # Only after the check of its form: a damaged state must not raise the number.
            self._number, self._last = number, state
        except ForgedError as error:
            self._store.refuse(_KEY, str(error))
        return pickle.dumps(self._last)

    def _call(self, operation: Any) -> bytes:
        try:
            return bytes(operation(self._store.store))
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the rendezvous store does not answer") from error


def to_plain(state: _RendezvousState) -> dict[str, Any]:
    """Return a rendezvous state as plain JSON."""
    return {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline.isoformat() if state.deadline is not None else None,
        "closed": state.closed,
        "participants": [[_node(node), rank] for node, rank in state.participants.items()],
        "wait_list": [_node(node) for node in state.wait_list],
        "redundancy_list": [_node(node) for node in state.redundancy_list],
        "last_heartbeats": [[_node(node), time.isoformat()] for node, time in state.last_heartbeats.items()],
    }


def from_plain(plain: dict[str, Any]) -> _RendezvousState:
    """Return the rendezvous state from plain JSON.

    Raises:
        ForgedError: The JSON is not a valid state.
    """
    state = _RendezvousState()
    try:
        state.round = _checked(plain["round"], int)
        state.complete = _checked(plain["complete"], bool)
        state.deadline = datetime.fromisoformat(plain["deadline"]) if plain["deadline"] is not None else None
        state.closed = _checked(plain["closed"], bool)
        state.participants = {_desc(node): _checked(rank, int) for node, rank in plain["participants"]}
        state.wait_list = {_desc(node) for node in plain["wait_list"]}
        state.redundancy_list = {_desc(node) for node in plain["redundancy_list"]}
        heartbeats = {_desc(node): datetime.fromisoformat(time) for node, time in plain["last_heartbeats"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ForgedError(f"it is not a state of a rendezvous: {error}") from None
    # torch subtracts these times from its own clock, which has a time zone.
    if any(time.tzinfo is None for time in [*heartbeats.values(), *([state.deadline] if state.deadline else [])]):
        raise ForgedError("it is not a state of a rendezvous: a time has no zone")
    if not state.participants.keys() | state.wait_list | state.redundancy_list <= heartbeats.keys():
        raise ForgedError("it is not a state of a rendezvous: a node has no heartbeat")
    state.last_heartbeats = heartbeats
    return state


def _parsed(content: Any) -> tuple[int, _RendezvousState]:
    if not isinstance(content, dict) or type(content.get("number")) is not int:
        raise ForgedError("it is not a state of a rendezvous")
    if not isinstance(content.get("state"), dict):
        raise ForgedError("it is not a state of a rendezvous")
    return content["number"], from_plain(content["state"])


def _node(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _desc(plain: Any) -> _NodeDesc:
    addr, pid, local_id = plain
    return _NodeDesc(_checked(addr, str), _checked(pid, int), _checked(local_id, int))


def _checked(value: Any, kind: type) -> Any:
    # `type(...) is`, since True is an int in Python, and a subclass may carry other behavior.
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    return value
