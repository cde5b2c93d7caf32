"""Decisions on values between partitions that only check: one way of each raises, the other is the graph's.

    if labels.max() >= self.vocabulary:         found = labels.max() >= 90
        raise ValueError("unknown word")        check(0, found, passes=False)

The forward is captured with each answer to the first decision that is not known yet. Where one of the two ends in a
`raise` of the code's own, the other answer is taken, and a node raises the same error in a run whose values go that
way. An error that some code around catches ends no forward, so that both ways go on: then a value decides what runs.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from assigner.model.deferred.memento import Memento
from assigner.model.marking.decisions import answering
from assigner.model.marking.opaque import within_call
from assigner.usercode import user_line

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_Made = TypeVar("_Made")

_MOST = 64  # a loop over rows or steps that checks each of them would be captured as often
_ASKS = ("torch.fx.", "torch._export.", "torch._tensor.", "torch.overrides.", "assigner.")
"""Modules between code that decides and the shape environment: they ask what it has asked."""
_CHECKS = ("torch.distributions.", "torch.nn.")
"""Packages of torch whose decisions are code like the user's; others decide how something is computed."""

_library = torch.library.Library("assigner", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("check(int number, SymBool found, bool passes) -> ()")  # type: ignore[no-untyped-call]


@torch.library.register_fake("assigner::check", lib=_library)  # type: ignore[untyped-decorator]
def _fake_check(number: int, found: Any, passes: bool) -> None:
    del number, found, passes


fx.node.has_side_effect(torch.ops.assigner.check.default)


def is_check(node: fx.Node) -> bool:
    """True if a node raises where a value is not as it must be."""
    return node.op == "call_function" and node.target is torch.ops.assigner.check.default


@dataclass(frozen=True)
class Check:
    """A decision one way of which raises.

    Args:
        place: The file and the line of the decision.
        passes: The answer that does not raise.
        error: What the other one raises.
        line: Where, for people.
    """

    place: tuple[str, int]
    passes: bool
    error: Exception
    line: str

    def enforced(self) -> Callable[[Any], None]:
        """A function of the answer that raises the error, as far as it does not hold values."""
        kind, said = type(self.error), str(self.error)

        def enforce(found: Any) -> None:
            if bool(found) != self.passes:
                raise _again(kind, said, self.line)

        enforce.__name__ = enforce.__qualname__ = f"raises_{kind.__name__}_{'unless' if self.passes else 'if'}"
        return enforce


def _again(kind: type[Exception], said: str, line: str) -> Exception:
    """An error of a type with a message, where the type takes one."""
    try:
        made = kind(said)
    except Exception:  # noqa: BLE001 - a constructor of the user's, which may want anything
        made = RuntimeError(f"{kind.__name__}: {said}")
    made.add_note(f"raised at {line}, between partitions; its text is that of the capture, which knows no values")
    return made


class Checks:
    """The checks of one forward, in their order.

    Args:
        model: Whose forward.

    Attributes:
        known: Those found so far. A capture whose last check is found behind it has the same list.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known: list[Check] = []
        self._way = False
        self._asked = 0
        self._decision: tuple[str, int] | None = None
        self._before: Memento | None = None
        self._unanswered: GuardOnDataDependentSymNode | None = None
        self._raised: Exception | None = None
        self._deciding: set[tuple[str, int]] = set()

    def carried(self, capture: Callable[[], _Made]) -> _Made:
        """What a capture gives whose checks are carried.

        Args:
            capture: Calls the model's forward, in the block of `answered`.

        Raises:
            GuardOnDataDependentSymNode: a value decides what runs.
            Exception: what the capture raised.
        """
        while True:
            made, failure = self._attempt(capture, way=False)
            decision = self._decision
            if decision is not None:
                if self._raised is None:
                    self._attempt(capture, way=True)
                if self._raised is None:
                    self._deciding.add(decision)
                    continue
                error, line = self._raised, user_line(self._raised)
                self.known.append(Check(decision, not self._way, error.with_traceback(None), line))
            if failure is None:
                return made[0]
            if decision is None:
                raise failure

    def _attempt(self, capture: Callable[[], _Made], *, way: bool) -> tuple[list[_Made], Exception | None]:
        """A capture in which the first unknown decision goes one way; what it made, and what it raised."""
        self._way, self._decision, self._raised, self._unanswered = way, None, None, None
        try:
            made = [capture()]
        except Exception as error:  # noqa: BLE001 - raised again where no decision is left
            return [], error
        return made, self._unanswered  # code that catches everything has gone on without an answer

    @contextlib.contextmanager
    def answered(self, inputs: Any) -> Iterator[None]:
        """Answer the decisions of a forward that runs in the block.

        Args:
            inputs: Its inputs, without values.
        """
        mode = detect_fake_mode([*pytree.tree_leaves(inputs), *self.model.parameters()])
        self._asked = 0
        if mode is None or mode.shape_env is None:
            yield
            return
        try:
            with answering(mode.shape_env, self._answer):
                yield
        except Exception as error:
            alone = self._before is not None and not self._before.has_changed()
            if alone and self._unanswered is None and _is_raised(error):
                self._raised = error
            raise
        finally:
            self._before = None

    def _answer(self, node: Any, error: GuardOnDataDependentSymNode) -> Any:
        """The answer to a decision, as the graph has it too; None: there is none."""
        if within_call() or node.pytype is not bool or (place := _deciding_place()) is None:
            return None
        number, self._asked = self._asked, self._asked + 1
        if number < len(self.known) and self.known[number].place != place:
            self.known = self.known[:number]
        if number < len(self.known):
            passes = self.known[number].passes
        elif number == len(self.known) < _MOST and place not in self._deciding:
            passes, self._decision = self._way, place
            self._before = Memento(self.model.named_modules(), parameters=True, top="whole")
        else:
            self._unanswered = error
            return None
        torch.ops.assigner.check(number, torch.SymBool(node), passes)  # type: ignore[no-untyped-call]
        return sympy.true if passes else sympy.false


def _deciding_place() -> tuple[str, int] | None:
    """File and line of the code that asks for a truth; None: torch asks on its own account."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_code(frame):
        if _module(frame) != "torch" and not f"{_module(frame)}.".startswith(_ASKS):
            return None
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


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
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or not _is_code(trace.tb_frame):
            return False
        if dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS":
            return False
        error = error.__context__
    return True
