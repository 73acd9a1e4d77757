"""The checkout follows the house rules, and every rule detects when it is broken."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.house import code_rules, docstring_rules, file_rules, safety_rules

pytestmark = pytest.mark.check

# Each takes the root of a checkout and returns the violations.
Rule = Callable[[Path], Iterable[str]]
Files = str | dict[str, str]  # the text of one file, or of several
RULES: tuple[Rule, ...] = (*file_rules.ALL, *code_rules.ALL, *docstring_rules.ALL, *safety_rules.ALL)

# rule -> (file or a name, text that breaks it, text of the report)
BROKEN: dict[Rule, list[tuple[str, Files, str]]] = {
    file_rules.long_functions: [
        ("tests/test_x.py", "def test_x():\n" + "    x = 1\n" * 80, "test_x has 81 lines"),
        ("samebits/x.py", "class A:\n    async def go(self):\n" + "        x = 1\n" * 90, "go has 91 lines"),
    ],
    file_rules.long_pages: [
        ("samebits/engine/loop.py", "x = 1\n" * 91, "loop.py: 91 lines of code"),
        ("samebits/other.py", "", "step.py: not there"),
    ],
    file_rules.busy_modules: [
        (
            "31 imports",
            {
                "samebits/x.py": "".join(f"from samebits.data.m{number} import f\n" for number in range(30))
                + "from samebits.data import m30\n",
                **{f"samebits/data/m{number}.py": "f = 1\n" for number in range(30)},
                "samebits/data/m30.py": "",
            },
            "samebits/x.py: imports 31 modules of the package",
        )
    ],
    file_rules.full_inits: [("samebits/data/__init__.py", "from samebits.data.order import Order\n", "not empty")],
    file_rules.nameless_places: [
        ("samebits/utils/x.py", "", "utils says nothing"),
        ("samebits/data/helpers.py", "", "helpers says nothing"),
    ],
    code_rules.errors_without_a_fix: [
        ("samebits/data/x.py", "raise SamebitsError('no', given=1)\n", "x.py:1: an error without a fix"),
        ("samebits/data/x.py", "raise SamebitsError('no', fix='')\n", "x.py:1: an error without a fix"),
        ("samebits/data/x.py", "raise errors.SamebitsError('no', **more)\n", "x.py:1: an error without a fix"),
        ("samebits/data/x.py", "class A(SamebitsError): ...\nclass B(A): ...\nB('no')\n", "x.py:3: an error without"),
    ],
    code_rules.ranks_asked_for: [
        ("samebits/engine/x.py", "import torch.distributed as dist\nr = dist.get_rank()\n", "x.py:2: asks"),
        ("samebits/data/x.py", "from torch.distributed import get_world_size\n", "x.py:1: asks"),
    ],
    code_rules.ranks_read_from_environment: [
        ("samebits/engine/x.py", "import os\nr = os.environ['RANK']\n", "reads RANK"),
        ("samebits/engine/x.py", "import os\nr = os.environ.get('LOCAL_RANK', 0)\n", "reads LOCAL_RANK"),
        ("samebits/cluster/world.py", "import os\nr = os.getenv('SLURM_PROCID')\n", "reads SLURM_PROCID"),
        ("samebits/cli/x.py", "import os\nr = 'WORLD_SIZE' in os.environ\n", "reads WORLD_SIZE"),
    ],
    code_rules.stray_speech: [
        ("samebits/engine/x.py", "print('hello')\n", "x.py:1: speaks"),
        ("samebits/data/x.py", "import sys\nsys.stderr.write('hello')\n", "x.py:2: speaks"),
    ],
    code_rules.borrowed_names: [
        ("samebits/engine/x.py", "from samebits.errors import ClassVar\n", "does not define ClassVar"),
        ("tests/test_x.py", "from samebits.gone import Thing\n", "does not define Thing"),
    ],
    code_rules.missing_docstrings: [
        ("samebits/x.py", "x = 1\n", "the module has no docstring"),
        ("samebits/x.py", '"""X."""\ndef f(): ...\n', "x.py:2: f has no docstring"),
        ("samebits/x.py", '"""X."""\nclass A:\n    """A."""\n    def f(self): ...\n', "x.py:4: f has no docstring"),
    ],
    code_rules.imports_of_the_root: [("samebits/x.py", "def f():\n    import samebits\n", "x.py:2: imports samebits")],
    code_rules.twin_classes: [
        (
            "two classes",
            {"samebits/x.py": "class Job: ...\n", "samebits/data/y.py": "x = 1\nclass Job: ...\n"},
            "two classes Job: src/samebits/data/y.py:2 src/samebits/x.py:1",
        ),
        (
            "a class named as a recipe's settings",
            {"samebits/x.py": "class DataConfig: ...\n", "samebits/y.py": "class DataConfig: ...\n"},
            "two classes DataConfig",
        ),
    ],
    code_rules.old_words: [
        ("samebits/x.py", "max_iter = 1\n", "max_iter; say step"),
        ("samebits/x.py", "def train(num_iterations): ...\n", "num_iterations; say step"),
    ],
    file_rules.machine_paths: [
        ("samebits/x.py", f"x = '/{'home'}/anna/data'\n", f"/{'home'}/anna/data is a path"),
        ("docs/x.md", f"see /{'tmp'}/x\n", "docs/x.md:1"),
        ("notes.txt", f"/{'root'}/x\n", "notes.txt:1"),
    ],
    safety_rules.recursive_deletes: [
        ("samebits/cli/x.py", "import shutil\nshutil.rmtree(out)\n", "x.py:2: shutil.rmtree deletes"),
        ("samebits/cli/x.py", "from shutil import rmtree\nrmtree(out)\n", "x.py:2: rmtree deletes"),
    ],
    safety_rules.sudden_ends: [
        ("samebits/cli/x.py", "import os\nos._exit(0)\n", "x.py:2: os._exit may hide"),
        ("samebits/engine/x.py", "import atexit\natexit.register(f)\n", "x.py:2: atexit.register may hide"),
    ],
    safety_rules.unsafe_starts: [
        ("samebits/cli/x.py", "import sys\nwords = [sys.executable, '-m', 'samebits']\n", "x.py:2: starts Python")
    ],
    safety_rules.unnamed_encodings: [
        ("samebits/x.py", "text = path.read_text()\n", "x.py:1: path.read_text without"),
        ("samebits/x.py", "file = path.open('a')\n", "x.py:1: path.open without"),
        ("samebits/x.py", "file = open(path)\n", "x.py:1: open without"),
        ("samebits/x.py", "subprocess.run(words, text=True)\n", "x.py:1: subprocess.run without"),
    ],
    file_rules.twin_tests: [("tests/e2e/test_x.py", "", "tests/e2e/test_x.py tests/unit/test_x.py")],
    safety_rules.pickles: [
        ("samebits/x.py", "import pickle\nx = pickle.loads(b'')\n", "x.py:2: pickle.loads pickles"),
        ("samebits/x.py", "from pickle import loads\n", "x.py:1: imports from pickle"),
        ("samebits/x.py", "dist.all_gather_object([], 1)\n", "dist.all_gather_object pickles"),
        ("samebits/x.py", "import torch\ntorch.load('x')\n", "torch.load pickles"),
        ("samebits/x.py", "import torch\ntorch.load('x', weights_only=False)\n", "torch.load pickles"),
        ("samebits/x.py", "import numpy\nnumpy.load('x', allow_pickle=True)\n", "numpy.load pickles"),
    ],
}

# Docstrings of functions, as they are and as they should be.
NO_ARGS = '"""X."""\ndef f(a, *, b=1, **c):\n    """F.\n\n    Args:\n        a: One.\n    """\n'
NO_METHOD_ARGS = '"""X."""\nclass A:\n    """A."""\n    def f(self, a, b, c):\n        """F."""\n'
STALE_CLASS = '"""X."""\nclass A:\n    """A.\n\n    Args:\n        b: One.\n    """\n    def __init__(self, a): ...\n'
NO_SHAPE = '"""X."""\ndef f(a: Sequence[Tensor] | None):\n    """F."""\n'
NO_SHAPE_RETURNED = '"""X."""\ndef f() -> np.ndarray:\n    """F of (seed, epoch, step)."""\n'
ALIASED = {
    "samebits/x.py": '"""X."""\nFloats = npt.NDArray[np.float64]\n',
    "samebits/y.py": '"""Y."""\nfrom samebits.x import Floats\ndef f(a: Floats):\n    """F."""\n',
}
OFFERED = {"samebits/__init__.py": '"""S."""\nfrom samebits.x import A, f\n'}
BROKEN |= {
    docstring_rules.missing_args: [
        ("a function", OFFERED | {"samebits/x.py": source}, problem)
        for source, problem in (
            (NO_ARGS, "x.py:2: Args of f leave out b, c"),
            (NO_METHOD_ARGS, "x.py:4: Args of f leave out a, b, c"),
            (NO_METHOD_ARGS.replace('"""F."""', '"""See `B.f`."""'), "x.py:4: Args of f leave out a, b, c"),
            (NO_METHOD_ARGS.replace("def f", "def __init__"), "x.py:4: Args of A leave out a, b, c"),
            (NO_METHOD_ARGS.replace("A:", "A(nn.Module):"), "x.py:4: Args of f leave out a, b, c"),
        )
    ],
    docstring_rules.stale_args: [
        ("samebits/x.py", NO_ARGS.replace("a:", "aa:"), "x.py:2: f has no aa"),
        ("samebits/x.py", STALE_CLASS, "x.py:8: A has no b"),
    ],
    docstring_rules.third_person: [
        ("samebits/x.py", '"""Reads x."""\n', "x.py:1: the docstring starts with Reads"),
        ("samebits/x.py", '"""X."""\ndef _f():\n    """Returns x."""\n', "x.py:2: the docstring starts with Returns"),
    ],
    docstring_rules.missing_shapes: [
        ("samebits/x.py", NO_SHAPE, "x.py:2: f names no shape"),
        ("samebits/x.py", NO_SHAPE_RETURNED, "x.py:2: f names no shape"),
        ("an alias", ALIASED, "y.py:3: f names no shape"),
    ],
}

# Text that looks like a violation and is allowed.
ALLOWED: dict[Rule, list[tuple[str, str]]] = {
    code_rules.errors_without_a_fix: [
        ("samebits/data/x.py", '"""X."""\nraise SamebitsError("no", fix="Wait.")\nraise error.with_slots(where=1)\n'),
        ("samebits/data/x.py", '"""X."""\nraise ValueError("no")\n'),
    ],
    safety_rules.recursive_deletes: [("samebits/scratch.py", '"""S."""\nimport shutil\nshutil.rmtree(folder)\n')],
    safety_rules.sudden_ends: [("samebits/launch/worker.py", '"""W."""\nimport os\nos._exit(0)\n')],
    safety_rules.unsafe_starts: [("samebits/x.py", "import sys\nwords = (sys.executable, '-P', '-m', 'samebits')\n")],
    safety_rules.unnamed_encodings: [
        ("samebits/x.py", "text = path.read_text(encoding='utf-8')\nfile = path.open('rb')\n"),
        ("samebits/x.py", "handle = os.open(path, os.O_RDONLY)\nfolder.open()\n"),
    ],
    file_rules.long_functions: [("samebits/x.py", 'def f():\n    """Why.\n' + "    more\n" * 80 + '    """\n')],
    file_rules.full_inits: [("samebits/__init__.py", "x = 1\n")],
    code_rules.stray_speech: [("samebits/report/x.py", "print('hello')\n"), ("tests/test_x.py", "print('hello')\n")],
    code_rules.borrowed_names: [
        ("samebits/x.py", "from samebits.errors import SamebitsError\nfrom samebits import errors\n")
    ],
    code_rules.missing_docstrings: [
        ("samebits/x.py", '"""X."""\ndef _f(): ...\n'),
        ("tests/test_x.py", "def f(): ...\n"),
    ],
    code_rules.ranks_asked_for: [
        ("samebits/cluster/world.py", "import torch.distributed as dist\nr = dist.get_rank()\n")
    ],
    code_rules.ranks_read_from_environment: [
        ("samebits/cluster/env.py", "import os\nr = os.environ['RANK']\n"),
        ("samebits/launch/launch.py", "import os\nos.environ['RANK'] = '1'\n"),
        ("samebits/cli/x.py", "import os\nr = os.environ.get('SAMEBITS_DEBUG')\n"),
    ],
    code_rules.twin_classes: [
        ("samebits/x.py", '"""X."""\nclass _A: ...\nclass _A: ...\n'),
        (
            "samebits/recipes/a/config.py",
            '"""X."""\nclass DataConfig:\n    """D."""\n\nclass DataConfig:\n    """D."""\n',
        ),
    ],
    code_rules.old_words: [("samebits/x.py", "class A:\n    def __iter__(self): return iter([])\n")],
    safety_rules.pickles: [
        ("samebits/x.py", "import torch\nimport pickle\ntorch.load('x', weights_only=True)\n"),
        ("samebits/x.py", "import pickle\nraise pickle.UnpicklingError('x')\n"),
        ("tests/test_x.py", "import pickle\nx = pickle.loads(b'')\n"),
    ],
    docstring_rules.missing_args: [
        ("samebits/__init__.py", '"""S."""\nfrom samebits.y import f\n\n\n' + NO_ARGS.partition("\n")[2]),
        ("samebits/x.py", NO_METHOD_ARGS),
    ],
    docstring_rules.missing_shapes: [
        ("samebits/x.py", NO_SHAPE.replace("F.", f"F: {shape}."))
        for shape in ("(N, C, H, W)", "(n,)", "(..., 2)", "(N, K + T, H / 4)", "a scalar", "any shape")
    ],
    file_rules.machine_paths: [("docs/x.md", f"https://x.org/{'home'}/a and file:///{'tmp'}/store and ~/{'work'}/a\n")],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_checkout_follows_the_rule(repo: Path, rule: Rule) -> None:
    assert [*rule(repo)] == []


def _cases(table: dict[Rule, list]) -> list:
    return [
        pytest.param(rule, *case, id=f"{rule.__name__}-{case[0]}") for rule, cases in table.items() for case in cases
    ]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small checkout that follows every rule."""
    for name, text in {
        "samebits/__init__.py": "",
        "samebits/errors.py": '"""E."""\nfrom typing import ClassVar\nclass SamebitsError(Exception):\n    """E."""\n',
        "samebits/engine/loop.py": '"""L."""\n',
        "samebits/engine/step.py": '"""S."""\n',
        "tests/unit/test_x.py": "",
    }.items():
        _write(tmp_path, name, text)
    for rule in RULES:
        assert [*rule(tmp_path)] == [], rule.__name__
    return tmp_path


def _write(root: Path, name: str, text: str) -> None:
    path = root / ("src" if name.startswith("samebits/") else "") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("rule", "name", "text", "says"), _cases(BROKEN))
def test_a_broken_rule_is_reported(house: Path, rule: Rule, name: str, text: Files, says: str) -> None:
    for file, content in text.items() if isinstance(text, dict) else [(name, text)]:
        _write(house, file, content)
    if says.endswith("not there"):
        (house / "src/samebits/engine/step.py").unlink()
    problems = [*rule(house)]
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize(("rule", "name", "text"), _cases(ALLOWED))
def test_what_only_looks_like_a_violation_is_allowed(house: Path, rule: Rule, name: str, text: str) -> None:
    _write(house, name, text)
    assert [*rule(house)] == []


def test_every_rule_is_broken_on_purpose() -> None:
    assert set(BROKEN) == set(RULES)
