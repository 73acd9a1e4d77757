"""Predicted step time against the measured one: 2, 4 and 8 processes, 4 links, 2 models.

    sudo python -m benchmarks.step_model          # Linux; makes network namespaces

The prediction is that of `samebits plan --link`. The parts of a step (reading, passes, optimizer, adding) are measured
in all processes at once, which do not exchange gradients meanwhile. Each link, and the work of sending without a
limit, is measured by messages between two processes. Messages and bytes are counted by the exchange's own code. Nothing
is fitted to the measured steps. A machine may change its speed within seconds, so the parts and the steps of a setting
are measured in turns, and both are medians.

The processes really compute. All of them share this machine's cores, although each has a host (network namespace) of
its own. Where the cores are slower than a link, its speed is not tested:

    --per-core          measure the parts in as many processes as cores, and multiply by the processes per core
    --sleep-ms 100      passes sleep instead of computing: only the exchange and the links are tested

1 Gbit and 100 Mbit are held by tc (tbf) at each host. 10 ms, in each direction, is a relay in user space
(`delayed_links.py`), since not every kernel has netem; it takes some of the cores' time. Prints the median step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
sys.path.insert(0, str(ROOT))

RECIPE = Path(__file__).resolve().parent / "step_model_recipe.py"
MODELS, SLEEPING_MODELS = ("cnn", "resnet"), ("small", "large")
SIZES = (2, 4, 8)
HELD = {"1 Gbit": "1gbit", "100 Mbit": "100mbit"}
# What may pass at once after a pause: 2 to 5 ms of the rate. With more, a small gradient would be sent without a limit.
BURST = {"1 Gbit": "256kb", "100 Mbit": "64kb"}
DELAY = "10 ms"
# The slowest one first: TCP keeps the shortest round trip of a connection for seconds, and sends less after it grows.
LINKS = (DELAY, *reversed(HELD), "loopback")
NO_LIMIT, BAR = "no limit", 0.15
Result = dict[str, Any]


def worker(options: argparse.Namespace) -> None:
    """Measure as one rank: costs of each model, and for each link its speed and the step of each model."""
    import torch

    from samebits.cluster import collectives
    from samebits.config.load import load
    from samebits.cores import num_cores
    from samebits.engine.assemble import make_job
    from samebits.launch.start import join_world, rank_assignment
    from samebits.parallel.exchange.link import measure_link
    from samebits.recipes.catalog import find
    from samebits.scaling.measure import time_steps
    from samebits.scaling.step_time.costs import costs_to_json, message_costs, passes_of

    torch.set_num_threads(1)
    links, rank = options.links.split(","), options.rank
    found = find(str(RECIPE))
    config = load(found.config_class, found.layers, []).config
    num_busy = num_cores() if options.per_core else None
    results: Result = {"steps": {}, "links": {}, "costs": {}}
    use_link(links[0], rank)  # before there are connections
    with join_world(rank_assignment(None, options.init, rank, options.size), config) as world:

        def build_as(name: str) -> Any:
            os.environ["STEP_MODEL"] = name
            return found.build(config, {})

        jobs = {name: make_job(config, lambda name=name: build_as(name), world) for name in models_of(options)}
        for link in links:
            use_link(link, rank)
            collectives.barrier(world, 60)
            results["links"][link] = asdict(measure_link(world))
            for name, job in jobs.items():
                costs, steps = [], list[float]()
                for _ in range(options.rounds):
                    costs.append(passes_of(config, lambda name=name: build_as(name), world, num_busy))
                    timings = time_steps(job, options.steps)
                    gathered = collectives.all_gather_object(world, [timing.step_s for timing in timings])
                    # Ranks that share a core do not begin a step at the same time, and the longest step of all ranks
                    # is longer than the time from one step to the next.
                    steps += map(mean, zip(*gathered, strict=True))
                results["steps"][f"{name}, {link}"] = median(steps)
                results["costs"][f"{name}, {link}"] = costs_to_json(middle(costs))
        use_link(NO_LIMIT if links[0] != "loopback" else "loopback", rank)
        collectives.barrier(world, 60)
        local, message_s = message_costs(world, num_busy)
        results["messages"] = {"local": local and asdict(local), "message_s": message_s}
        if world.is_main:
            options.worker.write_text(json.dumps(results), encoding="utf-8")


def middle(costs: list[Any]) -> Any:
    """Return the median of each cost of a process."""
    from samebits.scaling.step_time.model import StepCosts

    names = ("reading_s", "compute_s", "update_s", "add_s_per_byte")
    return StepCosts(*(median(getattr(each, name) for each in costs) for name in names), None)


def models_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the models."""
    return SLEEPING_MODELS if options.sleep_ms else MODELS


def use_link(link: str, rank: int) -> None:
    """Give this host another link. The processes are root in their own namespaces."""
    from benchmarks.delayed_links import DEVICE
    from tests.cluster.hosts import NET

    if link == "loopback":
        return
    route = ["ip", "route", "replace", f"{NET}.0/24", "dev", DEVICE if link == DELAY else "eth0"]
    subprocess.run([*route, "src", f"{NET}.{rank + 1}"], check=True)
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True, check=False)
    if link in HELD:
        shape = ["tbf", "rate", HELD[link], "burst", BURST[link], "latency", "50ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", *shape], check=True)


def measure(size: int, options: argparse.Namespace, work: Path, is_loopback: bool) -> Result:
    """Run the workers of one world, on one host or on a host each."""
    from benchmarks.delayed_links import __file__ as relay
    from tests.cluster.hosts import hosts

    out = work / f"{size}-{is_loopback}.json"
    environ = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "STEP_SLEEP_MS": str(options.sleep_ms),
    }
    links = [link for link in LINKS if (link == "loopback") is is_loopback]
    command = [sys.executable, "-m", "benchmarks.step_model", "--worker", str(out), "--steps", str(options.steps)]
    command += ["--links", ",".join(links), "--size", str(size), "--sleep-ms", str(options.sleep_ms)]
    command += ["--rounds", str(options.rounds)] + ["--per-core"] * options.per_core
    with ExitStack() as stack:
        machines = stack.enter_context(hosts(1 if is_loopback else size, work))
        if not is_loopback:
            names = [host.name for host in machines]
            started = [sys.executable, relay, DELAY.split()[0], *names]
            running = stack.enter_context(subprocess.Popen(started, stdout=subprocess.PIPE, text=True))
            stack.callback(running.kill)
            assert running.stdout is not None
            running.stdout.readline()  # its devices are there
        init = "tcp://127.0.0.1:29533" if is_loopback else "tcp://n1:29533"
        workers = [
            machines[0 if is_loopback else rank].start(*command, "--rank", rank, "--init", init, env=environ, cwd=ROOT)
            for rank in range(size)
        ]
        said = [process.communicate(timeout=550)[0] for process in workers]
    if any(process.returncode for process in workers):
        raise SystemExit("\n".join(said))
    found: Result = json.loads(out.read_text(encoding="utf-8"))
    return found


def predicted(results: Result, model: str, link: str, size: int, *, per_core: bool) -> Any:
    """Predict a step from the costs and links that the processes have measured."""
    from samebits.cores import num_cores
    from samebits.data.micro_batches import num_micro_batches
    from samebits.parallel.exchange.link import Link
    from samebits.scaling.step_time.costs import costs_from_json
    from samebits.scaling.step_time.model import MachineGroup, predict

    config, on_meta = loaded(model)
    from samebits.scaling.step_time.traffic import count_traffic

    measured = num_cores() if per_core else size
    nodes, per_node = (1, size) if link == "loopback" else (size, 1)
    machines = MachineGroup(nodes, per_node, measured / nodes, Link(**results["links"][link]))
    leaves = num_micro_batches(config.global_batch, config.micro_batch)
    traffic = count_traffic(config, on_meta, size, per_node)
    costs = costs_from_json(results["costs"][f"{model}, {link}"])
    messages = results["messages"]
    costs = replace(costs, local=Link(**messages["local"]), message_s=messages["message_s"])
    return predict(costs, machines, traffic, leaves)


def loaded(name: str) -> tuple[Any, Any]:
    """Return the recipe's settings, and a model without memory."""
    from samebits.config.load import load
    from samebits.recipes.catalog import find

    os.environ["STEP_MODEL"] = name
    found = find(str(RECIPE))
    config = load(found.config_class, found.layers, []).config
    return config, found.build(config, {}).model.to("meta")


def main() -> int:
    from tests.cluster.hosts import why_not

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps to time in each round of a setting")
    parser.add_argument("--rounds", type=int, default=3, help="times to measure the parts of a step, and then steps")
    parser.add_argument("--sizes", type=lambda text: [*map(int, text.split(","))], default=[*SIZES], help="processes")
    parser.add_argument("--per-core", action="store_true", help="measure the parts in as many processes as cores")
    parser.add_argument("--sleep-ms", type=float, default=0, help="passes that sleep instead of computing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    for name in ("--links", "--init"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    for name in ("--rank", "--size"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    if reason := why_not():
        parser.error(reason)
    with tempfile.TemporaryDirectory() as work:
        found = {(size, here): measure(size, options, Path(work), here)
                 for size in options.sizes for here in (True, False)}  # fmt: skip
    show(found, options)
    return 0


def show(found: dict[tuple[int, bool], Result], options: argparse.Namespace) -> None:
    """Print the measured parts of each world, and the table."""
    from samebits.parallel.exchange.link import Link

    for (size, is_loopback), results in found.items():
        print(f"{size} processes, {'one host' if is_loopback else 'a host each'}:")
        for name, costs in results["costs"].items():
            texts = [
                f"{key.removesuffix('_s')} {1e3 * costs[key]:.1f} ms" for key in ("reading_s", "compute_s", "update_s")
            ]
            texts.append(f"adds {1e-9 / costs['add_s_per_byte']:.1f} GB/s")
            print(f"  {name}: {', '.join(texts)}")
        messages = results["messages"]
        print(f"  local {Link(**messages['local'])}, a message {1e6 * messages['message_s']:.0f} us")
        print("  " + "; ".join(f"{name}: {Link(**values)}" for name, values in results["links"].items()))
    print("\n| model | processes | link | predicted, ms | measured, ms | predicted / measured | largest part | |")
    print("|---|---|---|---|---|---|---|---|")
    hits = total = 0
    for model in models_of(options):
        for size in options.sizes:
            for link in LINKS:
                results = found[size, link == "loopback"]
                expected = predicted(results, model, link, size, per_core=options.per_core)
                measured_s = results["steps"][f"{model}, {link}"]
                ratio = expected.total_s / measured_s
                total, hits = total + 1, hits + (abs(ratio - 1) <= BAR)
                print(f"| {model} | {size} | {link} | {1e3 * expected.total_s:.1f} | {1e3 * measured_s:.1f} "
                      f"| {ratio:.2f} | {expected.largest} | {'' if abs(ratio - 1) <= BAR else 'miss'} |")  # fmt: skip
    print(f"\n{hits} of {total} within {BAR:.0%}")


if __name__ == "__main__":
    raise SystemExit(main())
