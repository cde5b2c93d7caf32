"""Several pipelines of one process: made, called and closed in any order, in one thread at a time."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from single_rank import be_only_rank
from workloads import Reference, make_plan, pipeline_of, skips

import assigner
from assigner.errors import UsageError
from assigner.launch.failurereport import VARIABLE, first_report, hand_over, report_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forked_ranks import ForkedRanks


@pytest.mark.slow
@pytest.mark.distributed
def test_several_pipelines_of_three_ranks(forked: ForkedRanks) -> None:
    """Each trains as its plain model; a failure ends all, what all refuse none; a loss that calls one is refused."""
    forked.run("several.py", ranks=3)


def in_another_thread(call: Callable[[], object]) -> list[str]:
    """What a call says that is refused there; empty: it is not."""
    found: list[str] = []

    def run() -> None:
        try:
            call()
        except UsageError as error:
            found.append(error.message)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return found


def test_a_thread_that_comes_in_between_is_refused() -> None:
    """Whichever pipeline it calls; the call that is under way goes on, and others follow from any thread."""
    made, said = skips(), list[str]()
    batch = made.make_batch(8, 0)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as first, pipeline_of(made, make_plan(made)) as second:
        assert in_another_thread(lambda: second.evaluate(batch)) == []

        def hook(*_: object) -> None:
            for call in (lambda: first.save("nowhere"), lambda: second.evaluate(batch), second.optimizer.step):
                said.extend(in_another_thread(call))

        handle = first.optimizer.register_step_pre_hook(hook)
        assert first.step(batch) == pytest.approx(reference.step(batch))
        handle.remove()
        assert in_another_thread(lambda: first.step(batch)) == []
    assert len(said) == 3
    for message in said:
        assert message.startswith("thread 'other' calls a pipeline at ")
        assert message.endswith("while thread 'MainThread' is in a call of one")


def test_a_question_from_another_thread_waits() -> None:
    """What a rank needs of a batch may be asked by a thread that loads batches while another one trains."""
    made, found = skips(), list[bool]()
    thread: list[threading.Thread] = []
    with pipeline_of(made, make_plan(made)) as pipeline:

        def hook(*_: object) -> None:
            thread.append(threading.Thread(target=lambda: found.append(pipeline.needs_inputs)))
            thread[0].start()

        pipeline.optimizer.register_step_pre_hook(hook)
        pipeline.step(made.make_batch(8, 0))
        thread[0].join()
    assert found == [True]


def test_calls_and_questions_of_two_threads_wait_for_each_other() -> None:
    """Neither is refused, whichever comes first."""
    made, stop, asked = skips(), threading.Event(), list[bool]()
    with pipeline_of(made, make_plan(made)) as pipeline:

        def ask() -> None:
            while not stop.is_set():
                asked.append(pipeline.needs_inputs)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for seed in range(30):
                pipeline.step(made.make_batch(8, seed))
        finally:
            stop.set()
            thread.join()
    assert asked
    assert all(asked)


def test_the_last_pipeline_in_a_group_of_the_scripts_is_closed_by_each_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the end of the group, too."""
    be_only_rank(monkeypatch)
    made = skips()
    dist.init_process_group("gloo")
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        dist.destroy_process_group()
    assert not assigner.runtime.ranks.run._joined


def test_on_the_only_rank_a_failure_is_that_of_one_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be made ends no other one, and the process group is left with the last."""
    be_only_rank(monkeypatch)
    made = skips()
    batch, reference = made.make_batch(8, 0), Reference(made)
    first, second = pipeline_of(made, make_plan(made)), pipeline_of(made, make_plan(made))

    def fails(_: object) -> None:
        raise ValueError("no optimizer today")

    with pytest.raises(ValueError, match="no optimizer today"):
        pipeline_of(replace(made, optimizer=fails), make_plan(made))
    first.close()
    assert second.step(batch) == pytest.approx(reference.step(batch))
    assert assigner.runtime.ranks.run._joined
    second.close()
    assert not assigner.runtime.ranks.run._joined


def test_the_error_that_is_told_is_that_of_the_last_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that has caught one error and makes another pipeline is told of the other one's, wherever that fails."""
    monkeypatch.setenv(VARIABLE, f"{os.getppid()} {tmp_path}")
    assert hand_over(report_of(UsageError("the first")))
    made = skips()
    plan = make_plan(made, [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])
    with pytest.raises(UsageError) as raised:
        pipeline_of(made, plan)
    hand_over(report_of(raised.value))
    assert "the plan needs 2 ranks" in str(first_report(tmp_path))
