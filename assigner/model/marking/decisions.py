"""Python decisions on values, in a forward that runs on fake tensors: both ways are tried, and must agree.

What is inside a partition is not traced, only run on fake tensors for the shapes of what comes out. There
`if mask.any():` has no answer; but a module whose outputs look the same whichever way it goes needs none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from assigner.usercode import running_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MOST = 256  # a loop that waits for a value would ask for ever
_FLIPPED = 4  # decisions that are also tried alone
_ANSWERS = {
    bool: (sympy.false, sympy.true),
    int: (sympy.Integer(2), sympy.Integer(3)),
    float: (sympy.Float(0.5), sympy.Float(1.5)),
}


class Disagreement(Exception):  # noqa: N818 - no error yet: the caller says which module it is
    """The outputs of a forward depend on a decision on values; the message is the line."""


class _Decider:
    """Answers what a shape environment cannot.

    Args:
        usual: The answer.
        flipped: The number of the one decision that is answered otherwise.
    """

    def __init__(self, *, usual: bool, flipped: int | None = None) -> None:
        self.usual, self.flipped = usual, flipped
        self.asked = 0
        self.line = ""

    def answer(self, node: Any, _: GuardOnDataDependentSymNode) -> Any:
        """The answer to one decision; None: there is none."""
        if node.pytype not in _ANSWERS or self.asked >= _MOST:
            return None
        self.line = self.line or running_line()
        self.asked += 1
        return _ANSWERS[node.pytype][self.usual != (self.asked - 1 == self.flipped)]


@contextlib.contextmanager
def answering(environment: ShapeEnv, answer: Callable[[Any, GuardOnDataDependentSymNode], Any]) -> Iterator[None]:
    """Answer in a shape environment what it cannot, while the block runs.

    Args:
        environment: Of fake tensors.
        answer: Gives a sympy value for a node and the error that it would be; None: it is that error.
    """
    ask = environment.evaluate_sym_node

    def evaluate(node: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return ask(node, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            found = answer(node, error)
            if found is None:
                raise
            return found

    with mock.patch.object(environment, "evaluate_sym_node", evaluate):
        yield


def decided(
    run: Callable[[], Any], agreed: Callable[[list[Any]], Any], environment: ShapeEnv | None, undo: Callable[[], None]
) -> Any:
    """What `run` gives, whichever way its decisions on values go.

    Args:
        run: A forward on fake tensors.
        agreed: One result from those of several ways; None: they have nothing in common.
        environment: Of the fake tensors' sizes; None: there is none, and `run` is left alone.
        undo: Called between two runs.

    Raises:
        Disagreement: the results differ.
        Exception: what `run` raised, where no way through it was found.
    """
    if environment is None:
        return run()
    decider = _Decider(usual=False)
    found: list[Any] = []
    failure: BaseException | None = None
    try:
        with answering(environment, decider.answer):
            found.append(run())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised below, unless another way goes through
        failure = error
    if not decider.asked:
        if failure is not None:
            raise failure
        return found[0]
    others = [_Decider(usual=True), *(_Decider(usual=False, flipped=n) for n in range(min(decider.asked, _FLIPPED)))]
    for other in others:
        undo()
        # A way that raises is one not taken; so is one that ends the process.
        with contextlib.suppress(Exception, SystemExit), answering(environment, other.answer):
            found.append(run())
    if not found:
        assert failure is not None
        raise failure
    result = agreed(found)
    if result is None:
        raise Disagreement(decider.line)
    return result
