"""Python decisions on values, in a forward that runs on fake tensors: both ways are tried, and must agree.

What is inside a partition is not traced, only run on fake tensors for the shapes of what comes out. There
`if mask.any():` has no answer; but a module whose outputs look the same whichever way it goes needs none.

way                    truths    numbers: int(x), len(x[mask])
constant               False     2 or 0.5
constant               True      3 or 1.5
one flipped alone      False     2 or 0.5; of the first decisions one after another is answered otherwise
extreme                either    0; of floats also a large one
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode

from assigner.model.marking.fakeforward import is_alike
from assigner.usercode import running_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_MOST = 256  # a loop that waits for a value would ask for ever
_PATIENCE = 16  # what such a loop is let wait when its way is gone again
_FLIPPED = 4  # decisions that are also tried alone
_TURNS = 24  # how often one way is gone again
_LONGEST = 5_000  # operations of a way with extreme numbers
_ALIKE = 3  # so many checks of one place that raise are believed of all that follow there
_ANSWERS = {
    bool: (sympy.false, sympy.true),
    int: (sympy.Integer(2), sympy.Integer(3)),
    float: (sympy.Float(0.5), sympy.Float(1.5)),
}
_EXTREMES = {
    bool: _ANSWERS[bool],
    int: (sympy.Integer(0), sympy.Integer(0)),
    float: (sympy.Float(0), sympy.Float(_MOST)),
}

_Place = tuple[tuple[int, int], ...]
"""Who asks: code and instruction of each frame."""
_Key = tuple[_Place, int]
"""A decision of a forward: how often that place had asked before."""


class Disagreement(Exception):  # noqa: N818 - no error yet: the caller says which module it is
    """The outputs of a forward depend on a decision on values; the message is the line."""


class _Decider:
    """Answers what a shape environment cannot, on one way.

    A way that ends at a check (`assert not bad.any()`) is gone again with that decision answered otherwise, and one
    that a loop keeps for ever with a loop that is left in the end.

    Args:
        usual: The answer.
        flipped: The one decision that is answered otherwise.
        like: Another way; its checks and loops are this one's too, if it went through.
        extreme: Numbers are extreme ones.

    Attributes:
        asked: The decisions, in turn, and whether the answer was the usual one.
        kinds: What they were of.
        through: The way came to its end.
    """

    def __init__(
        self, *, usual: bool, flipped: _Key | None = None, like: _Decider | None = None, extreme: bool = False
    ) -> None:
        self.usual, self.flipped, self.extreme = usual, flipped, extreme
        self.asked: dict[_Key, bool] = {}
        self.kinds: set[type] = set()
        self.through = False
        known = like if like is not None and like.through else None
        self._turned: set[_Key] = set() if known is None else {*known._turned}
        self._waiting: set[_Place] = set() if known is None else {*known._waiting}
        self._counts = Counter[_Place]()
        self._last: _Key | None = None
        self._turns = self._stuck = 0

    @property
    def raising(self) -> set[_Place]:
        """The places whose checks raise on this way; empty: it is not known, or none does."""
        return {place for place, _ in self._turned} if self.through else set()

    def begin(self) -> None:
        """The way is gone from its beginning."""
        self.asked.clear()
        self._counts.clear()

    def answer(self, node: Any, place: _Place) -> Any:
        """The answer to one decision; None: there is none."""
        kind = node.pytype
        if kind not in _ANSWERS or len(self.asked) >= _MOST:
            return None
        key = place, self._counts[place]
        self._counts[place] += 1
        self.kinds.add(kind)
        waits = place in self._waiting and key[1] >= _PATIENCE
        self.asked[key] = not (waits or key == self.flipped or key in self._turned or self._is_raising(key))
        if waits and kind is not bool:
            return _EXTREMES[kind][key[1] % 2]
        return (_EXTREMES if self.extreme else _ANSWERS)[kind][self.usual == self.asked[key]]

    def bound(self) -> contextlib.AbstractContextManager[Any]:
        """Extreme numbers may keep a loop that asks for nothing: `start += size` where the size is 0."""
        return _Bounded() if self.extreme else contextlib.nullcontext()

    def turn(self) -> bool:
        """Have a way that came to no result go otherwise where it ended; False: there is no other."""
        self._turns += 1
        last = next(reversed(self.asked), None)
        self._stuck = self._stuck + 1 if last == self._last else 0
        self._last = last
        if self._turns > _TURNS or last in (None, self.flipped):
            return False
        if len(self.asked) >= _MOST:
            return self._wait()
        usual = (key for key in reversed(self.asked) if self.asked[key])
        ending = next(usual, None)
        if ending is None or self._stuck > 1:  # not what was decided last, nor what was before
            return False
        self._turned.add(ending)
        return True

    def _wait(self) -> bool:
        """Let the place that has asked most wait no longer than some decisions."""
        counts = {place: count for place, count in self._counts.items() if place not in self._waiting}
        longest = max(counts, key=counts.__getitem__, default=None)
        if longest is None or counts[longest] <= _PATIENCE:
            return False
        self._waiting.add(longest)
        return True

    def _is_raising(self, key: _Key) -> bool:
        before = [n for place, n in self._turned if place == key[0]]
        return len(before) >= _ALIKE and key[1] > max(before)


class _Bounded(TorchFunctionMode):
    """Ends a forward of very many operations."""

    def __init__(self) -> None:
        super().__init__()
        self._left = _LONGEST

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("a loop that does not end")
        return func(*args, **(kwargs or {}))


def _place() -> _Place:
    found = []
    at: FrameType | None = sys._getframe(2)
    while at is not None and at.f_code is not _WaysGone.go.__code__:
        found.append((id(at.f_code), at.f_lasti))
        at = at.f_back
    return tuple(found)


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


class _WaysGone:
    """The ways through a forward that were gone.

    Args:
        run: The forward.
        environment: Of its sizes.
        undo: Called before it is run again.

    Attributes:
        found: What it gave on each that went through.
        failure: What was raised first.
        lines: Those of the places that have asked.
    """

    def __init__(self, run: Callable[[], Any], environment: ShapeEnv, undo: Callable[[], None]) -> None:
        self._run, self._environment, self._undo = run, environment, undo
        self.found: list[Any] = []
        self.failure: BaseException | None = None
        self.lines: dict[_Place, str] = {}
        self._again = False

    def go(self, decider: _Decider) -> None:
        """Go one, otherwise where it ends, as far as it can."""
        goes_on = True
        while goes_on and not decider.through:
            if self._again:
                self._undo()
            self._again = True
            decider.begin()
            try:  # what raises is not taken, unless no other way goes through; so is what ends the process
                with answering(self._environment, partial(self._answer, decider)), decider.bound():
                    self.found.append(self._run())
                decider.through = True
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self.failure = self.failure if self.failure is not None else error
                goes_on = decider.turn()

    def _answer(self, decider: _Decider, node: Any, _: GuardOnDataDependentSymNode) -> Any:
        place = _place()
        if place not in self.lines:
            self.lines[place] = running_line()
        return decider.answer(node, place)


def decided(
    run: Callable[[], Any],
    agreed: Callable[[list[Any]], Any],
    environment: ShapeEnv | None,
    undo: Callable[[], None],
    forget: Callable[[int], None] | None = None,
) -> Any:
    """What `run` gives, whichever way its decisions on values go.

    Args:
        run: A forward on fake tensors.
        agreed: One result from those of several ways; None: they have nothing in common.
        environment: Of the fake tensors' sizes; None: there is none, and `run` is left alone.
        undo: Called between two runs.
        forget: Called with the number of a run, of those that gave something, that is not to count: with an extreme
            number, which perhaps never comes, it gives other types or sizes. None: numbers are never extreme.

    Raises:
        Disagreement: the results differ.
        Exception: what `run` raised, where no way through it was found.
    """
    if environment is None:
        return run()
    ways, no, yes = _WaysGone(run, environment, undo), _Decider(usual=False), _Decider(usual=True)
    ways.go(no)
    if no.kinds:
        ways.go(yes)
    first = len(ways.found)
    kinds = no.kinds | yes.kinds
    if forget is not None and kinds - {bool}:
        for like in (no, yes)[: len(kinds | {int})]:  # of whole numbers alone the extreme one is the same
            ways.go(_Decider(usual=like.usual, like=like, extreme=True))
    last = len(ways.found)
    open_keys = [key for key, is_usual in no.asked.items() if is_usual and key[0] not in yes.raising]
    for key in open_keys[:_FLIPPED]:
        ways.go(_Decider(usual=False, flipped=key, like=no))
    sure = [*ways.found[:first], *ways.found[last:]]
    if not sure:
        assert ways.failure is not None
        raise ways.failure
    if not kinds:
        return sure[0]
    result = agreed(sure)
    if result is None:
        raise Disagreement(ways.lines[next(iter(open_keys or no.asked))[0]])
    for n in reversed(range(first, last)):
        if forget is not None and not is_alike(result, ways.found[n]):
            forget(n)
    return result
