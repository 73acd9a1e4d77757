"""`samebits doctor`: checks of this machine, or of all machines of a world, before a run."""

from pathlib import Path
from typing import Annotated

from samebits.cli.options import (
    Debug,
    Init,
    Json,
    LocalRank,
    MachineOverrides,
    Procs,
    Rank,
    WorldSize,
    argument,
    option,
    path_option,
)
from samebits.errors import ConfigError
from samebits.launch.subcommand import SAMEBITS

SourceName = Annotated[
    str | None,
    argument("SOURCE", "A recipe or file as for train: its settings and data are compared too."),
]
Hosts = Annotated[
    str | None,
    option("A,B", "Check these hosts by ssh, with one process each. Needs the same paths on each."),
]
RunDir = Annotated[
    Path, path_option("--run-dir", "DIR", "Folder of the runs; its disk is checked.")
]


def doctor(
    source: SourceName = None,
    overrides: MachineOverrides = None,
    procs: Procs = None,
    hosts: Hosts = None,
    run_dir: RunDir = Path("runs"),
    init: Init = None,
    rank: Rank = None,
    world_size: WorldSize = None,
    local_rank: LocalRank = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Check this machine, or all machines of a world.

    Under torchrun, srun, --hosts or --init, the network between the machines is checked too.

    The exit code is 1 if training cannot work.
    """
    from samebits.config.schema import RunConfig
    from samebits.launch.start import rank_assignment
    from samebits.recipes.catalog import find

    if source is not None:
        # Wrong settings are refused here, before processes start.
        found = find(source)
        found.load(overrides or [])
    if hosts is not None:
        if procs is not None or init is not None:
            raise ConfigError(
                f"--hosts {hosts} starts one process per host, and cannot be combined with --procs or --init",
                fix="Remove --procs and --init.",
            )
        return _on_hosts(hosts, source, overrides or [], run_dir, as_json)
    here = rank_assignment(procs, init, rank, world_size)
    arguments = (source, list(overrides or []), run_dir, as_json)
    if here is not None or (procs or 1) == 1:
        from samebits.cluster.env import ALONE
        from samebits.doctor.examine import examine

        return examine(*arguments, here or ALONE)

    from samebits.launch import forkserver
    from samebits.launch.start import launch_here
    from samebits.process_range import ProcessRange

    config = RunConfig(recipe="none")
    # Before torch is imported here, so that both imports run at the same time.
    forkserver.prepare([*forkserver.PRELOAD, "samebits.doctor.examine"], config.num_threads)
    from samebits.doctor.examine import examine

    assert procs is not None
    return launch_here(ProcessRange(procs, procs), config, examine, arguments)


def _on_hosts(
    hosts: str, source: str | None, overrides: list[str], run_dir: Path, as_json: bool
) -> int:
    from samebits.launch.ssh import RemoteHost, parse_hosts, run_on_hosts
    from samebits.launch.start import DEFAULT_PORT

    machines = parse_hosts(hosts)

    def command(number: int, machine: RemoteHost) -> list[str]:
        parts = [*SAMEBITS, "doctor", *([source] if source else []), *overrides]
        parts += ["--run-dir", str(run_dir), *(["--json"] if as_json else [])]
        if len(machines) == 1:
            return parts
        endpoint = f"tcp://{machines[0].host}:{DEFAULT_PORT}"
        return [
            *parts,
            "--init",
            endpoint,
            "--rank",
            str(number),
            "--world-size",
            str(len(machines)),
        ]

    return run_on_hosts(machines, command)
