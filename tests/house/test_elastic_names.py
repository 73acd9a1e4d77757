"""Private names of torch's elastic agent and rendezvous in samebits.launch: a fixed list, and torch still has each."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import api, local_elastic_agent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

MODULES = (api, local_elastic_agent, multiprocessing_api, dynamic_rendezvous)
# A new torch may change any of these without notice. Before one is added here, look for a public way; when torch
# changes one, write a supervisor of our own instead (ADR 4).
NAMES = {
    # LocalElasticAgent, overridden or called
    "_construct_event", "_exit_barrier", "_monitor_workers", "_rendezvous", "_restart_workers",
    # LocalElasticAgent, read or written
    "_pcontext", "_pc", "_ret_vals", "_remaining_restarts", "_worker_group",
    # DynamicRendezvousHandler and its state
    "_NodeDesc", "_RendezvousExitOp", "_RendezvousState", "_op_executor", "_state_holder", "_stop_heartbeats",
}  # fmt: skip


def private_names(text: str) -> set[str]:
    """Private names in a module of ours that belong to torch: imported, inherited, or read from another object."""
    tree = ast.parse(text)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed.elastic"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            found |= {
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
        elif isinstance(node, ast.ClassDef) and node.bases:
            found |= _inherited(node)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def _inherited(node: ast.ClassDef) -> set[str]:
    """Methods that override torch's, and attributes of self that the class itself does not create."""
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    overridden = set(methods) & set(dir(local_elastic_agent.LocalElasticAgent))
    own = {
        ast.unparse(each) for each in ast.walk(methods.get("__init__", ast.Pass())) if isinstance(each, ast.Attribute)
    }
    used = {
        each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
    }
    return overridden | {name for name in used if f"self.{name}" not in own and name not in methods}


def test_launch_uses_the_listed_private_names_and_no_others(repo: Path) -> None:
    files = [repo / "src/samebits/launch/agent.py", *sorted((repo / "src/samebits/launch/nodes").glob("*.py"))]
    assert set().union(*(private_names(path.read_text(encoding="utf-8")) for path in files)) == NAMES


def test_only_the_agent_and_its_rendezvous_subclass_torchs_elastic_package(repo: Path) -> None:
    users = [
        path for path in (repo / "src" / "samebits").rglob("*.py") if "import LocalElasticAgent" in path.read_text()
    ]
    users += [
        path for path in (repo / "src" / "samebits").rglob("*.py") if "dynamic_rendezvous import" in path.read_text()
    ]
    assert sorted(path.name for path in users) == ["agent.py", "rendezvous.py", "state.py"]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_torch_still_has_the_name(name: str) -> None:
    assert any(name in inspect.getsource(module) for module in MODULES), f"torch no longer has {name}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo\n", "_RoleInstanceInfo"),
        ("class A(B):\n    def _initialize_workers(self): ...\n", "_initialize_workers"),
        ("class A(B):\n    def go(self): return self._total_execution_time\n", "_total_execution_time"),
        ("class A(B):\n    def go(self): return self.inner._keep_alive_timer\n", "_keep_alive_timer"),
        ("x = getattr(a, '_pc', None)\n", "_pc"),
    ],
)
def test_another_private_name_is_noticed(text: str, name: str) -> None:
    assert private_names(text) == {name}
