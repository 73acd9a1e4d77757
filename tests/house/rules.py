"""The rules of the house for source files. Each takes the root of a checkout and returns what breaks it.

`test_rules.py` holds the checkout to them, and breaks each on purpose to see that it bites.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HARD_LIMIT_LINES = 400
SOFT_LIMIT_LINES = 300
FUNCTION_LINES = 60
PAGE_LINES = 80
PAGES = ("lockstep/engine/loop.py", "lockstep/engine/step.py")
NAMELESS = {"util", "utils", "common", "misc", "helper", "helpers", "tools", "core"}
RANK_CALLS = {"get_rank", "get_world_size", "get_node_local_rank", "get_global_rank"}
RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(SLURM|OMPI|PMIX?|TORCHELASTIC)_.*"
)
PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OBJECT_COLLECTIVES = {"gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"}
OBJECT_COLLECTIVES |= {"send_object_list", "recv_object_list"}
# torch's rendezvous wants its own state as a pickle; that one never leaves the process.
OWN_PICKLES = {"lockstep/launch/nodes/state.py"}
SPEAKERS = (
    "lockstep/cli/",
    "lockstep/doctor/",
    "lockstep/report/",
    "lockstep/cluster/",
    "lockstep/launch/",
    "lockstep/watchdog/",
    "lockstep/__main__.py",
)
RECURSIVE_DELETES = {"rmtree", "removedirs", "move"}
SUDDEN_ENDS = (
    "lockstep/cluster/abort.py",
    "lockstep/cluster/signals.py",
    "lockstep/launch/cleanup.py",
    "lockstep/launch/supervisor.py",
    "lockstep/launch/worker.py",
)
MACHINE_PATH = re.compile(r"(?<![\w.:/~}])/(home|root|Users|mnt|media|work|scratch|opt|tmp|farm)/\w[\w./-]*")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".ini", ".cfg", ".sh", ".html", ""}


def sources(root: Path, *folders: str) -> Iterator[tuple[str, Path]]:
    """Python files below the folders, with their names relative to the root."""
    for folder in folders or ("lockstep", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def long_files(root: Path, limit: int = HARD_LIMIT_LINES) -> list[str]:
    """Files that nobody reads to the end."""
    counts = ((name, len(path.read_text().splitlines())) for name, path in sources(root))
    return [f"{name}: {count} lines, {limit} at most" for name, count in counts if count > limit]


def long_functions(root: Path) -> list[str]:
    """Functions longer than a screen; their docstring does not count."""
    problems = []
    for name, path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1 - len(_docstring_lines(node))
                if lines > FUNCTION_LINES:
                    problems.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, {FUNCTION_LINES} at most")
    return problems


def long_pages(root: Path) -> list[str]:
    """The step and the loop, each longer than a page of code (blank lines, comments and docstrings don't count)."""
    problems = []
    for name in PAGES:
        path = root / name
        if not path.exists():
            problems.append(f"{name}: not there")
        elif (count := _code_lines(path)) > PAGE_LINES:
            problems.append(f"{name}: {count} lines of code, a page has {PAGE_LINES}")
    return problems


def full_inits(root: Path) -> list[str]:
    """Anything in an `__init__.py` but the root's: re-exports make import circles."""
    return [
        f"{name}: not empty"
        for name, path in sources(root)
        if path.name == "__init__.py" and name != "lockstep/__init__.py" and path.read_text().strip()
    ]


def nameless_places(root: Path) -> list[str]:
    """Folders and files that say nothing of what they hold."""
    return [
        f"{name}: {part} says nothing of what it holds"
        for name, path in sources(root)
        for part in path.relative_to(root).with_suffix("").parts
        if part in NAMELESS
    ]


def ranks_asked_for(root: Path) -> list[str]:
    """Who asks torch for its rank, where a World is to be handed in."""
    problems = []
    for name, path in sources(root, "lockstep"):
        if name.startswith(("lockstep/cluster/", "lockstep/launch/", "lockstep/watchdog/")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Attribute) and node.attr in RANK_CALLS
            imported = isinstance(node, ast.ImportFrom) and any(item.name in RANK_CALLS for item in node.names)
            if called or imported:
                problems.append(f"{name}:{node.lineno}: asks torch for the rank; take a World")
    return problems


def ranks_read_from_environment(root: Path) -> list[str]:
    """Who reads RANK and its like besides cluster/env.py."""
    problems = []
    for name, path in sources(root, "lockstep"):
        if name in ("lockstep/cluster/env.py", "lockstep/cluster/schedulers.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            variable = _variable_read(node)
            if variable and RANK_VARIABLES.fullmatch(variable):
                problems.append(f"{name}:{node.lineno}: reads {variable}; only cluster/env.py does")
    return problems


def stray_speech(root: Path) -> list[str]:
    """Who writes to the console but those whose work it is."""
    problems = []
    for name, path in sources(root, "lockstep"):
        if name.startswith(SPEAKERS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "sys.stdout.write",
                "sys.stderr.write",
            ):
                problems.append(f"{name}:{node.lineno}: speaks; hand it to report or cli")
    return problems


def borrowed_names(root: Path) -> list[str]:
    """`from lockstep.x import Name` where x itself has Name from somewhere else."""
    problems = []
    for name, path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("lockstep."):
                continue
            target = root / node.module.replace(".", "/")
            if target.is_dir():
                known = {item.stem for item in target.iterdir()}
            elif target.with_suffix(".py").exists():
                known = _defined(target.with_suffix(".py"))
            else:
                known = set()
            problems += [
                f"{name}:{node.lineno}: {node.module} does not define {item.name}"
                for item in node.names
                if item.name not in known
            ]
    return problems


def missing_docstrings(root: Path) -> list[str]:
    """Public modules, classes, functions and methods of the package that nobody explained."""
    problems = []
    for name, path in sources(root, "lockstep"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and not ast.get_docstring(tree):
            problems.append(f"{name}:1: the module has no docstring")
        problems += [f"{name}:{node.lineno}: {node.name} has no docstring" for node in _public(tree)]
    return problems


def old_words(root: Path) -> list[str]:
    """Names with "iter": it means a step to some and a micro-batch to others."""
    problems = []
    for name, path in sources(root, "lockstep"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            word = _named(node)
            if (
                word
                and {"iter", "iters", "iteration", "iterations"} & set(word.strip("_").split("_"))
                and word != "__iter__"
            ):
                problems.append(f"{name}:{node.lineno}: {word}; say step, micro_batch or epoch")
    return problems


def machine_paths(root: Path) -> list[str]:
    """Paths that are there on one machine only."""
    problems = []
    for path in _texts(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if found := MACHINE_PATH.search(line):
                problems.append(f"{path.relative_to(root)}:{number}: {found.group()} is a path of one machine")
    return problems


def twin_tests(root: Path) -> list[str]:
    """Files of tests with one name, which pytest can't collect in one run."""
    places: dict[str, list[str]] = {}
    for name, path in sources(root, "tests"):
        if path.name.startswith("test_"):
            places.setdefault(path.name, []).append(name)
    return [f"one name for two: {' '.join(names)}" for names in places.values() if len(names) > 1]


def pickles(root: Path) -> list[str]:
    """Calls that unpickle, or that send pickles to other processes: these run whatever a stranger has put in."""
    problems = []
    for name, path in sources(root, "lockstep"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in PICKLE_MODULES:
                problems.append(f"{name}:{node.lineno}: imports from {node.module}; use cluster/codec.py or JSON")
            if not isinstance(node, ast.Call) or name in OWN_PICKLES:
                continue
            called = ast.unparse(node.func)
            module, _, function = called.rpartition(".")
            safe = {(word.arg, ast.unparse(word.value)) for word in node.keywords}
            # Our own `collectives` of the same names send JSON and tensors.
            unsafe = module in PICKLE_MODULES or (function in OBJECT_COLLECTIVES and module != "collectives")
            unsafe = unsafe and not function.endswith("Error")
            unsafe = unsafe or (called == "torch.load" and ("weights_only", "True") not in safe)
            unsafe = unsafe or (function == "load" and ("allow_pickle", "True") in safe)
            if unsafe:
                problems.append(f"{name}:{node.lineno}: {called} pickles; use cluster/codec.py, JSON or safetensors")
    return problems


def recursive_deletes(root: Path) -> list[str]:
    """Recursive deletes outside of `lockstep/scratch.py`, which deletes only what a process of ours made."""
    return [
        f"{name}:{node.lineno}: {_call(node)} deletes recursively; use lockstep/scratch.py"
        for name, node in _calls(root)
        if name != "lockstep/scratch.py" and _call(node).rpartition(".")[2] in RECURSIVE_DELETES
    ]


def sudden_ends(root: Path) -> list[str]:
    """`os._exit` and `atexit` in modules where nobody has thought about the exit code."""
    return [
        f"{name}:{node.lineno}: {_call(node)} may hide how a command ends; only {', '.join(SUDDEN_ENDS)} may"
        for name, node in _calls(root)
        if name not in SUDDEN_ENDS and _call(node) in ("os._exit", "atexit.register", "_exit", "register")
    ]


def unsafe_starts(root: Path) -> list[str]:
    """Python processes that would import a torch.py from the current folder."""
    problems = []
    for name, path in sources(root, "lockstep"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                second = node.elts[1] if len(node.elts) > 1 else None
                if not (isinstance(second, ast.Constant) and second.value == "-P"):
                    problems.append(f"{name}:{node.lineno}: starts Python without -P; use launch/commands.py")
    return problems


def unnamed_encodings(root: Path) -> list[str]:
    """Text files in the encoding of a terminal's locale: another machine may have another one."""
    problems = []
    for name, node in _calls(root):
        words = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in words:
            continue
        method = _call(node).rpartition(".")[2]
        mode = _mode(node, method)
        is_text = method in ("read_text", "write_text") or (mode is not None and "b" not in mode)
        is_text |= isinstance(words.get("text"), ast.Constant) and method in ("run", "Popen", "check_output")
        if is_text:
            problems.append(f"{name}:{node.lineno}: {_call(node)} without encoding=")
    return problems


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


def _calls(root: Path) -> Iterator[tuple[str, ast.Call]]:
    for name, path in sources(root, "lockstep"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield name, node


def _call(node: ast.Call) -> str:
    return ast.unparse(node.func)


ALL = (
    recursive_deletes,
    sudden_ends,
    unsafe_starts,
    unnamed_encodings,
    long_files,
    long_functions,
    long_pages,
    full_inits,
    nameless_places,
    ranks_asked_for,
    ranks_read_from_environment,
    stray_speech,
    borrowed_names,
    missing_docstrings,
    old_words,
    machine_paths,
    twin_tests,
    pickles,
)


def _texts(root: Path) -> Iterator[Path]:
    for top in ("lockstep", "tests", "benchmarks", "docs", ".ci"):
        for path in sorted((root / top).rglob("*")):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path
    yield from (path for path in sorted(root.iterdir()) if path.is_file() and path.suffix in TEXT)


def _docstring_lines(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return range(body[0].lineno, (body[0].end_lineno or 0) + 1)
    return range(0)


def _code_lines(path: Path) -> int:
    text = path.read_text()
    documented = {line for node in ast.walk(ast.parse(text)) for line in _docstring_lines(node)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(text.splitlines(), start=1)
    )


def _variable_read(node: ast.AST) -> str | None:
    """The name of the environment variable that this expression reads, if it does."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and "environ" in ast.unparse(node.value):
        key = node.slice
    elif isinstance(node, ast.Call) and re.search(r"environ\.(get|pop)$|getenv$", ast.unparse(node.func)) and node.args:
        key = node.args[0]
    elif isinstance(node, ast.Compare) and "environ" in ast.unparse(node.comparators[-1]):
        key = node.left
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        written_twice = any(ast.unparse(mark).endswith(("overload", ".setter")) for mark in node.decorator_list)
        if not ast.get_docstring(node) and not written_twice:
            yield node
        if isinstance(node, ast.ClassDef):
            yield from _public(node)


def _named(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None
