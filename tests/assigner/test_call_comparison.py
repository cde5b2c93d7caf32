"""A call or a batch that is another one on some rank is noticed before anything is computed."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.launch.seal import seal, unseal
from assigner.runtime.batch.callcomparison import LEAVING, CallComparison
from assigner.runtime.failures import questions
from assigner.runtime.failures.callrecord import checksum, described
from assigner.runtime.failures.questions import CALLS, Records, asked_about, called
from assigner.runtime.ranks.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.runtime.failures.callrecord import CallSums


class Own(torch.Tensor):
    """A tensor of a class of its own."""


class Rank:
    """A member of a run of three, of which others have told what they told; the needs of a plan from rank 0 to 2."""

    transport, world, inputs_rank, targets_rank, targets_are_none = "there is one", 3, 0, 2, False
    _run, begin_call = None, Membership.begin_call

    def __init__(self, rank: int, *others: Rank, weighs: bool = False) -> None:
        self.rank, self.weighs, self.at = rank, weighs, ""
        self.others = {each.rank: each for each in others}
        self.calls: deque[CallSums] = deque(maxlen=2)
        self.told: list[Any] = []
        self.heard = dict.fromkeys(self.others, 0)
        self.same = CallComparison(self, self, 4)

    def check(self, *_: Any, **__: Any) -> None:
        """It needs nothing."""

    def tensors_of(self, given: Mapping[int, Any]) -> dict[int, Any]:
        return {rank: self.text_from(rank, mine) for rank, mine in given.items()}

    def text_from(self, rank: int, mine: Any) -> Any:
        if rank == self.rank:
            self.told.append(mine)
            return mine
        self.heard[rank] += 1
        return self.others[rank].told[self.heard[rank] - 1]

    def ask_calls(self, number: int) -> dict[int, tuple[Any, ...]]:
        """Through JSON, as the run's store has it; somebody else has not come so far."""
        found: dict[int, tuple[Any, ...]] = {self.rank + 10: ()}
        for rank, each in self.others.items():
            records = tuple(sums.record() for sums in each.calls if sums.number <= number)
            found[rank] = unseal(Records, "answer", seal("answer", records))
        return found


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5000, generator=generator), torch.zeros(rows, dtype=torch.bool)


@pytest.mark.parametrize(
    "other",
    [
        batch(8, seed=1),
        (batch(8)[0], torch.ones(8, dtype=torch.bool)),
        (batch(8)[0].double(), batch(8)[1]),
        (batch(8)[0].reshape(8, 50, 100), batch(8)[1]),
        (batch(8)[0], batch(8)[1], 3),
    ],
)
def test_values_shapes_types_and_plain_values_count(other):
    """What differs in any of them has another sum; what is equal has the same, contiguous or not."""
    assert checksum(other) != checksum(batch(8))
    assert checksum((batch(8)[0].t().contiguous().t(), batch(8)[1])) == checksum(batch(8))


def test_any_type_and_an_empty_tensor_have_a_sum():
    """bfloat16 and complex numbers have no numpy type of their own, or another size."""
    kinds = (torch.bfloat16, torch.complex64, torch.uint8, torch.int64)
    assert len({checksum(torch.ones(3, dtype=kind)) for kind in kinds}) == len(kinds)
    assert checksum(torch.empty(0, 4)) != checksum(torch.empty(0, 5))


class Boxes:
    """An object that keeps tensors its own way."""

    def __init__(self, *values: float) -> None:
        self.values, self.me = torch.tensor(values), self


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(3), np.arange(3) + 1), (np.array(["a", None]), np.array(["b", None])), (["cat"], ["dog"]),
        ([{"boxes": torch.ones(2, 4)}], [{"boxes": torch.zeros(2, 4)}]), (b"a", b"b"), (Boxes(1.0), Boxes(2.0)),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
         torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)),
        (pack_sequence([torch.ones(2)]), pack_sequence([torch.zeros(2)])),
        (torch.ones(2).as_subclass(Own), torch.zeros(2).as_subclass(Own)),
    ],
    ids=["array", "array of objects", "text", "dicts", "bytes", "object", "nested", "packed", "subclass"],
)  # fmt: skip
def test_what_is_no_tensor_counts(one, other):
    """Arrays, lists, objects and tensors of other classes differ where their values do, and are equal to themselves."""
    assert checksum(one) != checksum(other)
    assert checksum(one) == checksum(one)
    assert describe(one)


def describe(batch: Any) -> list[str]:
    return [described(leaf) for leaf in pytree.tree_leaves(batch)]


def after(*given: Any, weigh: Any = None, **settings: Any) -> Rank:
    """Rank 0, after it has called `evaluate` with batches."""
    first = Rank(0, weighs=weigh is not None, **settings)
    for each in given:
        first.same.given("evaluate()", each, weigh=weigh)
    return first


def here(number: int) -> str:
    """A line of this function's caller, so many lines above."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno - number}"


X, Y = batch(8)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ((X[:6], Y[:6]), "the shape of inputs: float32[6, 5000] on worker:2, float32[8, 5000] on worker:0"),
        ((X.double(), Y), "the type of inputs: float64[8, 5000] on worker:2, float32[8, 5000] on worker:0"),
        ((X[:6].double(), Y), "the type and shape of inputs: float64[6, 5000] on worker:2, float32[8, 5000] on"),
        ((X, Y.int()), "the type of targets: int32[8] on worker:2, bool[8] on worker:0"),
        (([X], Y), "the structure of inputs: [float32[8, 5000]] on worker:2, float32[8, 5000] on worker:0"),
        (({"x": X, "flag": True}, Y), "the structure of inputs: {'x': float32[8, 5000], 'flag': True} on worker:2"),
        ((torch.zeros_like(X), Y), "the values of inputs (float32[8, 5000])"),
        ((X, ~Y), "the values of targets (bool[8])"),
    ],
    ids=["rows", "dtype", "both", "targets' dtype", "structure", "keys", "zeros", "values of targets"],
)
def test_a_difference_is_told_with_both_sides(other, difference):
    """What differs, which leaf, what each rank has of it, and the lines that called; equal batches pass."""
    first = after((X, Y), (X, Y))
    second = Rank(2, first)
    second.same.given("evaluate()", (X, Y))
    with pytest.raises(UsageError, match="worker:2 and worker:0 differ in ") as caught:
        second.same.given("evaluate()", other)
    assert difference in caught.value.message
    assert f"worker:2 calls evaluate() at {here(2)}; worker:0 calls evaluate() at {__file__}:" in caught.value.message
    assert "seed the sampler" in (caught.value.hint or "")


def test_leaves_are_named_as_the_batch_has_them():
    """A plain value, an array and an entry deep inside by their paths; how many more differ."""
    first = after(({"a": [X, X], "flag": 1}, {"y": np.arange(3)}))
    with pytest.raises(UsageError, match=r"the value of inputs\['flag'\]: 2 on worker:1, 1 on worker:0; "):
        Rank(1, first).same.given("evaluate()", ({"a": [X, X], "flag": 2}, {"y": np.arange(3)}))
    with pytest.raises(UsageError, match=r"the values of inputs\['a'\]\[0\] and 1 more \(float32\[8, 5000\]\); "):
        Rank(1, first).same.given("evaluate()", ({"a": [X + 1, X + 1], "flag": 1}, {"y": np.arange(3)}))
    with pytest.raises(UsageError, match=r"the shape of targets\['y'\]: array int64\[4\] on worker:1, array int64"):
        Rank(1, first).same.given("evaluate()", ({"a": [X, X], "flag": 1}, {"y": np.arange(4)}))


def test_another_call_is_told_with_those_before_it():
    """Calls that exchange nothing are compared with the next; what is shown of one more than is compared counts not."""
    first = Rank(0)
    first.same.check("optimizer.step()", exchanges=False)
    first.same.check("save()", shown="save('a')")
    same = Rank(1, first).same
    same.check("optimizer.step()", exchanges=False)
    same.check("save()", shown="save('b')")
    with pytest.raises(
        UsageError, match=r"in the call; worker:1 calls save\('b'\) at .*; worker:0 calls optimizer"
    ) as one:
        Rank(1, first).same.check("save()", shown="save('b')")
    assert re.search(
        r"worker:0 calls optimizer.step\(\) at \S+py:\d+, then save\('a'\) at \S+py:\d+$", one.value.message
    )
    with pytest.raises(UsageError, match="differ in the call"):
        Rank(1, first).same.given("step()", (X, Y))
    covered = Rank(1, first)
    with covered.same.covered():
        covered.same.check("optimizer.step()")
    assert not covered.calls


def test_what_a_rank_lacks_is_not_compared():
    """Inputs, targets or both; whoever has a part is compared in it, if need be with the rank of the targets."""
    first = after((X, Y))
    for given in ((X, None), (None, Y), (None, None)):
        assert Rank(1, first).same.given("evaluate()", given).targets is given[1]
    with pytest.raises(UsageError, match="the values of targets"):
        Rank(1, first).same.given("evaluate()", (None, ~Y))
    lacking = Rank(0)
    with pytest.raises(LookupError):  # it would wait for what the one with the targets tells
        lacking.same.given("evaluate()", (X, None))
    judge = Rank(2, lacking)
    judge.same.given("evaluate()", (None, Y))
    Rank(1, lacking, judge).same.given("evaluate()", (None, Y))
    with pytest.raises(UsageError, match="worker:1 and worker:2 differ in the values of targets"):
        Rank(1, lacking, judge).same.given("evaluate()", (X, ~Y))


def test_inputs_are_outlined_once():
    """Structure, shapes, strides, types and plain values, as tensors without values; again for other shapes alone."""
    inputs = {"x": X, "t": X.t(), "more": (1, 2.5, None, "a", [True])}
    wide = {**inputs, "x": X[:, :7]}
    first = after((inputs, Y), ({**inputs, "x": X + 1}, Y), (wide, Y))
    second = Rank(1, first)
    found = [second.same.given("evaluate()", (None, None)).inputs for _ in range(3)]
    assert len(first.told) == 3 + 2
    for made, wanted in zip(found, (inputs, inputs, wide), strict=True):
        assert made["x"].is_meta
        assert made["x"].shape == wanted["x"].shape
        assert made["t"].stride() == X.t().stride()
        assert list(made) == list(wanted)
        assert made["more"] == wanted["more"]


def test_inputs_that_cannot_be_told_are_refused_where_they_lack():
    """Words say which value; ranks that have them go on."""
    inputs = {"x": X, "how": np.float32(2)}
    first = after((inputs, Y))
    Rank(1, first).same.given("evaluate()", (inputs, None))
    with pytest.raises(UsageError, match=r"worker:0 cannot tell it what they are: inputs\['how'\] is a float32"):
        Rank(1, first).same.given("evaluate()", (None, None))


def test_weights_come_with_the_batch():
    """A rank that lacks a part gets what its micro-batches count for, to the last bit."""
    first = after((X, Y), weigh=lambda _: [0.1, 2.5])
    second = Rank(1, first, weighs=True)
    found = second.same.given("evaluate()", (None, None), weigh=lambda _: pytest.fail("it lacks the batch"))
    assert list(found.weights or ())[:2] == [0.1, 2.5]


def test_whoever_leaves_is_told_of():
    """With both lines, on either side."""
    blamed: list[int] = []
    first = Rank(0)
    first.same.check(LEAVING)
    second = Rank(1, first)
    second.blame = lambda rank, _: blamed.append(rank)  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match=r"came to an end, at \S+py:\d+, while worker:1 went on with step\(\) at \S+py"
    ):
        second.same.given("step()", (X, Y))
    third = Rank(2, after((X, Y)))
    third.blame = lambda rank, _: blamed.append(rank)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"came to an end, at \S+py:\d+, while worker:0 went on with evaluate\(\) at"):
        third.same.check(LEAVING)
    assert blamed == [0, 2]


def test_a_long_batch_is_told_shortly():
    """The message has the beginning of a list of a thousand."""
    first = after(([str(n) for n in range(1000)], Y))
    with pytest.raises(
        UsageError, match=r"the structure of inputs: \[\] on worker:1, \['0', '1', .*\.\.\. on"
    ) as caught:
        Rank(1, first).same.given("evaluate()", ([], Y))
    assert len(caught.value.message) < 1000


def test_one_process_compares_nothing():
    """There is nobody to differ from."""
    alone = Rank(0)
    alone.transport = None  # type: ignore[assignment]
    assert alone.same.given("evaluate()", (X, Y)).inputs is X
    alone.same.check("save()")
    assert not alone.calls


def test_a_question_has_the_number_of_its_comparison(monkeypatch):
    """Whoever is asked can see whether it has come so far; a stranger's words are no question."""
    monkeypatch.setattr(questions, "_WAIT_S", 600.0)
    store, found = HashStore(), []
    assert asked_about(store) is None
    asking = threading.Thread(target=lambda: found.append(called(store, {1}, 7)))
    asking.start()
    while asked_about(store) is None:
        time.sleep(0.001)
    assert asked_about(store) == 7
    CALLS.answer(store, 1, ())
    asking.join(60)
    assert found == [{1: ()}]
    store.set("assigner/question", "calls")
    assert asked_about(store) is None


@pytest.mark.parametrize(
    ("one", "other", "what", "hint"),
    [
        ("step() with lr 0.1 (settings 0a1b2c)", "step() with lr 0.2, 0.3 (settings 0a1b2d)",
         "the settings of the optimizer", "learning rates"),
        ("step() with settings 0a1b2c", "step() with settings 0a1b2d", "the settings of the optimizer", "learning"),
        ("step() with lr 0.1 (settings 0a1b2c)", "optimizer.step() with lr 0.1 (settings 0a1b2c)", "the call", "order"),
    ],
)  # fmt: skip
def test_calls_that_differ_in_settings_alone_have_a_hint_of_their_own(one, other, what, hint):
    """Their order is the same: it is the learning rate that some rank sets by itself."""
    first = Rank(0)
    first.same.check(one)
    with pytest.raises(UsageError, match=f"differ in {what};") as caught:
        Rank(1, first).same.check(other)
    assert hint in (caught.value.hint or "")
