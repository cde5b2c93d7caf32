"""A machine that is slower than when it was profiled is told apart from a model that is wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from builders import make_plan, make_profile
from made_runs import run_in, slower_worker

from assigner.machine.reference import ReferenceTimes
from assigner.report.agreement import agreement_data, agreement_report
from assigner.report.sheet import Line
from assigner.runtime.ranks.process import float32_precision
from assigner.runtime.recording.reference import measure_reference
from assigner.validation.calibration import calibrated
from assigner.validation.comparison import Agreement, agree
from assigner.validation.machine import disturbances

if TYPE_CHECKING:
    from assigner.formats.profile import Profile

THEN = ReferenceTimes(1e-3, 2e-3, 3e-4)
PLAIN = make_profile(work=[2e-3] * 4, slowness=[1.0, 1.0], edge_bytes=8, latency=0.0)
PROFILE = replace(PLAIN, workers=tuple(replace(each, reference=THEN) for each in PLAIN.workers))
PLAN = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])], micro_batches=4)


def run(truth: Profile, *, compute: float = 1.0, memory: float = 1.0, message: float = 1.0, starved: float = 0.0,
        profile: Profile = PROFILE) -> Agreement:  # fmt: skip
    """A run where `truth` holds, on machines whose reference work takes so many times as long as it did."""
    trace = run_in(truth, PLAN)
    now = ReferenceTimes(THEN.compute_s * compute, THEN.memory_s * memory, THEN.message_s * message)
    workers = tuple(replace(each, reference=now, starved=starved) for each in trace.workers)
    return agree(PLAN, profile, replace(trace, workers=workers))


def lines(found: Agreement) -> list[str]:
    return [part.text for part in agreement_report(found) if isinstance(part, Line)]


def slowed(factor: float) -> Profile:
    """Both workers compute so many times as long."""
    both = slower_worker(slower_worker(PROFILE, 0, forward=factor, backward=factor), 1, forward=factor, backward=factor)
    return replace(
        both, measurements=tuple(replace(each, update_s=factor * each.update_s) for each in both.measurements)
    )


def test_a_slower_machine_explains_a_slower_step() -> None:
    """All of 9 % is the machine's: the model is right, and what was slower is listed."""
    found = run(slowed(1.09), compute=1.12, memory=1.06)
    assert found.paced_s == pytest.approx(found.step.measured_s, rel=1e-3)
    (said,) = [text for text in lines(found) if text.startswith("the machine is")]
    assert said.startswith("the machine is 9.0 % slower than when it was profiled")
    assert "the model of the step is 0.0 %" in said
    assert any(text.startswith("  worker:0/cpu: compute 12.0 % slower, memory 6.0 % slower") for text in lines(found))
    assert agreement_data(found)["machine"]["paced_step_s"] == found.paced_s


def test_a_wrong_model_on_the_same_machine_is_the_models() -> None:
    """A step that takes 3 % longer on a machine that is as fast as before."""
    (said,) = [text for text in lines(run(slowed(1.03))) if text.startswith("the machine is")]
    assert said == "the machine is as fast as when it was profiled; the model of the step is 2.9 % too low"


def test_messages_between_hosts_are_not_slowed_by_the_hosts_own() -> None:
    """The reference says nothing of a wire: only messages inside a host take as much longer as it did."""
    apart = replace(PROFILE, workers=tuple(replace(each, host=each.name) for each in PROFILE.workers))
    inside = replace(PROFILE, workers=tuple(replace(each, host="one") for each in PROFILE.workers))
    paced = [run(PROFILE, message=9.0, profile=each).paced_s for each in (apart, inside)]
    assert paced[0] == pytest.approx(run(PROFILE).step.predicted_s)
    assert paced[1] is not None
    assert paced[1] > run(PROFILE).step.predicted_s


def test_files_of_an_older_release_say_nothing_of_the_machine() -> None:
    """Without reference times on both sides there is no line and no figure."""
    found = agree(PLAN, PROFILE, run_in(PROFILE, PLAN))
    assert (found.machines, found.paced_s, found.disturbances) == ((), None, ())
    assert not any(text.startswith("the machine") for text in lines(found))
    assert run(PROFILE, profile=PLAIN).paced_s is None


def test_other_programs_in_the_run_and_in_the_profile_are_told() -> None:
    """A sentence each, with how much of whose time; a little is not worth one."""
    busy = replace(PROFILE, measurements=tuple(replace(each, starved=0.5) for each in PROFILE.measurements))
    told = run(PROFILE, starved=0.4, profile=busy).disturbances
    assert told == (
        "the profile was measured on a busy machine: other programs had up to 50 % of the time of worker:0, worker:1",
        "the run was on a busy machine: other programs had up to 40 % of the time of worker:0, worker:1",
    )
    assert run(PROFILE, starved=0.05).disturbances == ()


def test_a_corrected_profile_is_of_the_runs_machine() -> None:
    """Its times are those of the run: compared again the machine is unchanged, and none is known that was not told."""
    corrected = calibrated(PROFILE, run(slowed(1.2), compute=1.2, memory=1.2), trace="trace.json")
    again = run(slowed(1.2), compute=1.2, memory=1.2, profile=corrected)
    assert again.paced_s == pytest.approx(again.step.predicted_s)
    assert again.step.error == pytest.approx(0, abs=1e-2)
    untold = calibrated(PROFILE, agree(PLAN, PROFILE, run_in(slowed(1.2), PLAN)), trace="trace.json")
    assert [each.reference for each in untold.workers] == [None, None]


def test_the_reference_is_measured_of_this_machine() -> None:
    """Every piece of work takes some time; two measurements give their means."""
    found = measure_reference(torch.device("cpu"))
    assert min(found.compute_s, found.memory_s, found.message_s) > 0
    assert THEN.together(ReferenceTimes(3e-3, 4e-3, 5e-4)) == ReferenceTimes(2e-3, 3e-3, pytest.approx(4e-4))


PRECISE, FAST = (
    "cuda matmul ieee, cudnn conv tf32, cpu matmul ieee",
    "cuda matmul tf32, cudnn conv tf32, cpu matmul bf16",
)


def test_another_precision_of_float32_is_told() -> None:
    """A script may set it where the profile had another; what concerns no device of the run is left out."""
    profile, trace = replace(PROFILE, environment={"float32": PRECISE}), run_in(PROFILE, PLAN)
    told = list(disturbances(profile, replace(trace, environment={"float32": FAST})))
    assert told == ["float32 was computed as cpu matmul ieee in the profile, and as cpu matmul bf16 in the run"]
    on_gpus = tuple(replace(each, worker=f"worker:{n}/cuda:{n}") for n, each in enumerate(trace.workers))
    (said,) = disturbances(profile, SimpleNamespace(environment={"float32": FAST}, workers=on_gpus))  # type: ignore[arg-type]
    assert said.startswith(
        "float32 was computed as cuda matmul ieee, cudnn conv tf32 in the profile, and as cuda matmul"
    )
    assert not list(disturbances(profile, replace(trace, environment={"float32": PRECISE})))
    assert not list(disturbances(profile, replace(trace, environment={})))


def test_the_precision_is_as_the_process_is_set() -> None:
    """What a model file or a script has set."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        precise = float32_precision()
        torch.set_float32_matmul_precision("high")
        assert "cuda matmul tf32" in float32_precision()
        assert "cuda matmul ieee" in precise
    finally:
        torch.set_float32_matmul_precision(before)
