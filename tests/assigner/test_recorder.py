"""What a run's trace says: every action of the program, once and in order, on one clock."""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from brief import measure_briefly, measuring_briefly
from runs.held import KEPT_BYTES
from runs.traced import CASES, KEPT
from workloads import graph_of, language, make_plan, skips

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.formats.trace import check_same_plan, load_trace
from assigner.runtime.recording import recorder
from assigner.runtime.recording.clock import ClockComparison, PeersClock
from assigner.runtime.recording.memory import MemoryGauge, held_bytes
from assigner.schedule.program import build_program
from assigner.validation.observed import traced_route

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

    from assigner.formats.plan import Plan
    from assigner.formats.trace import Trace, TracedAction, WorkerTrace
    from assigner.schedule.program import Program, Route

RUNS = Path(__file__).resolve().parent.parent / "runs"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast this machine is, which a trace says too, is measured briefly."""
    measure_briefly(monkeypatch.setattr)


def planned(name: str) -> tuple[Plan, Program]:
    make, stages, options = CASES[name]
    plan = make_plan(make(), stages, **options)
    graph = graph_of(make())
    return plan, build_program(plan, graph.edges, graph.ties)


def route_of(action: TracedAction, worker: WorkerTrace) -> Route | None:
    """The route of a send or a receive; None: it is another action."""
    if action.message is None:
        return None
    return traced_route(action.message, worker.worker, sent=action.kind == "send")


@pytest.fixture(scope="module")
def folder(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tests/runs/traced.py left."""
    made = tmp_path_factory.mktemp("traced")
    forked.run("traced.py", made, ranks=3)
    return made


def traces(folder: Path) -> list[tuple[Trace, Program]]:
    return [(load_trace(folder / f"{name}.json"), planned(name)[1]) for name in CASES]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_program(folder, name):
    """In kind, stage, micro-batch, route and order, what each worker did in each step is its part of the program."""
    trace, (plan, program) = load_trace(folder / f"{name}.json"), planned(name)
    check_same_plan(trace, plan)
    assert trace.steps == KEPT
    assert [worker.worker for worker in trace.workers] == list(plan.workers)
    for worker in trace.workers:
        for step in range(KEPT):
            whole, *did = [action for action in worker.actions if action.step == step]
            assert whole.kind == "step"
            assert [(each.kind, each.stage, each.micro_batch, route_of(each, worker)) for each in did] == [
                (each.kind, each.stage, each.micro_batch, each.route) for each in program.actions[worker.worker]
            ]
            assert all(whole.start_s <= each.start_s <= each.end_s <= whole.end_s for each in did)


@pytest.mark.distributed
def test_a_worker_does_one_thing_at_a_time(folder):
    """Forwards, backwards, receives and updates of one worker do not overlap, and neither do its steps."""
    for trace, _ in traces(folder):
        for worker in trace.workers:
            for kinds in (("forward", "backward", "receive", "update"), ("step",)):
                done = [action for action in worker.actions if action.kind in kinds]
                assert all(first.end_s <= second.start_s for first, second in itertools.pairwise(done))


@pytest.mark.distributed
def test_messages_arrive_after_they_were_sent(folder):
    """On the trace's one clock a message is there after it was handed over, and both ends say how large it was."""
    for trace, _ in traces(folder):
        sent, received = (
            {
                (action.step, action.micro_batch, route_of(action, worker)): (action, worker.clock_error_s)
                for worker in trace.workers
                for action in worker.actions
                if action.kind == kind
            }
            for kind in ("send", "receive")
        )
        assert sent.keys() == received.keys()
        for key, (arrival, error) in received.items():
            sending, other_error = sent[key]
            assert arrival.end_s >= sending.start_s - error - other_error
            assert arrival.message.bytes == sending.message.bytes > 0


@pytest.mark.distributed
def test_clocks_of_one_host_agree(folder):
    """Ranks of one host have one clock: the error that the comparison states is small, and 0 for rank 0."""
    for trace, _ in traces(folder):
        for worker in trace.workers:
            assert 0 <= worker.clock_error_s < 0.1
            assert (worker.clock_error_s == 0) == (worker.worker == "worker:0/cpu")
            assert worker.peak_bytes >= max(action.memory_bytes or 0 for action in worker.actions)
            assert worker.base_bytes > 0


@pytest.mark.distributed
def test_trouble_leaves_no_file_and_a_pipeline_that_goes_on(folder):
    """What cannot be written is refused on every rank; an exception or no whole step in the block leaves no file."""
    for rank in range(3):
        found = json.loads((folder / f"{rank}.json").read_text())
        assert "gpipe.json" in found["refused"]
        assert "entered" not in found
        assert found["broken"] is False
        assert "no step to write" in found["empty"]
        assert re.fullmatch(r"(worker:0: )?cannot write \S+full.json: No space left on device", found["full"])
    assert load_trace(folder / "late.json").steps == 1
    assert not {"broken.json", "empty.json", "full.json"} & {path.name for path in folder.iterdir()}


def test_clocks_that_drift_apart():
    """Between two comparisons that differ by more than their errors, a peer's lead grows evenly."""
    clock = PeersClock(ClockComparison(10.0, 1.0, 0.01), ClockComparison(20.0, 2.0, 0.02))
    assert [clock.time(own) for own in (10.0, 15.0, 20.0)] == [11.0, 16.5, 22.0]
    assert clock.error_s == 0.02


def test_clocks_that_agree_stretch_no_duration():
    """Where two comparisons agree within their errors, the better one holds, and the other's distance is an error."""
    clock = PeersClock(ClockComparison(10.0, 1.0, 0.01), ClockComparison(20.0, 1.02, 0.02))
    assert clock.time(20.0) - clock.time(10.0) == 10.0
    assert clock.time(20.0) == 21.0
    assert clock.error_s == pytest.approx(0.04)


@pytest.mark.long
def test_one_process_needs_no_group(tmp_path):
    """A plan on one worker is traced without a launcher; the first action is at 0 s, on an exact clock."""
    made = language()
    with Pipeline(made, make_plan(made), remat="always", graph=graph_of(made)) as pipeline:
        with pipeline.trace(tmp_path / "trace.json"):
            losses = [pipeline.step(made.make_batch(8, n)) for n in range(2)]
        assert all(loss > 0 for loss in losses)
    trace = load_trace(tmp_path / "trace.json")
    (worker,) = trace.workers
    assert (trace.steps, trace.remat, worker.clock_error_s) == (2, "always", 0)
    assert worker.actions[0].start_s == 0
    assert worker.reference.compute_s > 0
    assert 0 <= worker.starved <= 1
    assert all(seconds > 0 for seconds in trace.step_s)


def test_steps_that_are_not_the_plans_program_are_not_kept(tmp_path):
    """Ragged batches, steps without an update and lone updates run, and are not in the trace.

    A step that ends an accumulation is, and no update that follows it.
    """
    made = skips()
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        with pipeline.trace(tmp_path / "trace.json"):
            pipeline.step(made.make_batch(8, 0), update=False)
            pipeline.optimizer.step()
            pipeline.step(made.make_batch(8, 1), update=False)
            pipeline.step(made.make_batch(8, 2))
            for _, parameter in pipeline.named_parameters():
                parameter.grad = torch.ones_like(parameter)
            pipeline.optimizer.step()
            pipeline.step(made.make_batch(9, 3))
        assert pipeline.steps == 4
    trace = load_trace(tmp_path / "trace.json")
    assert trace.steps == 1
    assert [action.kind for action in trace.workers[0].actions].count("update") == 1


@pytest.mark.long
def test_micro_batches_of_one_row_are_traced(tmp_path):
    """Their graph is another than that of more rows, with the same actions: the trace has them all."""
    made = language()
    plan = make_plan(made, micro_batches=8)
    assert plan.micro_batch_size == 1
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline, pipeline.trace(tmp_path / "trace.json"):
        pipeline.step(made.make_batch(8, 0))
    (worker,) = load_trace(tmp_path / "trace.json").workers
    graph = graph_of(made)
    program = build_program(plan, graph.edges, graph.ties)
    assert [(each.kind, each.stage, each.micro_batch) for each in worker.actions if each.kind != "step"] == [
        (each.kind, each.stage, each.micro_batch) for each in program.actions[worker.worker]
    ]


def test_tracing_changes_no_result(tmp_path):
    """Losses with a trace are to the last bit those without one."""
    made = language(dropout=0.3)
    batches = [made.make_batch(8, n) for n in range(4)]
    with (
        Pipeline(made, make_plan(made), graph=graph_of(made)) as plain,
        Pipeline(made, make_plan(made), graph=graph_of(made)) as watched,
    ):
        expected = [plain.step(batch) for batch in batches]
        with watched.trace(tmp_path / "trace.json"):
            assert [watched.step(batch) for batch in batches] == expected


def test_nothing_is_recorded_outside_of_a_trace(tmp_path, monkeypatch):
    """Without a trace, before one and after one, no span is made."""
    made = skips()
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        with monkeypatch.context() as patch:
            patch.setattr(recorder, "RecordedSpan", None)
            pipeline.step(made.make_batch(8, 0))
        with pipeline.trace(tmp_path / "trace.json"):
            pipeline.step(made.make_batch(8, 1))
        monkeypatch.setattr(recorder, "RecordedSpan", None)
        pipeline.step(made.make_batch(8, 2))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.long
def test_nothing_leaks_over_a_hundred_traced_steps(tmp_path):
    """Only the last steps are held meanwhile, and nothing after it: no thread, no open file, no recorder."""
    made = skips()
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        gc.collect()  # what earlier tests left is none of this one's
        before = threading.active_count(), open_files()
        with pipeline.trace(tmp_path / "trace.json", last=4):
            for n in range(100):
                pipeline.step(made.make_batch(8, n))
            watched = weakref.ref(pipeline._installed.executor.recorder)
            assert len(watched().steps) == 4
        gc.collect()
        assert watched() is None
        assert (threading.active_count(), open_files()) == before


@pytest.mark.long
def test_a_second_trace_waits_for_the_first(tmp_path):
    """No two traces at a time, none of no step, and an existing file is replaced only by force."""
    made = skips()
    path = tmp_path / "trace.json"
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        for n in range(2):
            with pipeline.trace(path, force=True):
                pipeline.step(made.make_batch(8, n))
                with pytest.raises(UsageError, match="already"), pipeline.trace(tmp_path / "other.json"):
                    pass
        with pytest.raises(UsageError, match="exists"), pipeline.trace(path):
            pass
        with pytest.raises(UsageError, match="last=0"), pipeline.trace(tmp_path / "other.json", last=0):
            pass


@pytest.fixture
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is read after every action."""
    monkeypatch.setattr(recorder, "LOOK_EVERY_S", 0)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkerTrace]:
    """The worker of each of the traces that tests/runs/held.py left."""
    made = tmp_path_factory.mktemp("held")
    done = subprocess.run(  # a process from its start: the C library reads the variable there
        [sys.executable, RUNS / "held.py", made], capture_output=True, text=True, timeout=1200, check=False,
        env={**measuring_briefly(), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: load_trace(made / f"{name}.json").workers[0] for name in ("kept", "again")}


def after(worker: WorkerTrace, kind: str) -> list[float]:
    return [action.memory_bytes for action in worker.actions if action.kind == kind]


@pytest.mark.long
def test_memory_rises_with_what_forwards_keep(held):
    """Every forward of a first step adds what it keeps; the peak is at least the highest of all, and no dream."""
    forwards = after(held["kept"], "forward")
    for before, now in itertools.pairwise(forwards):
        assert now - before == pytest.approx(KEPT_BYTES, rel=0.1)
    highest = max(forwards + after(held["kept"], "backward"))
    assert highest <= held["kept"].peak_bytes < highest + 4 * KEPT_BYTES


@pytest.mark.long
def test_rematerialised_forwards_keep_nothing(held):
    """With rematerialisation the forwards of a first step add nothing, and the peak is lower."""
    forwards = after(held["again"], "forward")
    assert forwards[3] - forwards[0] < 0.1 * KEPT_BYTES
    assert held["again"].peak_bytes < held["kept"].peak_bytes - KEPT_BYTES


@pytest.mark.long
def test_short_actions_share_a_look_at_the_memory(tmp_path, monkeypatch):
    """Actions that end soon after a look are without one; the trace says None of them."""
    made = skips()
    monkeypatch.setattr(recorder, "LOOK_EVERY_S", 3600)
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline, pipeline.trace(tmp_path / "trace.json"):
        pipeline.step(made.make_batch(8, 0))
    held = [action.memory_bytes for action in load_trace(tmp_path / "trace.json").workers[0].actions]
    assert sum(each is not None for each in held) <= 1


def test_the_gauge_sees_an_allocation():
    """What is held rises by an allocation, and the peak remembers it until it is reset."""
    size = 64 << 20
    gc.collect()  # what other tests left must not go meanwhile
    gauge = MemoryGauge(CPU)
    gauge.reset_peak()
    before = gauge.held()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * size)
        assert 0.95 * size < gauge.held() - before < 2.2 * size
    peak = gauge.peak()
    assert peak is None or peak - before > 0.95 * size
    gauge.reset_peak()
    assert peak is None or gauge.peak() < peak
    gauge.close()
    assert held_bytes(CPU) > 0


class Reached:
    """An event that a device reaches at a time in ms after the step's first one."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def record(self) -> None:
        pass

    def elapsed_time(self, other: Reached) -> float:
        return other.at_ms - self.at_ms


@pytest.mark.parametrize(("computed_ms", "start_s"), [(40.0, 10.04), (-5.0, 10.001), (900.0, 10.5)])
def test_a_send_begins_when_its_tensor_has_been_computed(monkeypatch, computed_ms, start_s):
    """A host is ahead of its GPU: what it hands over may not be there yet; nothing leaves before it was handed over."""
    monkeypatch.setattr(recorder, "_event", lambda: Reached(computed_ms))
    made = recorder.Recorder(MemoryGauge(CPU), last=1)
    span = recorder.RecordedSpan(None, 0.0)
    span.handed_over(SimpleNamespace(nbytes=8, is_cuda=True))
    span.start_s, span.end_s = 10.001, 10.5
    made.steps.append(recorder.RecordedStep([span], (Reached(0.0), 10.0)))
    made.settle()
    assert (span.start_s, span.end_s, span.moved_bytes) == (pytest.approx(start_s), 10.5, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_times_itself(tmp_path, always_looking):
    """On CUDA forwards and backwards lie in their step and do not overlap, and memory is the allocator's."""
    made = skips()
    plan = make_plan(made)
    plan = replace(plan, stages=(replace(plan.stages[0], sole_worker="worker:0/cuda:0"),))
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline, pipeline.trace(tmp_path / "trace.json"):
        for n in range(3):
            pipeline.step(made.make_batch(8, n))
    (worker,) = load_trace(tmp_path / "trace.json").workers
    done = [action for action in worker.actions if action.kind in ("forward", "backward", "update")]
    assert all(action.seconds > 0 and action.memory_bytes > 0 for action in done)
    assert all(first.end_s <= second.start_s + 1e-5 for first, second in itertools.pairwise(done))
