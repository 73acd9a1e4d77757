"""Whether a script ends its training, or sets a learning rate, by what its training loop computes, as its text shows.

Such a number, as the loss of an epoch, is that of the passes of one process. So it depends on the number of processes,
and a single process has nothing to compare it with.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

from samebits.frames import is_user
from samebits.own_loop.patched.loop_text import ends, is_rate, passes_on
from samebits.own_loop.scripts import Loop, names, number_of, place_of

_EVALUATES = (
    "'val",
    "'test",
    "'eval",
    "'dev",
)  # in a condition: what follows is that of an evaluation


def decision(frames: Iterable[FrameType]) -> tuple[str, str]:
    """Return the name and the line of a number that decides, from a stack of frames, innermost first; empty: none."""
    flow: _Flow | None = None
    owner: object = None
    for frame in [each for each in frames if is_user(each.f_code.co_filename)]:
        file = frame.f_code.co_filename
        this = frame.f_locals.get("self")
        scope, loops = place_of(file, frame.f_lineno)
        if flow is None:
            if not loops or passes_on(frame.f_code):
                continue
            inside = _Flow(loops[0], _batches(loops[0]), ())
            outer = loops[1:]
            inside.follow(loops[0].body * 2)
            flow = _Flow(loops[0], inside.known, outer)
        else:
            known = {each for each in flow.known if each.startswith("self.") and this is owner}
            call = _statement(scope, frame.f_lineno)
            flow = _Flow(call, known | (_targets(call) if flow.returns else set()), loops)
        flow.follow(scope.body)
        if flow.found is not None:
            return flow.found[0], f"{file}:{flow.found[1]}"
        owner = this
    return "", ""


class _Flow:
    """Follows what statements compute from a training loop, in their order.

    Args:
        inner: The training loop, or the statement that calls a function with it.
        gives: The names that it gives a value.
        outer: The loops around it.

    Attributes:
        known: The names that have such a value now.
        found: The name and the line of a decision.
        returns: Whether the function returns such a value.
    """

    def __init__(self, inner: ast.stmt, gives: set[str], outer: Sequence[Loop]) -> None:
        self._inner = inner
        self._gives = gives
        self._outer = outer
        self.known: set[str] = set() if outer or not isinstance(inner, Loop) else set(gives)
        self.found: tuple[str, int] | None = None
        self.returns = False

    def follow(self, body: Iterable[ast.stmt]) -> None:
        """Follow statements."""
        for statement in body:
            self._visit(statement)

    def _visit(self, statement: ast.stmt) -> None:
        if statement is self._inner:
            self.known |= self._gives
        elif isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            self._assign(statement)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
            # An object that is given such a number: losses.update(loss), early_stopping(loss).
            if isinstance(owner, ast.Name | ast.Attribute) and any(map(self._known_in, call.args)):
                self.known.add(ast.unparse(owner))
        elif isinstance(statement, ast.If):
            self._decide(statement)
        elif isinstance(statement, Loop):
            self._repeat(statement)
        elif isinstance(statement, ast.Return):
            self.returns |= statement.value is not None and bool(self._known_in(statement.value))
        elif isinstance(statement, ast.With | ast.Try):
            self.follow(
                each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)
            )

    def _assign(self, statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> None:
        value = statement.value
        targets = _targets(statement)
        if value is not None and self._known_in(value) and not isinstance(value, ast.Dict):
            self.known |= targets
            if any(map(is_rate, targets)):
                self._find(value)
        elif not isinstance(statement, ast.AugAssign):
            self.known -= targets

    def _decide(self, statement: ast.If) -> None:
        is_around = any(each is self._inner for each in ast.walk(statement))
        text = ast.unparse(statement.test)
        if any(word in text for word in _EVALUATES) and not is_around:
            return
        depends = bool(self._known_in(statement.test))
        if depends and (
            any(True for _ in ends([statement])) or "['lr']" in ast.unparse(statement.body)  # type: ignore[arg-type]
        ):
            self._find(statement.test)
        self.follow([*statement.body, *statement.orelse])
        if depends:
            for each in ast.walk(statement):
                self.known |= (
                    _targets(each) if isinstance(each, ast.Assign | ast.AugAssign) else set()
                )

    def _repeat(self, loop: Loop) -> None:
        is_outer = any(each is loop for each in self._outer)
        if isinstance(loop, ast.For):
            self.known = (
                self.known | _targets(loop)
                if self._known_in(loop.iter)
                else self.known - _targets(loop)
            )
        for _ in range(2):  # what one pass has computed is there in the next one
            self.follow(loop.body)
        if is_outer and isinstance(loop, ast.While):
            self._find(loop.test)

    def _known_in(self, node: ast.AST) -> set[str]:
        return names(node) & self.known

    def _find(self, node: ast.expr) -> None:
        """Note a decision by an expression, if it is one of a loop around the training."""
        if self._outer and self.found is None and (found := self._known_in(node)):
            self.found = max(found), node.lineno


def _batches(loop: Loop) -> set[str]:
    """Return the names of what a loop reads."""
    if isinstance(loop, ast.For):
        return _targets(loop) - {number_of(loop)}
    reads = [
        each
        for each in ast.walk(loop)
        if isinstance(each, ast.Assign) and "next(" in ast.unparse(each.value)
    ]
    return set().union(*map(_targets, reads))


def _statement(scope: ast.AST, line: int) -> ast.stmt:
    """Return the innermost statement around a line."""
    every = [each for each in ast.walk(scope) if isinstance(each, ast.stmt)]
    return [each for each in every if each.lineno <= line <= (each.end_lineno or 0)][-1]


def _targets(statement: ast.AST) -> set[str]:
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return {ast.unparse(each) for target in targets if target is not None for each in _flat(target)}


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _flat(each)
    else:
        yield target
