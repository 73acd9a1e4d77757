"""Run one of several machines: join the launchers' store, then supervise this machine's processes."""

import secrets
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError

from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError
from samebits.launch.crew.crew import Crew
from samebits.launch.crew.crew_process import Entry
from samebits.launch.crew.node_crew import NodeCrew
from samebits.launch.crew.round_crew import RoundCrew
from samebits.launch.crew.running_group import join_group, open_shared_folder
from samebits.launch.nodes.board import EndedOnOtherNode
from samebits.launch.nodes.rendezvous import NodeRendezvous
from samebits.launch.supervisor import StopRequested, Supervisor

Work = tuple[Callable[..., object], tuple[Any, ...]]


def run_node(
    nodes: RendezvousConfig, supervisor: Supervisor, work: Work, sizes: tuple[int, int, int], crews: list[Crew],
    recovers_in_step: bool,
) -> int:  # fmt: skip
    """Run a function in the processes of this machine, and return the command's exit code.

    Launchers meet in the store of the one that serves the rendezvous. With recovery in the step, the rendezvous only
    admits them and gives them a key: after that, they meet in the run folder, so the machine that serves the rendezvous
    may be lost like any other. A launcher that comes later joins there, too.

    Args:
        work: An importable function, and its arguments.
        sizes: Processes of this machine, the least number of them, and restarts.
        crews: Receives the crew, as the signal handler needs its process ids.
        recovers_in_step: The processes can continue without a lost one. Otherwise each loss restarts all.
    """
    group, rendezvous = join_group(nodes) if recovers_in_step else None, None
    # A launcher that joins a running group needs no rendezvous: the machine that served it may be lost (ADR 52).
    if group is None:
        rendezvous = NodeRendezvous(nodes, supervisor.raise_if_stop_requested, supervisor.report)
    code, text, crew = 1, "a launcher failed", None
    try:
        if recovers_in_step:
            if rendezvous is not None:
                nonce = secrets.token_hex(8) if rendezvous.serves else None
                group = open_shared_folder(rendezvous.store, nodes, rendezvous.key, nonce), rendezvous.key
            assert group is not None
            shared, key = group
            # Without a launcher that reports them, processes are lost to the others: they end at once.
            crews.append(NodeCrew(Entry(*work, supervisor.folder, 0.0, key), supervisor, *sizes, nodes, shared))
        else:
            assert rendezvous is not None
            entry = Entry(*work, supervisor.folder, supervisor.stop_timeout_s, rendezvous.key)
            crew = RoundCrew(entry, supervisor, *sizes, rendezvous)
            crews.append(crew)
        # In the list before it runs: the signal handler finds the processes there.
        code = supervisor.exit_code(*crews[0].run())
        text = supervisor.end_message(code)
    except StopRequested:
        # It was waiting for other nodes, which may continue without it.
        code, text = supervisor.exit_code(False, {}), supervisor.end_message(1)
        # The launcher that serves the rendezvous cannot leave: the others would lose their store.
        if crew is not None and rendezvous is not None:
            crew.is_leaving = not rendezvous.serves
    except EndedOnOtherNode as ended:
        code, text = ended.code, ended.text
        if text:
            supervisor.report(text)
    except LaunchError as error:
        code, text = error.exit_code, str(error)
        supervisor.report(text)
    except DistError:
        raise LaunchError(
            f"lost the rendezvous at {nodes.endpoint} while joining", fix="Start the same command again."
        ) from None
    finally:
        # Always, whatever has happened: the others wait for a reason or for a missed heartbeat.
        if crew is not None:
            crew.end(code, text)
        elif rendezvous is not None and (rendezvous.serves or not recovers_in_step):
            rendezvous.end(code, text)
    return code
