"""Partitions run as a stage: in which order, whose times are whose, and who runs beside them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from assigner.model.marking import PartitionGraph, partition_graph
from assigner.model.workload import Workload
from assigner.profiler import stagegroups
from assigner.profiler.partitionbench import Workbench
from assigner.profiler.sampling import Stopwatch
from assigner.profiler.stagegroups import (
    AloneBench,
    JoinedBenches,
    StageBench,
    joined_benches,
    measured_stages,
    stage_partitions,
)
from assigner.profiler.tasks import Point
from assigner.profiler.walk import collect_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CPU = torch.device("cpu")
WIDTH, ROWS = 8, 2


class Time(Stopwatch):
    """A clock that only partitions move, and the watch that reads it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now = 0.0

    def mark(self, *owner: str) -> None:
        self._marks.append((owner, self.now))

    def seconds(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [end - begin for (_, begin), (_, end) in itertools.pairwise(marks)]


class Noted(Stopwatch):
    """Notes whose time has ended."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.owners: list[str] = []

    def mark(self, *owner: str) -> None:
        part, name = owner
        self.owners.append(f"{part[0]}{name}")


@dataclass(eq=False)
class Bench:
    """A partition that takes known times, and notes when it is called."""

    name: str
    time: Time
    forward_s: float
    backward_s: float
    calls: list[str]
    compared: list[tuple[float, float]] = field(default_factory=list)
    compared_parts: list[tuple[float, float, float]] = field(default_factory=list)

    def forward(self, micro_batch: int, *, again: bool) -> None:
        self.calls.append(f"{'RF'[not again]} {self.name}{micro_batch}")
        self.time.now += self.forward_s * (1 + micro_batch)

    def backward(self, micro_batch: int, *, again: bool = False, split: bool = False) -> None:
        self.calls.append(f"{'BI'[split]} {self.name}{micro_batch}")
        whole_s = self.backward_s * (1 + micro_batch) + (0.5 * self.forward_s if again else 0.0)
        self.time.now += 0.5 * whole_s if split else whole_s

    def backward_weight(self, micro_batch: int) -> None:
        self.calls.append(f"W {self.name}{micro_batch}")
        self.time.now += 0.75 * self.backward_s * (1 + micro_batch)


class Three:
    """A stage of three partitions; their mean over two micro-batches is 1.5 times that of the first."""

    def __init__(self, alike: Callable[[Sequence[Bench]], Sequence[Sequence[Bench]]] = lambda each: [[n] for n in each],
                 **changes: Any) -> None:  # fmt: skip
        self.time, self.calls = Time(), list[str]()
        times = {"a": (2.0, 6.0), "b": (4.0, 8.0), "c": (10.0, 16.0)}
        self.benches = [Bench(name, self.time, *each, self.calls) for name, each in times.items()]
        given: dict[str, Any] = {"depth": 2, "is_crowded": False, "device": CPU, **changes}
        measured: Any = {Point("", n): some for n, some in enumerate(alike(self.benches))}
        self.stage = StageBench([AloneBench(each) for each in self.benches], measured, **given)  # type: ignore[arg-type]
        self.stage.watch = self.time


def test_each_micro_batch_goes_through_all_partitions_before_the_next() -> None:
    """Forwards in the model's order, backwards in reverse, the last micro-batch first."""
    three = Three()
    three.stage.run()
    assert " ".join(three.calls) == "F a0 F b0 F c0 F a1 F b1 F c1 B c1 B b1 B a1 B c0 B b0 B a0"


def test_times_go_to_their_partition() -> None:
    """A forward and a backward of each, as means over the micro-batches."""
    assert Three().stage.run() == pytest.approx((3.0, 9.0, 6.0, 12.0, 15.0, 24.0))
    assert Three(depth=1).stage.run() == pytest.approx((2.0, 6.0, 4.0, 8.0, 10.0, 16.0))


def test_only_what_is_asked_for_is_told_and_alike_partitions_are_averaged() -> None:
    """c, then a and b as one; what runs for company alone is left out."""
    assert Three(lambda each: [[each[2]], [each[0], each[1]]]).stage.run() == pytest.approx((15.0, 24.0, 4.5, 10.5))
    assert Three(lambda each: [[each[1]]]).stage.run() == pytest.approx((6.0, 12.0))


def test_every_third_run_compares_rematerialised_ones() -> None:
    """After the warm-up, each partition with itself; the times that are told stay those of stored ones."""
    three = Three()
    for _ in range(13):
        assert three.stage.run()[:2] == pytest.approx((3.0, 9.0))
    assert [len(bench.compared) for bench in three.benches] == [4, 4, 4]
    assert three.benches[0].compared[0] == pytest.approx((12.0, 13.0))
    assert three.calls.count("R a0") == 4


def test_every_third_run_compares_backwards_in_parts_where_that_is_asked_for() -> None:
    """Each partition with the whole backward of the same run; the times that are told stay those of whole ones."""
    three = Three(in_parts=True)
    for _ in range(13):
        assert three.stage.run()[:2] == pytest.approx((3.0, 9.0))
    assert [len(bench.compared_parts) for bench in three.benches] == [3, 3, 3]
    for bench, whole in zip(three.benches, (9.0, 12.0, 24.0), strict=True):
        assert bench.compared_parts[0] == pytest.approx((whole, 0.5 * whole, 0.75 * whole))
    parts = [call for call in three.calls if call[0] in "IW"][:12]
    assert " ".join(parts) == "I c1 I b1 I a1 W c1 W b1 W a1 I c0 I b0 I a0 W c0 W b0 W a0"


def test_where_memory_is_short_pages_are_given_back_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only there. It takes its memory anew in a run that is not timed: training does so once for all steps."""
    given: list[int] = []
    monkeypatch.setattr(stagegroups, "return_free_pages", lambda: given.append(1))
    Three().stage.run()
    assert not given
    three = Three(is_crowded=True)
    assert [three.stage.run()[0] for _ in range(2)] == [3.0, 3.0]
    assert (len(given), three.calls.count("F a0")) == (2, 4)


def make_workload(blocks: int) -> Workload:
    """Blocks that are alike, but for the first and the last."""
    return Workload(
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)]),
        batch=lambda rows, g: (torch.randn(rows, WIDTH, generator=g), torch.randn(rows, WIDTH, generator=g)),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        batch_size=4 * ROWS,
    )


@pytest.fixture(scope="module")
def ten() -> PartitionGraph:
    """Ten partitions: 1 to 8 of one kind, 0 and 9 of their own."""
    return partition_graph(make_workload(10))


PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        (["1"], ["2", "3", "4", "5", "6"]),  # the like ones, six in all
        (["0"], ["1", "2", "3", "4", "5"]),  # neighbours, where there is none like it
        (["9"], ["8", "7", "6", "5", "4"]),
        (["0", "1", "9"], ["2", "3", "4", "5", "6"]),  # enough are there: no neighbours
        ([str(n) for n in range(10)], []),
    ],
)
def test_like_partitions_keep_company_first(ten: PartitionGraph, names: list[str], beside: list[str]) -> None:
    """Six of a kind at most, the nearest first; neighbours of other kinds only until there are six in all."""
    assert stage_partitions(ten, names) == beside


def test_company_keeps_to_its_budget(ten: PartitionGraph) -> None:
    """Parameters of two fit, and of none where there is no room for one."""
    assert stage_partitions(ten, ["1"], 2 * PARAMETERS) == ["2", "3"]
    assert stage_partitions(ten, ["1"], PARAMETERS - 1) == []


def make_workbench(graph: PartitionGraph, room: float, wanted: Sequence[str] = ("1",)) -> Workbench:
    """All partitions are built; the room is the same at any time."""
    workload = make_workload(10)
    inputs = collect_inputs(workload, graph, [ROWS, 4 * ROWS], CPU, budget_bytes=1e9, wanted=wanted)
    modules = graph.build(list(graph.piece), CPU)
    return Workbench(workload, graph, CPU, modules, inputs, state_share=2.0, room=lambda: room)


def test_a_stage_has_its_company(ten: PartitionGraph) -> None:
    """Five like ones run beside the one that is measured, and count for it; each size is a stage of its own."""
    workbench = make_workbench(ten, math.inf)
    benches = {point: workbench.measured(point) for point in (Point("1", ROWS), Point("1", 4 * ROWS))}
    found = measured_stages(benches, workbench)
    assert [list(stage.measured) for stage in found] == [[point] for point in benches]
    for stage in found:
        assert [each.runner.piece.name for each in stage.benches] == ["1", "2", "3", "4", "5", "6"]
        assert [len(alike) for alike in stage.measured.values()] == [6]
        assert min(stage.run()) > 0
    assert [stage.depth for stage in found] == [4, 1]  # as many micro-batches as a step has


def test_a_stage_without_memory_for_company_is_its_own(ten: PartitionGraph) -> None:
    """The company is taken for what it needs while it runs, at most half of the free memory, and leaves again."""
    point = Point("1", 4 * ROWS)
    workbench = make_workbench(ten, math.inf)
    benches = {point: workbench.measured(point)}
    held = workbench.held[point] = replace(workbench.held[point], heap=1.0)
    workbench.room = lambda: 2 * held.needed() + 1e-3
    (stage,) = measured_stages(benches, workbench)
    assert [each.runner.piece.name for each in stage.benches] == ["1"]
    assert stage.is_crowded
    assert all(each.grad is None for name in "23456" for each in workbench.modules[name].parameters())
    workbench.room = lambda: 2 * held.needed() - 1
    (stage,) = measured_stages(benches, workbench)
    assert (stage.depth, stage.is_crowded) == (benches[point].depth, True)


def test_fewer_micro_batches_are_in_flight_before_company_is_sent_away(ten: PartitionGraph) -> None:
    """All six at one micro-batch rather than one at four."""
    point = Point("1", ROWS)
    workbench = make_workbench(ten, math.inf)
    benches = {point: workbench.measured(point)}
    held = workbench.held[point] = replace(workbench.held[point], heap=1.0, workspace_bytes=10**6)
    workbench.room = lambda: (2 * 6 * held.needed() + 1) / 1
    (stage,) = measured_stages(benches, workbench)
    assert (len(stage.benches), stage.depth) == (6, 1)


def test_company_of_another_kind_is_tried_at_the_smallest_size_alone(ten: PartitionGraph) -> None:
    """At a larger one nobody knows what it takes: it stays away until it was run at a smaller."""
    workbench = make_workbench(ten, math.inf, wanted=("0", "1"))
    with pytest.raises(MemoryError, match="not known"):
        workbench.companion(Point("0", 4 * ROWS))
    workbench.companion(Point("0", ROWS))
    workbench.companion(Point("0", 4 * ROWS))
    assert {Point("0", ROWS), Point("0", 4 * ROWS)} == set(workbench.held)
    assert stagegroups._ROOM_SHARE <= 0.5


def test_a_backward_that_takes_nothing_has_parts_that_take_nothing(ten: PartitionGraph) -> None:
    """Joined with others, a partition without a gradient has no time of its own."""
    bench = make_workbench(ten, math.inf).measured(Point("1", ROWS))
    bench.compared_parts += [(0.0, 1.0, 1.0)] * 8
    assert bench.parts(0.0, 0.0)[:2] == (0.0, 0.0)
    bench.compared += [(0.0, 1.0)] * 8
    assert bench.recompute_s(0.0, 0.0) == 0.0


def test_what_waits_for_the_weight_part_is_counted(ten: PartitionGraph) -> None:
    """What came in at the product, whose own input is counted as one; the first partition waits with all it has."""
    workbench = replace(make_workbench(ten, math.inf, wanted=("0", "1")), in_parts=True)
    found = {}
    for name in ("0", "1"):
        point = Point(name, ROWS)
        bench = workbench.measured(point)
        assert bench.parts(1.0, 0.0) == (None, None, None)
        bench.compared_parts.append((2.0, 1.0, 1.5))
        activations = workbench.held[point].activation_bytes
        found[name] = bench.parts(4.0, activations)
    assert found["1"] == (2.0, 3.0, 4 * ROWS * WIDTH)
    assert found["0"] == (2.0, 3.0, activations + 4 * ROWS * WIDTH)


def test_partitions_that_follow_each_other_are_joined(ten: PartitionGraph) -> None:
    """As training joins them; behind a gap another graph begins. What goes on to others has its gradient from there."""
    workbench = make_workbench(ten, math.inf)
    benches = [workbench.companion(Point(name, ROWS)) for name in "12357"]
    found = joined_benches(benches)
    assert [[each.name for each in some.benches] for some in found] == [["1", "2", "3"], ["5"], ["7"]]
    (joined, *_) = found
    assert isinstance(joined, JoinedBenches)
    assert [each.value for each in joined.island.outputs] == [("3", 0)]


def test_a_joined_backward_is_that_of_its_partitions(ten: PartitionGraph) -> None:
    """The gradients of both are those of one graph; each partition's time ends where that of the one before begins."""
    workbench = make_workbench(ten, math.inf)
    benches = [workbench.companion(Point(name, ROWS)) for name in "12"]
    parameters = [each for bench in benches for each in bench.runner.module.parameters()]
    for each in parameters:
        each.grad = None
    measured = {Point(each.name, ROWS): [each] for each in benches}
    stage = StageBench(joined_benches(benches), measured, depth=1, is_crowded=False, device=CPU)
    assert min(stage.run()) > 0
    (read,) = benches[0].reads[0]
    first, second = (bench.runner.module for bench in benches)
    (output,) = second(*first(read))
    expected = torch.autograd.grad(output, [read, *parameters], benches[1].gradients[0])
    for found, wanted in zip([read.grad, *(each.grad for each in parameters)], expected, strict=True):
        assert found is not None
        torch.testing.assert_close(found, wanted)


def test_times_are_each_partitions_own_where_one_gives_on_what_it_reads() -> None:
    """Its output is that of the one in front: a backward comes to both at once, and goes through that one alone."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Identity(), nn.Linear(WIDTH, WIDTH)]
    made = replace(make_workload(1), model=lambda: nn.Sequential(*layers))
    graph = partition_graph(made)
    modules = graph.build(list(graph.piece), CPU)
    inputs = collect_inputs(made, graph, [ROWS], CPU, budget_bytes=1e9, wanted=list(graph.piece))
    workbench = Workbench(made, graph, CPU, modules, inputs, state_share=2.0, room=lambda: math.inf)
    (stage,) = joined_benches([workbench.companion(Point(name, ROWS)) for name in "0123"])
    assert isinstance(stage, JoinedBenches)
    watch = Noted()
    stage.forward(0, watch)
    stage.backward(0, watch)
    assert " ".join(watch.owners) == "f0 f1 f2 f3 b3 b2 b1 b0"


def test_times_add_up_and_a_partition_may_have_none() -> None:
    """As one has to which a backward does not come."""
    time = Time()
    time.mark()
    for part, name in (("forward", "a"), ("backward", "b"), ("backward", "b")):
        time.now += 1.0
        time.mark(part, name)
    seconds = time.by_owner()
    assert (seconds["forward", "a"], seconds["backward", "b"], seconds["backward", "a"]) == (1.0, 2.0, 0.0)
