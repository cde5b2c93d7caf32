"""What is measured of a partition: the bytes are exact, the inputs real, and nothing of the caller's changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from assigner.model.marking import PartitionGraph, partition_graph
from assigner.model.workload import Workload
from assigner.profiler.host import host_facts
from assigner.profiler.memory import peak_bytes, saved_bytes
from assigner.profiler.partitionbench import PartitionBench, counted_elsewhere, state_bytes
from assigner.profiler.rank import largest_message
from assigner.profiler.update import UpdateBench, trained
from assigner.profiler.walk import chunks, collect_inputs, representatives
from assigner.runtime.forward.state import PartitionState
from assigner.runtime.step.partition import PartitionRunner

CPU = torch.device("cpu")
ROWS, WIDTH = 6, 32


def make_workload() -> Workload:
    """Linear layers and activations, the first and last of their own kinds, two equal ones between."""
    return Workload(
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]),
        batch=lambda rows, g: (torch.randn(rows, WIDTH, generator=g), torch.randn(rows, WIDTH, generator=g)),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        batch_size=ROWS,
        name="tanh",
    )


@pytest.fixture(scope="module")
def graph() -> PartitionGraph:
    return partition_graph(make_workload())


def make_bench(graph: PartitionGraph, name: str) -> PartitionBench:
    given = collect_inputs(make_workload(), graph, [ROWS], CPU, budget_bytes=1e9, wanted=[name])[ROWS][name]
    piece, module = graph.piece[name], graph.build([name])[name]
    runner = PartitionRunner(graph, piece, module, CPU, PartitionState(module))
    needs = [bool(value.partition) for value in graph.piece[name].reads]
    return PartitionBench(runner, given.reads, needs, given.sizes, device=CPU, depth=3)


def test_one_of_each_kind_is_measured(graph: PartitionGraph) -> None:
    """The first needs no gradient of its input and the last has the loss; those between are alike."""
    assert representatives(graph) == {"0": ["0"], "1": ["1", "2"], "3": ["3"]}


def test_inputs_are_those_of_the_models_own_forward(graph: PartitionGraph) -> None:
    """What a representative reads equals what reaches it in the plain model, however few partitions fit at once."""
    workload = make_workload()
    torch.manual_seed(workload.seed)
    model = workload.model()
    batch, _ = workload.make_batch(ROWS, workload.seed)
    for budget in (1.0, 1e9):
        found = collect_inputs(workload, graph, [2, ROWS], CPU, budget_bytes=budget, wanted=["0", "3"])
        assert [sorted(each) for each in found.values()] == [["0", "3"]] * 2
        torch.testing.assert_close(found[ROWS]["3"].reads[0], model[2](model[1](model[0](batch))), rtol=0, atol=0)
        assert found[2]["3"].reads[0].shape == (2, WIDTH)


def test_the_walk_ends_behind_the_last_that_is_wanted(graph: PartitionGraph) -> None:
    """What comes later in the model is neither built nor run."""
    walked: list[str] = []
    collect_inputs(
        make_workload(),
        graph,
        [ROWS],
        CPU,
        budget_bytes=1e9,
        wanted=["1"],
        on_partition=lambda name, _: walked.append(name),
    )
    assert walked == ["0", "1"]


def test_chunks_fit_their_budget(graph: PartitionGraph) -> None:
    """Runs of partitions stay within the budget; one that is larger stands alone."""
    size = 4 * (WIDTH * WIDTH + WIDTH)
    names = ["0", "1", "2", "3"]
    assert list(chunks(graph, names, 2 * size)) == [["0", "1"], ["2", "3"]]
    assert list(chunks(graph, names, 1)) == [["0"], ["1"], ["2"], ["3"]]


def test_activation_bytes_leave_inputs_and_outputs_out(graph: PartitionGraph) -> None:
    """Linear keeps its input and tanh its output: a partition of the two keeps nothing of its own."""
    bench = make_bench(graph, "1")
    bench.prepare()
    held = bench.bytes()
    assert held.activation_bytes == 0
    value = ROWS * WIDTH * 4
    assert 2 * value <= held.workspace_bytes <= 8 * value  # at least the gradients of output and input


def test_a_gpus_copies_of_the_batch_are_activations(graph: PartitionGraph) -> None:
    """Each micro-batch in flight has its own; what another partition made is counted as its output, on any device."""
    for name, device, counted in (("0", "cuda", False), ("0", "cpu", True), ("1", "cuda", True)):
        bench = make_bench(graph, name)
        known = counted_elsewhere(bench.runner, bench.reads[0], torch.device(device))
        assert any(each is bench.reads[0][0] for each in known) == counted
        assert all(any(each is weight for each in known) for weight in bench.runner.module.parameters())


def test_saved_bytes_count_each_storage_once() -> None:
    """A tensor that two operations keep counts once, and views of it do not count again."""
    x = torch.randn(8, 16, requires_grad=True)

    def forward() -> list[torch.Tensor]:
        middle = x.exp()
        return [middle.sin() + middle.view(16, 8).t().cos().reshape(8, 16)]

    assert saved_bytes(forward, [x]) == 8 * 16 * 4


def test_peak_bytes_see_what_is_freed_again() -> None:
    """The peak counts memory that is gone when the run ends."""

    def run() -> None:
        first = torch.ones(1 << 16)
        second = first + 1
        del first
        third = second * 2
        del second, third

    assert peak_bytes(run, CPU) == pytest.approx(2 * 4 * (1 << 16), abs=256)  # and a number or two


def test_optimizer_state_is_the_users_own(graph: PartitionGraph) -> None:
    """Adam keeps two moments and a step count of each parameter."""
    held = dict(graph.build(["1"])["1"].named_parameters())
    bench = UpdateBench(make_workload(), graph, held, CPU, room=1e9)
    bench.run()
    parameters = 4 * (WIDTH * WIDTH + WIDTH)
    assert bench.state_bytes() == 2 * parameters + 2 * 4
    assert state_bytes(graph.piece["1"], graph.deferred.tensors()) == (parameters, parameters, 0)


def test_what_empties_the_caches_takes_little_of_the_free_memory(graph: PartitionGraph) -> None:
    """64 MiB, and an eighth of what is free where that is less."""
    held = dict(graph.build(["1"])["1"].named_parameters())
    benches = [UpdateBench(make_workload(), graph, held, CPU, room=room) for room in (1e12, 8000.0)]
    assert [each.others.nbytes for each in benches] == [64 << 20, 1000]
    assert trained(nn.Tanh()) == []


def test_the_largest_message_covers_the_whole_batch(graph: PartitionGraph) -> None:
    """Sweeps reach the largest value at one micro-batch a step."""
    assert largest_message(graph, ROWS) == ROWS * WIDTH * 4


def test_a_host_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host share out its free memory; ASSIGNER_HOST names it."""
    monkeypatch.setenv("ASSIGNER_HOST", "shed")
    alone, shared = host_facts(CPU), host_facts(CPU, sharing=4)
    assert alone.host == "shed"
    assert alone.threads == torch.get_num_threads()
    assert 0.2 < shared.memory_bytes / alone.memory_bytes < 0.3
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < alone.memory_bytes <= total
