"""No code of strangers, no lost data, no locale. `test_rules.py` holds the checkout to these rules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import called, calls, nodes, sources

PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OBJECT_COLLECTIVES = {"gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"}
OBJECT_COLLECTIVES |= {"send_object_list", "recv_object_list"}
# torch's rendezvous wants its own state as a pickle, which never leaves the process. `samebits.launch` sends a function
# to its own children.
OWN_PICKLES = {"src/samebits/launch/subcommand.py"}
RECURSIVE_DELETES = {"rmtree", "removedirs", "move"}
SUDDEN_ENDS = (
    "src/samebits/cluster/abort.py",
    "src/samebits/cluster/signals.py",
    "src/samebits/launch/cleanup.py",
    "src/samebits/launch/supervisor.py",
    "src/samebits/launch/worker.py",
    "src/samebits/own_loop/current.py",  # leaves the process group of a script, whose exit code stays
    "src/samebits/own_loop/ending.py",  # a script whose loop ended inside a step has no other way to an exit code
    "src/samebits/portable/scripts.py",  # torch leaves no dispatch mode at the interpreter's end
    "src/samebits/replay/script_trial.py",  # a script may make fewer steps than a check waits for
)


def pickles(root: Path) -> Iterator[str]:
    """Calls that unpickle, or that send pickles to other processes: these run whatever a stranger has put in."""
    for name, path in sources(root, "src"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module in PICKLE_MODULES:
                yield f"{name}:{node.lineno}: imports from {node.module}; use cluster/collectives.py or JSON"
            if not isinstance(node, ast.Call) or name in OWN_PICKLES:
                continue
            callee = called(node)
            module, _, function = callee.rpartition(".")
            safe = {(word.arg, ast.unparse(word.value)) for word in node.keywords}
            # Our own `collectives` of the same names send JSON and tensors.
            unsafe = module in PICKLE_MODULES or (function in OBJECT_COLLECTIVES and module != "collectives")
            unsafe = unsafe and not function.endswith("Error")
            unsafe = unsafe or (callee == "torch.load" and ("weights_only", "True") not in safe)
            unsafe = unsafe or (function == "load" and ("allow_pickle", "True") in safe)
            if unsafe:
                yield (f"{name}:{node.lineno}: {callee} pickles; use cluster/collectives.py, JSON or safetensors")


def recursive_deletes(root: Path) -> list[str]:
    """Recursive deletes outside of `src/samebits/scratch.py`, which deletes only what a process of ours made."""
    return [
        f"{name}:{node.lineno}: {called(node)} deletes recursively; use src/samebits/scratch.py"
        for name, node in calls(root)
        if name != "src/samebits/scratch.py" and called(node).rpartition(".")[2] in RECURSIVE_DELETES
    ]


def sudden_ends(root: Path) -> list[str]:
    """`os._exit` and `atexit` outside of the modules that handle the exit code."""
    return [
        f"{name}:{node.lineno}: {called(node)} may hide how a command ends; only {', '.join(SUDDEN_ENDS)} may"
        for name, node in calls(root)
        if name not in SUDDEN_ENDS and called(node) in ("os._exit", "atexit.register", "_exit", "register")
    ]


def unsafe_starts(root: Path) -> Iterator[str]:
    """Python processes that would import a torch.py from the current folder."""
    for name, path in sources(root, "src"):
        if name == "src/samebits/replay/check_script.py":  # it starts a script as its user does
            continue
        for node in nodes(path):
            if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                second = node.elts[1] if len(node.elts) > 1 else None
                if not (isinstance(second, ast.Constant) and second.value == "-P"):
                    yield f"{name}:{node.lineno}: starts Python without -P; use launch/subcommand.py"


def unnamed_encodings(root: Path) -> Iterator[str]:
    """Text files in the encoding of a terminal's locale: another machine may have another one."""
    for name, node in calls(root):
        words = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in words:
            continue
        method = called(node).rpartition(".")[2]
        mode = _mode(node, method)
        is_text = method in ("read_text", "write_text") or (mode is not None and "b" not in mode)
        is_text |= isinstance(words.get("text"), ast.Constant) and method in ("run", "Popen", "check_output")
        if is_text:
            yield f"{name}:{node.lineno}: {called(node)} without encoding="


def _mode(node: ast.Call, method: str) -> str | None:
    """The mode in which a call opens a file; None if it opens none."""
    if method not in ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile"):
        return None
    if ast.unparse(node.func) in ("os.open", "Image.open", "gzip.open", "lmdb.open", "webbrowser.open"):
        return None
    given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    modes = [item.value for item in given if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    modes = [mode for mode in modes if re.fullmatch(r"[rwaxbt+]{1,3}", mode)]
    if modes:
        return modes[0]
    return "r" if isinstance(node.func, ast.Name) else None


ALL = (pickles, recursive_deletes, sudden_ends, unsafe_starts, unnamed_encodings)
