"""Checks between partitions: decisions on values that only raise are carried, those that decide what runs refused."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from cutting import check, of
from torch import nn
from workloads import WIDTH, make_plan, pipeline_of

from assigner.errors import MarkingError
from assigner.model.marking import checks, partition_graph

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = "a value is larger than 9"


class OddError(Exception):
    """One that takes two arguments."""

    def __init__(self, said: str, number: Any) -> None:
        super().__init__(said, number)
        self.number = number


class _Exits(nn.Linear):
    """It ends the process where a value is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 99:
            sys.exit(3)
        return super().forward(x)


def _within(h: torch.Tensor) -> None:
    if h.max() > 9:
        raise ValueError(LARGE)


@pytest.mark.long
def test_a_check_is_carried():
    """`if ... raise`, `assert`, the way on behind `else`, of tensors, numbers and sizes, in a helper, under no_grad."""

    def forward(s, x):
        h = s.a(x)
        _within(x)
        assert torch.isfinite(h).all(), "not finite"
        torch._assert((h < 99).all(), "larger than 99")
        if h.abs().max().item() <= 99:
            h = h * 2
        else:
            raise ValueError(f"{h.max().item()} is too large")
        with torch.no_grad():
            _within(h / 99)
            small = h.min().item() < -99
        if small or not bool((h < 99).all()):
            raise OddError(LARGE, 3)
        if h[h > 99].shape[0] > 5 or (h < -99).any():
            raise ValueError(f"too many of {h}")
        try:
            _within(h / 99)
        finally:
            h = h + 1
        try:
            _within(h / 99)
        except ValueError as error:
            raise OddError(LARGE, 3) from error
        return s.c(s.b(h))

    check(of(forward))


def test_torchs_own_checks_are_carried():
    """Distributions check their arguments, and losses theirs."""

    def forward(s, x):
        h = s.a(x)
        spread = torch.distributions.Normal(h, h.exp())
        likely = spread.log_prob(torch.zeros_like(h))
        return s.c(s.b(likely)) + F.gaussian_nll_loss(h, x, h.exp())

    check(of(forward))


def _many(s, x):
    for n in range(2):
        if x.max() > 9 + n:
            raise ValueError(n)
    if not (x > -9).all():
        raise ValueError(LARGE)
    return s.c(s.b(s.a(x))).sum(1, keepdim=True)


@pytest.mark.long
def test_a_check_raises_as_the_model_does():
    """In training and in evaluation, with the type and the words of the model's own error, and the line in a note."""
    made = of(_many)
    batch = made.make_batch(8, 0)
    wrong = batch[0].clone()
    wrong[7, 0] = -10.0
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        pipeline.step(batch)
        pipeline.evaluate(batch)
        for run in (pipeline.evaluate, pipeline.step):
            with pytest.raises(ValueError, match=f"^{LARGE}") as raised:
                run((wrong, batch[1]))
            assert any("test_checks.py" in note for note in raised.value.__notes__)


def _wrong(made: Any) -> Any:
    """A batch with a value that is too large."""
    x, y = made.make_batch(8, 0)
    x[0, 0] = 10.0
    return x, y


def _odd():
    raise OddError(LARGE, number=3)


def _value_in_text(x):
    raise ValueError(f"{LARGE}: {x.max().item():.3f} at {x.argmax().tolist()} of {x}")


def _value_as_argument(x):
    raise OddError(LARGE, x.max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "kind", "args"),
    [
        (lambda _: _odd(), OddError, (LARGE, 3)),
        (_value_as_argument, OddError, (LARGE, "...")),
        (_value_in_text, ValueError, (f"{LARGE}: ... at ... of ...",)),
        (lambda _: sys.exit(3), SystemExit, (3,)),
    ],
)
def test_an_error_of_any_form(fail: Callable[[torch.Tensor], None], kind: type[BaseException], args: Any):
    """Its type, its arguments and its attributes are carried, without the values among them; sys.exit() is an error."""

    def forward(s, x):
        h = s.a(x)
        if x.max() > 9:
            fail(x)
        return s.c(s.b(h)).sum(1, keepdim=True)

    made = of(forward)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        with pytest.raises(kind) as raised:
            pipeline.step(_wrong(made))
    assert type(raised.value) is kind
    assert raised.value.args == args
    assert getattr(raised.value, "number", args[-1]) == args[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (lambda x: torch._check((x.max() < 9).item(), lambda: LARGE), RuntimeError),
        (lambda x: torch._check_value(bool(x.max() < 9), lambda: LARGE), ValueError),
        (lambda x: torch._check_tensor_all(x < 9, lambda: LARGE), RuntimeError),
        (lambda x: torch._assert_async((x < 9).all(), LARGE), RuntimeError),
    ],
)
def test_a_check_without_a_decision(state: Callable[[torch.Tensor], None], kind: type[Exception]):
    """What torch checks by itself raises in a run, too."""

    def forward(s, x):
        state(x)
        torch._check(x.shape[0] > 0)
        return s.c(s.b(s.a(x))).sum(1, keepdim=True)

    made = of(forward)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        with pytest.raises(kind, match=f"^{LARGE}"):
            pipeline.step(_wrong(made))


def test_whether_tensors_are_equal_is_a_check():
    """As other truths are."""

    def forward(s, x):
        if torch.equal(x, torch.zeros_like(x)):
            raise ValueError(LARGE)
        return s.c(s.b(s.a(x)))

    check(of(forward))


def test_many_checks_are_refused(monkeypatch):
    """Each is a capture of its own."""
    assert checks._MOST == 20  # docs/marking.md
    monkeypatch.setattr(checks, "_MOST", 3)

    def forward(s, x):
        for n in range(9):
            _within(x / (n + 1))
        return s.c(s.b(s.a(x)))

    with pytest.raises(MarkingError, match=r"checks values more than 3 times.*test_checks.py"):
        partition_graph(of(forward))


def test_an_exit_inside_of_a_partition_is_no_way():
    """A process that captures goes on."""

    def forward(s, x):
        return s.c(s.b(s.a(x)))

    check(of(forward, b=lambda: _Exits(WIDTH, WIDTH)))


@pytest.mark.long
def test_a_check_in_a_compiled_partition():
    """It raises there, too."""
    whole = of(_many)
    made = replace(whole, compile={"backend": "eager"})
    x, y = made.make_batch(8, 0)
    with pipeline_of(made, make_plan(whole, micro_batches=1)) as pipeline:
        pipeline.step((x, y))
        x[0, 0] = -10.0
        with pytest.raises(ValueError, match=f"^{LARGE}"):
            pipeline.step((x, y))


def _decides(s, h):
    return h * 2 if h.sum() > 0 else h


def _caught(s, h):
    try:
        _within(h)
        h = h * 2
    except ValueError:
        h = h * 3
    return h


def _suppressed(s, h):
    with contextlib.suppress(ValueError):
        _within(h)
        h = h * 2
    return h


def _caught_without_an_answer(s, h):
    try:
        if h.sum() > 0:
            h = h * 2
    except Exception:  # noqa: BLE001 - this is what is tested
        h = h * 3
    return h


def _fails_for_want_of_values(s, h):
    return h + torch.from_numpy(h.detach().numpy()) if h.sum() > 0 else h


def _fails_in_its_own_words(s, h):
    if h.sum() > 0:
        try:
            h = h + torch.from_numpy(h.detach().numpy())
        except RuntimeError:
            raise ValueError(LARGE) from None
    return h


def _behind_a_check(s, h):
    _within(h)
    return _decides(s, h)


def _nested(s, h):
    if h.sum() > 0:
        _within(h)
        h = h * 2
    return h


def _counts_before(s, h):
    if h.max() > 9:
        s.wrong = getattr(s, "wrong", 0) + 1
        raise ValueError(LARGE)
    return h


def _writes_before(s, h):
    if h.max() > 9:
        s.norm.running_mean.add_(1)
        raise ValueError(LARGE)
    return h


def _asks_for_a_type(s, h):
    if h.max() > 9:
        found = h.max().item()
        if not isinstance(found, float):
            raise TypeError(found)
    return h


def _asks_whether_it_is_a_tensor(s, h):
    if h.max() > 9 and type(h) is not torch.Tensor:
        raise TypeError(h)
    return h


def _fails_in_an_operation(s, h):
    return h.view(3, 5, 7) if h.max() > 9 else h


def _is_number(value):
    return isinstance(value, float)


def _has_a_type_looked_at(s, h):
    if h.max() > 9:
        found = h.max().item()
        if not _is_number(found):
            raise TypeError(LARGE)
    return h


def _both_ways_raise(s, h):
    if h.max() > 9:
        _within(h / 9)
        raise ValueError(LARGE)
    return h


def _until(s, h):
    while h.sum() > 0:
        h = h / 2 - 1
    return h


@pytest.mark.slow
@pytest.mark.parametrize(
    "middle",
    [
        _decides, _caught, _suppressed, _caught_without_an_answer, _fails_for_want_of_values, _fails_in_its_own_words,
        _behind_a_check, _nested, _counts_before, _writes_before, _asks_for_a_type, _asks_whether_it_is_a_tensor,
        _fails_in_an_operation, _has_a_type_looked_at, _both_ways_raise, _until,
    ],
)  # fmt: skip
def test_what_is_no_check(middle: Callable[[Any, torch.Tensor], torch.Tensor]):
    """Both ways go on; or one raises what nobody knows plain torch to raise, or not before it has changed something."""

    def forward(s, x):
        return s.c(s.b(middle(s, s.a(x))))

    made = of(forward, norm=lambda: nn.BatchNorm1d(WIDTH))
    with pytest.raises(MarkingError, match=r"test_checks.py.*a tensor's value decides what runs there"):
        partition_graph(made)


@pytest.mark.long
def test_a_text_of_values_that_the_forward_goes_on_with():
    """Only that of an error may do without them."""

    def forward(s, x):
        _within(x)
        return s.c(s.b(s.a(x))) * len(f"{x.max().item():.3f}")

    with pytest.raises(MarkingError, match=r"test_checks.py.*unsupported format string"):
        partition_graph(of(forward))
