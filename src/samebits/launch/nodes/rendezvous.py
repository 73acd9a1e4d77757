"""Rendezvous of several machines' launchers: one serves a small store at the endpoint, and every launcher joins there.

    open the store ─ admission (same run?) ─ agree on a key ─ claim a node rank

A "node" is torch's word for one launcher with its processes. What the launchers exchange after that is in `board` and,
for in-step recovery, in `crew.shared_folder`. Every store call can block forever on a dead link, so each runs in a
thread with a deadline.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from samebits.cluster.signed import SignedStore
from samebits.cluster.store import open_for_nodes
from samebits.cluster.timeout import call_with_timeout
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError
from samebits.launch.nodes import admission, auth, rank_claims, waiting
from samebits.open_files import out_of_files

T = TypeVar("T")
# Deadline of a short call. Over a link that was cut, there is never an answer.
ANSWER_S = 5.0
# How long the node that serves the store waits for the others to read how the run ended.
LINGER_S = 8.0


class NodeRendezvous:
    """The launchers' store, which this launcher has joined or serves.

    Args:
        check: Called often during a wait; raises to end it.
        report: Called with a text every few seconds while the store cannot be reached.

    Attributes:
        nodes: Number of nodes, endpoint and timeouts.
        serves: Whether this launcher serves the store.
        key: Secret of the run.
        store: The run's part of the store.

    Raises:
        LaunchError: The store cannot be served or reached, or this launcher may not join.
    """

    def __init__(self, nodes: RendezvousConfig, check: Callable[[], None], report: Callable[[str], None]) -> None:
        self.nodes, self._check = nodes, check
        self._store, self.serves = self.wait(lambda: open_for_nodes(nodes, report), nodes.join_timeout_s + ANSWER_S)
        self._key_file: auth.KeyFile | None = None
        self._makes_folder = self.serves and not nodes.folder.exists()
        try:
            is_first = self.wait(lambda: admission.admit(self._store, nodes, self.serves), admission.LIMIT_S)
            # A launcher that is there answers within moments, or is lost.
            self._store.set_timeout(timedelta(seconds=max(10.0, nodes.node_timeout_s)))
            run = PrefixStore(f"samebits/{nodes.run_id}", self._store)
            self.key = self._agree_on_key(run, is_first)
            self.store = SignedStore(run, auth.nodes_seal(self.key, nodes))
            if (rank := nodes.rank) is not None:
                self.wait(lambda: rank_claims.claim(self.store, rank, nodes.size.most), ANSWER_S)
        except BaseException as error:
            note = waiting.as_note(error)
            self.query(lambda: admission.report_refusal(self._store, note))
            self._clean_up()
            raise

    def query(self, call: Callable[[], T], limit_s: float = ANSWER_S) -> T | None:
        """Return the result of a short call; None if the store does not answer in time."""
        try:
            return call_with_timeout(call, limit_s)
        except (dist.DistError, TimeoutError):
            return None

    def wait(self, call: Callable[[], T], limit_s: float) -> T:
        """Return the result of a call that may take so many seconds; a stop signal ends the wait.

        Raises:
            LaunchError: No answer within the deadline.
        """
        try:
            return call_with_timeout(call, limit_s, lambda waited_s: self._check())
        except TimeoutError:
            raise self.lost_store(f"no answer for {limit_s:.0f} s") from None

    def lost_store(self, reason: str) -> LaunchError:
        """Return the error for a store that does not answer any more."""
        return LaunchError(
            f"node {socket.gethostname()} has lost the rendezvous at {self.nodes.endpoint}: {reason}",
            cause=out_of_files() or "that machine or the network to it is down",
            fix="Once it is back, start the same command on all machines, with --resume auto.",
        )

    def _agree_on_key(self, run: Store, is_first: bool) -> str:
        def agree() -> str:
            if not is_first:
                return auth.find_key(run, self.nodes)
            key, self._key_file = auth.exchange_key(run, self.nodes)
            return key

        return self.wait(agree, auth.GREETING_S + ANSWER_S)

    def missing(self) -> str:
        """Return which node ranks are missing, if the user has assigned them."""
        return self.query(lambda: rank_claims.missing(self.store, self.nodes)) or ""

    def refusal(self) -> str:
        """Return what the last refused launcher reported; empty if none was refused."""
        return self.query(lambda: waiting.read_refusal(self._store)) or ""

    def leave(self) -> None:
        """Let another launcher have this one's node rank."""
        if (rank := self.nodes.rank) is not None:
            self.query(lambda: rank_claims.release(self.store, rank))

    def end(self, code: int, text: str, num_nodes: int = 0) -> None:
        """End the run on all nodes; the first to call this sets the result. It is read by `num_nodes`."""

        def close() -> None:
            self.store.put_first("ended", {"code": code, "text": text})
            self.store.store.add("acknowledged", 1)

        def all_acknowledged() -> None:
            while self.store.count("acknowledged") < num_nodes:
                time.sleep(0.05)

        self.query(close)
        if self.serves:
            self.query(all_acknowledged, LINGER_S)
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the key file, and the run folder if `admission.publish` created it and it is still empty."""
        if self._key_file is not None:
            self._key_file.remove()
        if self._makes_folder:
            with suppress(OSError):
                self.nodes.folder.rmdir()
