"""Decisions on values between partitions that only check: one way of each raises, the other is the graph's.

    if labels.max() >= self.vocabulary:         found = labels.max() >= 90
        raise ValueError("unknown word")        check(0, found, passes=False)

The forward is captured with each answer to the first decision that is not known yet. Where one of the two ends in a
`raise` of the code's own, the other answer is taken, and a node raises the same error in a run whose values go that
way. An error that some code around catches ends no forward, so that both ways go on: then a value decides what runs.
So it does where the way that raises has first asked for the type of something, which is another one in a capture, or
has taken a value out of a tensor and come to another branch before it raises.

Until it raises, texts that it makes of tensors and of their values have `...` in their place. What torch itself checks
without a decision (`torch._check`, `torch._assert_async`) is written as one.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import sys
import types
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeVar

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.deferred.memento import Memento, placed
from assigner.model.marking.fakeforward import answering
from assigner.model.marking.opaque import within_call
from assigner.model.members import parameters
from assigner.usercode import running_line, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_Made = TypeVar("_Made")

_MOST = 20  # each is captured by itself, with all that comes before it
_ASKS = ("torch.fx.", "torch._export.", "torch._tensor.", "torch.overrides.", "assigner.")
"""Modules between code that decides and the shape environment: they ask what it has asked."""
_CHECKS = ("torch.distributions.", "torch.nn.")
"""Packages of torch whose decisions are code like the user's; others decide how something is computed."""

_RAISE = (("torch", "_assert"), ("torch", "_check_with"), (__name__, "check"), (__name__, "assert_async"))
"""Functions, by module and name, that raise what their caller asks for."""
_TYPES, _COMPARES = ("isinstance", "issubclass"), ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
_UNKNOWN = "..."
"""What stands in texts for values."""

_library = torch.library.Library("assigner", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("check(int number, SymBool found, bool passes) -> ()")  # type: ignore[no-untyped-call]
torch.library.register_fake("assigner::check", lambda *_, **__: None, lib=_library)
fx.node.has_side_effect(torch.ops.assigner.check.default)


def is_check(node: fx.Node) -> bool:
    """True if a node raises where a value is not as it must be."""
    return node.op == "call_function" and node.target is torch.ops.assigner.check.default


@dataclass(frozen=True)
class Check:
    """A decision one way of which raises."""

    place: tuple[str, int]  # the file and the line of the decision
    passes: bool  # the answer that does not raise
    error: BaseException  # what the other one raises
    line: str  # where, for people

    def enforced(self) -> Callable[[Any], None]:
        """A function of the answer that raises the error, as far as it does not hold values."""

        def enforce(found: Any) -> None:
            if bool(found) != self.passes:
                raise _again(self.error, self.line)

        kind = type(self.error).__name__
        enforce.__name__ = enforce.__qualname__ = f"raises_{kind}_{'unless' if self.passes else 'if'}"
        return enforce


def _again(error: BaseException, line: str) -> BaseException:
    """Another error like one of a capture: its constructor may want anything, so it is not called."""
    kind = type(error)
    base: Any = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    args, attributes = _without_values(base.__reduce__(error)[1]), _without_values(vars(error))
    try:
        made: BaseException = base.__new__(kind, *args)
        base.__init__(made, *args)
        made.__dict__.update(attributes)
    except Exception:  # noqa: BLE001 - a type that cannot be made so
        made = RuntimeError(f"{kind.__name__}: {error}")
    made.add_note(f"raised at {line}, between partitions; its text is that of the capture, which knows no values")
    return made


def _without_values(held: Any) -> Any:
    """What an error of a capture holds, with the text for something unknown in the place of all that may be of it."""
    plain = (bool, int, float, complex, str, bytes, type, type(None), torch.dtype, enum.Enum)
    return pytree.tree_map(lambda each: each if isinstance(each, plain) else _UNKNOWN, held)


@dataclass(eq=False)
class _Attempt:
    """What is seen of one capture, in which the first decision that is not known yet goes one way."""

    way: bool
    decision: tuple[str, int] | None = None  # the place of that decision; None: there is none
    raised: BaseException | None = None  # what the forward ends in, if it is a `raise` of the code's own on this way
    unanswered: Exception | None = None  # of a decision without an answer: code that catches everything goes on
    has_told: bool = False  # texts behind the decision lack values
    has_taken: bool = False  # a value was taken out of a tensor behind it
    before: Memento | None = None  # while the forward runs: Python values at the decision
    stack: dict[types.FrameType, int] = field(default_factory=dict)  # likewise: where each frame stood


class Checks:
    """The checks of one forward, in their order.

    Attributes:
        known: Those found so far. A capture whose last check is found behind it has the same list.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known: list[Check] = []
        self._now = _Attempt(way=False)
        self._asked = 0
        self._deciding: set[tuple[str, int]] = set()

    def carried(self, capture: Callable[[], _Made]) -> _Made:
        """What `capture` gives, which calls the model's forward in the block of `answered`; its checks are carried.

        Raises:
            GuardOnDataDependentSymNode: a value decides what runs.
            Exception: what the capture raised.
        """
        while True:
            way = not (self.known and self.known[-1].passes)  # one that raises, by the look of the last check
            made, failure = self._attempt(capture, way=way)
            first = self._now
            if first.decision is None:
                if failure is not None:
                    raise failure
                return made[0]
            if first.raised is None:
                self._attempt(capture, way=not way)
            last = self._now
            if last.raised is None:
                self._deciding.add(first.decision)
                continue
            line = user_line(last.raised)
            self.known.append(Check(first.decision, not last.way, last.raised.with_traceback(None), line))
            if failure is None and not first.has_told:  # else what has gone on has texts without values
                return made[0]

    def _attempt(self, capture: Callable[[], _Made], *, way: bool) -> tuple[list[_Made], BaseException | None]:
        """A capture of which all is seen anew; what it made, and what it raised."""
        self._now = _Attempt(way)
        try:
            made = [capture()]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again where no decision is left
            return [], error
        return made, self._now.unanswered  # code that catches everything has gone on without an answer

    @contextlib.contextmanager
    def answered(self, inputs: Any) -> Iterator[None]:
        """Answer the decisions of a forward that runs in the block."""
        mode = detect_fake_mode([*pytree.tree_leaves(inputs), *parameters(self.model)])
        self._asked, now = 0, self._now
        if mode is None or mode.shape_env is None:
            yield
            return
        try:
            with answering(mode.shape_env, self._answer), self._telling():
                yield
        except (Exception, SystemExit) as error:
            alone = now.before is not None and not now.before.has_changed()
            if alone and now.unanswered is None and _is_raised(error):
                is_own = not _is_of_capture(error, now.stack, has_values=now.has_taken)
                now.raised = error if is_own else None
            raise
        finally:
            now.before, now.stack = None, {}

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        """Behind a decision whose way may raise, texts do without values: an error's is often made of them."""
        now = self._now

        def is_behind() -> bool:
            return now.before is not None and not within_call() and _is_code(sys._getframe(2))

        def told(original: Any) -> Any:
            def tell(value: Any, *form: Any) -> Any:
                if not is_behind():
                    return original(value, *form)
                now.has_told = True
                return _UNKNOWN

            return tell

        def taken(original: Any) -> Any:
            def take(tensor: torch.Tensor) -> Any:
                now.has_taken = now.has_taken or is_behind()
                return original(tensor)

            return take

        kinds, texts = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool), ("__str__", "__repr__", "__format__")
        values = [(FakeTensor, name, taken(getattr(FakeTensor, name))) for name in ("item", "tolist")]
        return placed([*((kind, name, told(getattr(kind, name))) for kind in kinds for name in texts), *values])

    def _answer(self, node: Any, error: GuardOnDataDependentSymNode) -> Any:
        """The answer to a decision, as the graph has it too; None: there is none."""
        if within_call() or (place := _deciding_place()) is None:
            return None
        if node.pytype is not bool:
            self._now.unanswered = error
            return None
        number, self._asked = self._asked, self._asked + 1
        if number < len(self.known) and self.known[number].place != place:
            self.known = self.known[:number]
        if number < len(self.known):
            passes = self.known[number].passes
        elif number == len(self.known) == _MOST:
            self._now.unanswered = MarkingError(
                f"the forward checks values more than {_MOST} times between partitions, at {running_line()}",
                hint="check several values at once, as torch.stack(found).any(); or mark a larger module that contains"
                " the line: what is inside a partition runs as it is",
            )
            raise self._now.unanswered
        elif number == len(self.known) and place not in self._deciding:
            passes, self._now.decision = self._now.way, place
            self._now.stack = {frame: frame.f_lasti for frame, _ in walk_stack(sys._getframe())}
            self._now.before = Memento(self.model.named_modules(), parameters=True, top="whole")
        else:
            self._now.unanswered = error
            return None
        torch.ops.assigner.check(number, torch.SymBool(node), passes)  # type: ignore[no-untyped-call]
        return sympy.true if passes else sympy.false


def _deciding_place() -> tuple[str, int] | None:
    """File and line of the code that asks for a truth; None: torch asks on its own account."""
    for frame, line in walk_stack(sys._getframe(1)):
        if _is_code(frame):
            return frame.f_code.co_filename, line
        if _module(frame) != "torch" and not f"{_module(frame)}.".startswith(_ASKS):
            return None
    return None


def _is_code(frame: types.FrameType) -> bool:
    """Whether a frame is of a model's code, or of what checks arguments for it."""
    name = _module(frame)
    if name.partition(".")[0] not in ("torch", "assigner"):
        return True
    return name.startswith(_CHECKS) or (name, frame.f_code.co_name) == ("torch", "_assert")


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_raised(error: BaseException | None) -> bool:
    """Whether an error, and each that was being handled, comes from a `raise` or an `assert`.

    One that an operation raises may be there only for want of values.
    """
    while error is not None:
        trace, asked = error.__traceback__, False
        while trace is not None and trace.tb_next is not None:
            asked = _is_code(trace.tb_frame) or (asked and _module(trace.tb_frame) in ("torch", __name__))
            trace = trace.tb_next
        if trace is None:
            return False
        frame = trace.tb_frame
        if not _is_code(frame) and not (asked and (_module(frame), frame.f_code.co_name) in _RAISE):
            return False
        raises = dis.opname[frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
        if not raises and not isinstance(error, SystemExit):  # sys.exit() is a call
            return False
        error = error.__context__
    return True


def _is_of_capture(error: BaseException, stack: Mapping[types.FrameType, int], *, has_values: bool) -> bool:
    """Whether an error behind a decision may be there only in a capture, where tensors and values are other objects.

    On the way from where each frame stood at the decision, code asks what something is; or it has taken a value out of
    a tensor, and there is another branch behind the decision's own.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if _is_code(frame) and _module(frame) != "contextlib":
            start = stack.get(frame, -1)
            way = [each for each in dis.get_instructions(frame.f_code) if start <= each.offset <= trace.tb_lasti]
            asked = {each.argval for each in way if each.opname == "LOAD_GLOBAL"}
            compares = any(each.opname in _COMPARES for each in way if each.offset > start)
            branches = sum(1 for each in way if "JUMP" in each.opname and "IF" in each.opname)
            if asked.intersection(_TYPES) or ("type" in asked and compares):
                return True
            if has_values and branches > (frame in stack):
                return True
        trace = trace.tb_next
    return False


def stating() -> Iterator[tuple[Any, str, Any]]:
    """What torch has for checks of values that need no decision (holder, name), and its replacement in a capture."""
    check_with: Any = torch._check_with

    def check(error_type: Any, cond: Any, message: Any) -> None:
        if not isinstance(cond, torch.SymBool) or not _asked_by_code():
            check_with(error_type, cond, message)
        elif not cond:  # torch's own would have the capture take it for true
            raise error_type("Expected cond to be True, but got False" if message is None else str(message()))

    yield torch, "_check_with", check
    asserted: Any = torch._assert_async

    def assert_async(tensor: torch.Tensor, *message: str) -> None:
        if not _asked_by_code():
            asserted(tensor, *message)
        elif not tensor:
            raise RuntimeError(*message or ("Expected Tensor with single nonzero value, but got zero",))

    yield torch, "_assert_async", assert_async
    for holder in (torch, torch.Tensor):
        yield holder, "equal", _equal(holder.equal)


def _equal(original: Any) -> Any:
    def equal(one: torch.Tensor, other: torch.Tensor) -> Any:
        if not _asked_by_code() or one.dtype != other.dtype:
            return original(one, other)
        return one.shape == other.shape and (one == other).all().item()

    return equal


def _asked_by_code() -> bool:
    """Whether a function of torch is called by a model's code between partitions, also through others of torch."""
    asks = next((frame for frame, _ in walk_stack(sys._getframe(2)) if _module(frame) != "torch"), None)
    return not within_call() and asks is not None and _is_code(asks)
