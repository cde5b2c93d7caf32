"""What would not fit is not tried: a process that takes too much is killed, and a measurement must not be lost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from assigner.formats.profile import Measurement
from assigner.model.marking import PartitionGraph, partition_graph
from assigner.model.workload import Workload
from assigner.profiler import computetimes, partitionbench, sampling
from assigner.profiler.computetimes import ComputeMeasurement
from assigner.profiler.journal import OptimizerSize
from assigner.profiler.memory import memory_errors
from assigner.profiler.partitionbench import PartitionBench, PartitionBytes
from assigner.profiler.rankprogress import Forecast
from assigner.profiler.stagegroups import StageBench
from assigner.profiler.tasks import Point
from assigner.profiler.update import UpdateBench, optimizer_share
from assigner.profiler.walk import collect_inputs
from assigner.runtime.forward.state import PartitionState
from assigner.runtime.step.partition import PartitionRunner

CPU = torch.device("cpu")
WIDTH, ROWS = 32, 4
PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH)


def make_workload() -> Workload:
    """Three parts of a linear layer and two activations, whose kept values grow with the rows."""
    return Workload(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Sigmoid()) for _ in range(3)]),
        lambda rows, g: (torch.randn(rows, WIDTH, generator=g), torch.randn(rows, WIDTH, generator=g)),
        nn.functional.mse_loss,
        torch.optim.Adam,
        batch_size=4 * ROWS,
    )


@pytest.fixture(scope="module")
def graph() -> PartitionGraph:
    return partition_graph(make_workload())


def make_bench(graph: PartitionGraph, free: float, *, rows: int = ROWS, optimizer_bytes: float = 0) -> PartitionBench:
    """A bench of partition 1 with so many bytes free at any time."""
    piece = graph.piece["1"]
    given = collect_inputs(make_workload(), graph, [rows], CPU, budget_bytes=1e9, wanted={"1"})[rows]["1"]
    module = graph.build(["1"])["1"]
    runner = PartitionRunner(graph, piece, module, CPU, PartitionState(module))
    return PartitionBench(
        runner, given.reads, [True], given.sizes, device=CPU, depth=4, optimizer_bytes=optimizer_bytes,
        room=lambda: free,
    )  # fmt: skip


def test_bytes_grow_with_depth_and_rows() -> None:
    """Each micro-batch in flight holds activations, outputs and their gradients; the workspace is there once."""
    held = PartitionBytes(activation_bytes=100, workspace_bytes=30, output_bytes=10)
    assert held.needed() == 150
    assert held.needed(depth=3) == 390
    assert held.needed(depth=3, scale=2) == 780


def test_all_micro_batches_fit_where_there_is_room(graph: PartitionGraph) -> None:
    """Without a limit the depth stays as asked."""
    bench = make_bench(graph, math.inf)
    held = bench.prepare()
    assert bench.depth == 4
    assert held.activation_bytes > 0
    assert held.output_bytes == ROWS * WIDTH * 4


def test_fewer_micro_batches_are_in_flight_where_few_fit(graph: PartitionGraph) -> None:
    """The depth falls to what fits into the free memory, with the optimizer's state set aside, and to 1 at least."""
    rows = 64 * ROWS
    held = make_bench(graph, math.inf, rows=rows).prepare()
    free = 1000 + partitionbench._MARGIN * held.needed(depth=2) + 10
    bench = make_bench(graph, free, rows=rows, optimizer_bytes=1000)
    bench.prepare()
    assert bench.depth == 2


def test_a_size_that_cannot_fit_is_not_run(graph: PartitionGraph) -> None:
    """Twice the rows take twice the bytes: where they do not fit, nothing is run, and the error has the figures."""
    held = make_bench(graph, math.inf).prepare()
    bench = make_bench(graph, PARAMETERS + held.needed(scale=2) - 1, rows=2 * ROWS)
    parameters = list(bench.runner.module.parameters())
    bench.runner.module = nn.Module()  # type: ignore[assignment]  # whoever runs it fails
    bench.runner.module.weights = nn.ParameterList(parameters)
    with pytest.raises(MemoryError, match=r"one micro-batch would take 0\.0 MB, and 0\.0 MB are free"):
        bench.prepare(held, scale=2.0)


def test_state_that_cannot_fit_is_told_before_the_first_run(graph: PartitionGraph) -> None:
    """Gradients and optimizer state are looked at before anything runs."""
    with pytest.raises(MemoryError, match="gradients and optimizer state"):
        make_bench(graph, 3 * PARAMETERS - 1, optimizer_bytes=2 * PARAMETERS).prepare()


def test_the_optimizers_share_is_found_on_a_small_parameter(graph: PartitionGraph) -> None:
    """Adam keeps two bytes for each byte, and a step count; plain SGD nothing."""
    assert optimizer_share(make_workload(), graph, CPU) == pytest.approx(2, abs=0.01)


class Measured:
    """A share of partition 1 at two sizes, on a device with so many bytes free at any time."""

    def __init__(self, graph: PartitionGraph, free: float, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("SAMPLE_S", "WARM_UP_S", "LIMIT_S"):
            monkeypatch.setattr(sampling, name, 0.0)
        monkeypatch.setattr(computetimes, "free_bytes", lambda _, **__: free / computetimes._SAFE)
        self.forecast, self.found = Forecast(), list[object]()
        self.share = ComputeMeasurement(
            make_workload(), graph, CPU, "worker:0/cpu", 1e9, optimizer_share(make_workload(), graph, CPU),
            self.forecast, lambda _: None, force_busy=True,
        )  # fmt: skip

    def __call__(self) -> dict[int, Measurement]:
        points = [Point("1", ROWS), Point("1", 64 * ROWS)]
        self.share.plan(points)
        self.share.measure(points, self.found.append)
        measured = [each for each in self.found if isinstance(each, Measurement)]
        assert len(measured) == 2
        assert self.forecast.left_s() == pytest.approx(0, abs=1.0)
        assert [self.forecast.done(kind) for kind in ("point", "update")] == [2, 1]
        return {each.micro_batch: each for each in measured}


def test_a_size_that_does_not_fit_is_a_datum(graph: PartitionGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sizes the larger one is recorded as infeasible with its figures, and the smaller one is measured."""
    held = make_bench(graph, math.inf).prepare()
    measured = Measured(graph, 3 * PARAMETERS + 4 * held.needed(), monkeypatch)()
    assert measured[ROWS].infeasible is None
    assert measured[ROWS].forward_s > 0
    assert measured[ROWS].recompute_s is not None
    assert "one micro-batch would take" in (measured[64 * ROWS].infeasible or "")


def test_nothing_is_updated_where_no_size_fits(graph: PartitionGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not run for its gradients and state would be killed by an update: it has none."""
    monkeypatch.setattr(computetimes, "UpdateBench", lambda *_, **__: pytest.fail("it is not made"))
    run = Measured(graph, 3 * PARAMETERS - 1, monkeypatch)
    measured = run()
    assert all("gradients and optimizer state" in (each.infeasible or "") for each in measured.values())
    assert not any(isinstance(each, OptimizerSize) for each in run.found)


def no_memory(*_: object) -> None:
    """What torch does on a CPU."""
    torch.empty(1 << 60, dtype=torch.uint8)


def test_an_update_without_memory_is_a_datum(graph: PartitionGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on, and all sizes of the partition are infeasible."""
    run = Measured(graph, 1e12, monkeypatch)
    monkeypatch.setattr(UpdateBench, "run", no_memory)
    assert all("out of memory when measured" in (each.infeasible or "") for each in run().values())


def test_stages_without_memory_are_measured_apart(graph: PartitionGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that runs out of memory is left, and each point of it is run alone; where even that fails it is said."""
    run, sizes = StageBench.run, list[int]()

    def tight(bench: StageBench) -> tuple[float, ...]:
        sizes.append(len(bench.benches))
        if len(bench.benches) > 1 or len(bench.benches[0].reads[0][0]) > ROWS:
            no_memory()
        return run(bench)

    monkeypatch.setattr(StageBench, "run", tight)
    measured = Measured(graph, 1e12, monkeypatch)()
    assert sizes[0] == 3
    assert set(sizes[1:]) == {1}
    assert measured[ROWS].forward_s > 0
    assert "can't allocate memory" in (measured[64 * ROWS].infeasible or "")


def test_only_memory_errors_are_taken_for_such() -> None:
    """A CPU's comes as a plain RuntimeError; any other is passed on."""
    with pytest.raises(MemoryError, match="can't allocate memory"), memory_errors():
        no_memory()
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        raise RuntimeError("shape")


def test_a_bench_gives_back_what_it_has_taken(graph: PartitionGraph) -> None:
    """Gradients and graphs are gone; a like one's bytes are enough to get it ready again."""
    bench = make_bench(graph, math.inf)
    held = bench.prepare()
    bench.forward(0)
    bench.leave()
    assert not bench.runner.graphs
    assert all(each.grad is None for each in (*bench.runner.module.parameters(), *bench.reads[0]))
    bench.join(held)
    assert all(each.grad is not None for each in bench.runner.module.parameters())
    bench.leave()
    bench.room = lambda: PARAMETERS + held.needed()
    with pytest.raises(MemoryError, match="one micro-batch"):
        bench.join(held)


def test_the_extra_time_of_a_rematerialised_run_is_a_ratio(graph: PartitionGraph) -> None:
    """The middle ratio of the compared runs, on the stored one's time, never below zero."""
    bench = make_bench(graph, math.inf)
    bench.compared = [(1.0, 1.5), (2.0, 3.0), (1.0, 9.0)]
    assert bench.recompute_s(5.0, 5.0) == pytest.approx(5.0)
    assert bench.recompute_s(1.0, 9.0) == pytest.approx(1.25)  # no more than a forward and a little
    bench.compared = [(1.0, 0.9)]
    assert bench.recompute_s(5.0, 5.0) == 0.0
    bench.compared = []
    assert bench.recompute_s(5.0, 5.0) is None


def test_the_walk_goes_on_without_the_memory_for_it(graph: PartitionGraph) -> None:
    """A forward that would not fit is not run: its outputs are the smallest micro-batch's, repeated to the shape."""
    sizes = [ROWS, 3 * ROWS]
    found = collect_inputs(
        make_workload(), graph, sizes, CPU, budget_bytes=1e9, wanted=set(graph.piece), room=lambda: 0.0
    )
    small, large = found[ROWS], found[3 * ROWS]
    assert torch.equal(large["2"].reads[0], small["2"].reads[0].repeat(3, 1))
    assert torch.equal(large["0"].reads[0], large["0"].micro_batch.inputs[0])


def test_inputs_beyond_the_budget_are_left_out(graph: PartitionGraph) -> None:
    """The smallest size is always kept; a larger one is dropped where its inputs would pass the budget."""
    value = 4 * WIDTH
    found = collect_inputs(
        make_workload(),
        graph,
        [ROWS, 3 * ROWS],
        CPU,
        budget_bytes=1e9,
        wanted=set(graph.piece),
        inputs_bytes=6 * ROWS * value,
    )
    assert list(found[ROWS]) == ["0", "1", "2"]
    assert list(found[3 * ROWS]) == ["0"]
