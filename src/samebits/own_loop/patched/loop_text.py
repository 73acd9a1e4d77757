"""What the text of a script's training loop counts, and what its function computes from that.

A loop that ends by a count of passes ends elsewhere in each world: a step has several passes on a process, whose number
depends on the processes. `enumerate()` of the script counts steps (`script.py`). A counter such as `step += 1` counts
passes, which only the text of the loop shows.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType

from samebits.frames import is_user
from samebits.own_loop.scripts import Loop, names, number_of, place_of

_TRAINING = ("backward", "step", "clip_grad_norm_", "clip_grad_value_", "requires_grad_")
_GENERATOR = 0x20  # inspect.CO_GENERATOR


class LoopText:
    """The source of the loop that reads batches, from a stack of frames, innermost first.

    Attributes:
        divides: Whether its function divides by the number of `enumerate()`: a mean over passes, not over steps.
        sets_rate: Whether the loop computes a learning rate from that number, and so needs that of steps.
        ends_by_number: Whether it ends by that number, before it trains on a batch.
        counted_end: What ends it by a count of passes: the line "FILE:NUMBER" of the counter; empty if nothing does.
        instead: What to write instead of that line.
        reader: The name that it has for `data`, the DataLoader.
    """

    def __init__(self, frames: Iterable[FrameType], data: object) -> None:
        self.divides = self.sets_rate = self.ends_by_number = False
        self.counted_end = ""
        self.instead = ""
        self.reader = ""
        tests: list[ast.expr] = []  # of loops around it
        loop: Loop | None = None
        for frame in [each for each in frames if is_user(each.f_code.co_filename)]:
            scope, loops = place_of(frame.f_code.co_filename, frame.f_lineno)
            # A generator or a method of a reader passes batches on to the loop that trains.
            if loop is None and loops and not passes_on(frame.f_code):
                loop = loops[0]
                file = frame.f_code.co_filename
                line = frame.f_lineno
                function = scope
            if loop is not None:
                self.reader = self.reader or _name_in(frame, data)
                tests += [each.test for each in loops if isinstance(each, ast.While)]
                tests += [test for each in loops if each is not loop for test in ends(each.body)]
        if loop is not None:
            number = number_of(loop)
            self.divides = any(number in names(each) for each in _divisors(function))
            self.sets_rate = any(number in names(each) for each in _rates(loop))
            places = [i for i, each in enumerate(loop.body) if "backward" in ast.unparse(each)]
            early = loop.body[: places[0]] if places else loop.body
            self.ends_by_number = any(number in _compared(each) for each in ends(early))
            counter = _counter(loop, line, tests, number, loop.body[len(early) :])
            self.counted_end = f"{file}:{counter.lineno}" if counter is not None else ""
            count = f"{self.reader or 'loader'}.step"
            name = ast.unparse(counter.target) if isinstance(counter, ast.AugAssign) else ""
            self.instead = f"{name} = {count}" if name else _while(counter, count)


def _while(counter: ast.AST | None, count: str) -> str:
    """Return what to write instead of a loop over numbers: one that ends by steps, with the same number."""
    if not isinstance(counter, ast.For):
        return f"while {count} < STEPS:"
    is_range = isinstance(counter.iter, ast.Call) and ast.unparse(counter.iter.func) == "range"
    stop = ast.unparse(counter.iter.args[:2][-1]) if is_range else "STEPS"  # type: ignore[attr-defined]
    name = ast.unparse(counter.target)
    return f"while {count} < {stop}:" + (f"\n    {name} = {count}" if name != "_" else "")


def makes_list(frames: Iterable[FrameType], data: object) -> bool:
    """Return whether the script makes a list of the batches of `data`, as in `len(list(loader))`: it trains on none."""
    frame = next(each for each in frames if is_user(each.f_code.co_filename))
    return f"list({_name_in(frame, data)})" in linecache.getline(
        frame.f_code.co_filename, frame.f_lineno
    )


def sets_training(frames: Iterable[FrameType]) -> bool:
    """Return whether the loop that is about to read batches calls `train()` of a model before its backward pass."""
    frame = next(each for each in frames if is_user(each.f_code.co_filename))
    loops = place_of(frame.f_code.co_filename, frame.f_lineno)[1]
    return (
        bool(loops)
        and ".train()" in ast.unparse(ast.Module(loops[0].body, [])).partition(".backward(")[0]
    )


def _name_in(frame: FrameType, data: object) -> str:
    attributes = {
        f"self.{name}": each
        for name, each in getattr(frame.f_locals.get("self"), "__dict__", {}).items()
    }
    return next((name for name, each in (frame.f_locals | attributes).items() if each is data), "")


def _counter(
    loop: Loop, line: int, tests: Sequence[ast.expr], number: str, late: Sequence[ast.stmt]
) -> Loop | ast.AugAssign | ast.expr | None:
    """Return what ends the loop by a count of passes: a counter, the loop, or a condition; None if nothing does."""
    if isinstance(loop, ast.For) and not loop.lineno <= line <= (loop.iter.end_lineno or 0):
        return loop  # for i in range(...): next(batches)
    sums = [each for each in ast.walk(loop) if isinstance(each, ast.AugAssign)]
    compared = set().union(*map(_compared, [*tests, *ends(loop.body), *_training_tests(loop)]))
    counters = [each for each in sums if ast.unparse(each.target) in compared]
    if counters:
        return counters[0]
    return next((each for each in ends(late) if number in _compared(each)), None)


def _training_tests(loop: Loop) -> Iterator[ast.expr]:
    """Yield the conditions in a loop under which it trains in another way: it clips, steps, or changes the loss."""
    calls = [
        each.func
        for each in ast.walk(loop)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
    ]
    losses = {ast.unparse(each.value) for each in calls if each.attr == "backward"}
    for test in [each for each in ast.walk(loop) if isinstance(each, ast.If)]:
        inner = [each for statement in test.body + test.orelse for each in ast.walk(statement)]
        trains = any(
            each in calls and each.attr in _TRAINING
            for each in inner
            if isinstance(each, ast.Attribute)
        )
        trains |= any(
            "lr" in ast.unparse(each)
            for each in inner
            if isinstance(each, ast.Assign | ast.AugAssign)
        )
        stored = {
            each.id
            for each in inner
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        if trains or stored & losses:
            yield test.test


def passes_on(code: CodeType) -> bool:
    """Return whether a function gives batches to another one: a generator, or a method of an iterator."""
    return bool(code.co_flags & _GENERATOR) or code.co_name in ("__next__", "next", "__iter__")


def _divisors(scope: ast.AST) -> Iterator[ast.expr]:
    for each in ast.walk(scope):
        if isinstance(each, ast.BinOp | ast.AugAssign) and isinstance(each.op, ast.Div):
            yield each.right if isinstance(each, ast.BinOp) else each.value


def _rates(loop: Loop) -> Iterator[ast.expr]:
    """Yield what a loop computes a learning rate from: arguments of a call that gets the optimizer, and such values."""
    for each in ast.walk(loop):
        if isinstance(each, ast.Call):
            arguments = [*each.args, *(keyword.value for keyword in each.keywords)]
            called = ast.unparse(each.func).lower()
            if any(map(_is_optimizer, arguments)) or any(
                word in called for word in ("lr", "sched", "learning_rate")
            ):
                yield from arguments
        elif isinstance(each, ast.Assign) and any(
            is_rate(ast.unparse(target)) for target in each.targets
        ):
            yield each.value


def is_rate(target: str) -> bool:
    """Return whether what is assigned to is a learning rate: lr, self.lr, group["lr"]."""
    return target.rpartition(".")[2] in ("lr", "learning_rate") or target.endswith("['lr']")


def _is_optimizer(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Name | ast.Attribute) and ast.unparse(argument).endswith(
        ("optimizer", "optim")
    )


def _compared(test: ast.expr) -> set[str]:
    """Return what a condition compares, but not by a remainder, as for what happens once in a while."""
    compared = [each for each in ast.walk(test) if isinstance(each, ast.Compare)]
    plain = [
        each for each in compared if not any(isinstance(part, ast.Mod) for part in ast.walk(each))
    ]
    return set().union(*map(names, plain))


def ends(body: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Yield the conditions under which statements leave their loop."""
    for each in body:
        if isinstance(each, Loop | ast.FunctionDef):
            continue  # leaves another one
        if isinstance(each, ast.If) and any(
            isinstance(node, ast.Break | ast.Return) for node in ast.walk(each)
        ):
            yield each.test
        yield from ends(ast.iter_child_nodes(each))
