"""Run one of several machines whose processes recover in the step: rendezvous, then a crew."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError

from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError
from samebits.launch.crew.crew import Crew
from samebits.launch.crew.crew_process import Entry
from samebits.launch.crew.node_crew import NodeCrew
from samebits.launch.crew.running_group import join_group, open_shared_folder
from samebits.launch.nodes.rendezvous import NodeRendezvous
from samebits.launch.supervisor import Supervisor


def run_node(
    nodes: RendezvousConfig,
    supervisor: Supervisor,
    function: Callable[..., object],
    args: tuple[Any, ...],
    sizes: tuple[int, int, int],
    crews: list[Any],
) -> int:
    """Run `function(*args)` in the processes of this machine, and return the command's exit code.

    The rendezvous admits the launchers and gives them a key. After that, they meet only in the run folder, so the
    machine that serves the rendezvous may be lost like any other. A launcher that comes later joins there too.

    Args:
        nodes: The rendezvous.
        supervisor: Receives stop signals and analyzes failures.
        function: An importable function.
        args: Its arguments.
        sizes: Processes of this machine, the least number of them, and restarts.
        crews: Receives the crew, as the signal handler needs its process ids.
    """
    group, rendezvous = join_group(nodes), None
    # A launcher that joins a running group needs no rendezvous: the machine that served it may be lost (ADR 52).
    if group is None:
        rendezvous = NodeRendezvous(nodes, supervisor.raise_if_stop_requested, supervisor.report)
    code, text = 1, "a launcher failed"
    try:
        if rendezvous is not None:
            nonce = secrets.token_hex(8) if rendezvous.serves else None
            group = open_shared_folder(rendezvous.store, nodes, rendezvous.key, nonce), rendezvous.key
        assert group is not None
        shared, key = group
        # Without a launcher that reports them, processes are lost to the others: they end at once.
        entry = Entry(function, args, supervisor.folder, 0.0, key)
        crew: Crew = NodeCrew(entry, supervisor, *sizes, nodes, shared)
        # Before it runs: the signal handler finds the processes of a crew in this list.
        crews.append(crew)
        code = supervisor.exit_code(*crew.run())
        text = supervisor.end_message(code)
    except LaunchError as error:
        code, text = error.exit_code, str(error)
        supervisor.report(text)
    except DistError:
        raise LaunchError(
            f"lost the rendezvous at {nodes.endpoint} while joining", fix="Start the same command again."
        ) from None
    finally:
        if rendezvous is not None and rendezvous.serves:
            rendezvous.end(code, text)
    return code
