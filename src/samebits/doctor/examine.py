"""Run the checks of `samebits doctor`: of this machine, and in a world of all processes and the network."""

import json
import sys
from pathlib import Path

from samebits.bench.bench import Bench, joined
from samebits.cluster import collectives
from samebits.cluster.env import RankAssignment
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.samples import SampleSource
from samebits.doctor import compare, links, machine
from samebits.doctor.check_result import CheckResult, merged, table, verdict_line
from samebits.engine.build import open_data
from samebits.engine.dataset_info import dataset_info_for
from samebits.recipes.catalog import find
from samebits.report.console import Console

# Exit code if training cannot work.
PROBLEM = 1


def examine(
    source: str | None, overrides: list[str], run_dir: Path, as_json: bool, assignment: RankAssignment | None = None
) -> int:
    """Run the checks of one process. Rank 0 prints the results.

    Args:
        source: The recipe whose settings and data are compared over the ranks. None: neither is compared.
        run_dir, as_json: Folder of the runs, whose disk is checked; whether to print JSON.
        assignment: Rank of this process and its world. None: read from the environment.

    Returns:
        The exit code: 0, or 1 if there is a problem. The same on every rank.
    """
    found = find(source) if source is not None else None
    config = found.load(overrides).config if found is not None else RunConfig(recipe="none")
    with joined(config, assignment) as world:
        data: list[SampleSource] = []
        if found is not None:
            parts = Bench(found, config, world, dataset_info_for(found, config, world, None)).parts()
            data = [open_data(config, parts, train=is_train) for is_train in (True, False)]
        results = _examine(world, config if found is not None else None, data, run_dir)
        if world.is_main and as_json:
            print(json.dumps({"world_size": world.size, "findings": [result.to_json() for result in results]}))
        elif world.is_main:
            hosts = f" on {world.num_hosts} hosts" if world.num_hosts > 1 else f" on {world.host}"
            console = Console(sys.stdout, strict=True)
            console.say(f"doctor: {world.size} process{'es' if world.size > 1 else ''}{hosts} ({world.backend})")
            console.draw(table(results))
            console.say(verdict_line(results))
    return PROBLEM if any(result.verdict == "problem" for result in results) else 0


def _examine(world: World, config: RunConfig | None, data: list[SampleSource], run_dir: Path) -> list[CheckResult]:
    # One rank per machine checks the machine: two would slow down each other's disk writes.
    own = machine.whole(run_dir) if world.local_rank == 0 else []
    if world.size == 1:
        samples = [CheckResult("data", compare.fingerprint(each)) for each in data]
        return [*own, *samples]
    gathered = collectives.all_gather_object(world, (world.host, [result.to_json() for result in own]))
    by_host = [(host, [CheckResult(**found) for found in results]) for host, results in gathered if results]
    machines = merged([results for _, results in by_host], [host for host, _ in by_host])
    compared = compare.examine(world, compare.summary(world, config, data))
    # A check that is also compared over the ranks has only the row of the comparison.
    names = {result.check for result in compared}
    return [*(each for each in machines if each.check not in names), *compared, *links.examine(world)]
