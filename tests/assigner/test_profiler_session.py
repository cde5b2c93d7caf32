"""A profiling run on one rank: interrupted, gone on with, and measured again in part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from brief import measure_briefly
from builders import make_profile
from single_rank import be_only_rank
from torch import nn
from torch.distributed import PrefixStore

from assigner.errors import FormatError, MeasurementError, UsageError
from assigner.formats.profile import Profile, load_profile, save_profile
from assigner.launch.limitedstore import StoreSilentError
from assigner.model.workload import Workload
from assigner.profiler import session, stagegroups
from assigner.profiler.journal import Note, journal_path
from assigner.profiler.options import ProfileDestination, ProfileOptions
from assigner.profiler.rank import RankSession
from assigner.profiler.session import profile_workload
from assigner.profiler.tasks import Point, RefusedError, Start
from assigner.runtime.failures import failure
from assigner.runtime.messages.sending import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch.distributed import Store

    from assigner.profiler.rankprogress import RankProgress

OPTIONS = ProfileOptions(micro_batches=(2,), force_busy=True)


def make_workload(width: int = 8) -> Workload:
    """Two partitions of two kinds."""
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.Tanh(), nn.Linear(width, width))),
        batch=lambda rows, generator: (torch.randn(rows, width, generator=generator), torch.zeros(rows, width)),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        batch_size=4,
    )


SEEN: list[list[tuple[str, torch.Size]]] = []


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Looks names up, makes groups of them, and counts on all being there."""
    pairs = list(named_parameters)
    SEEN.append([(name, each.shape) for name, each in pairs])
    named = dict(pairs)
    return torch.optim.Adam([{"params": [named["0.weight"], named["0.bias"]]}, {"params": [named["1.1.weight"]]}])


class Run:
    """Profiles the workload into one file, again and again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = folder / "profile.json", monkeypatch
        self.said: list[str] = []
        monkeypatch.setattr(stagegroups, "_IN_TURN", 1)  # each point is kept before the next is begun
        measure_briefly(monkeypatch.setattr)

    def __call__(
        self, *, width: int = 8, options: ProfileOptions = OPTIONS,
        progress: Callable[[RankProgress], None] | None = None,
        resume: bool = False, only: tuple[str, ...] = (), others: tuple[Path, ...] = (),
    ) -> Profile:  # fmt: skip
        be_only_rank(self.monkeypatch)
        output = ProfileDestination(self.path, resume=resume, only=only, others=others, notice=self.said.append)
        made = profile_workload(make_workload(width), "m.py:workload", options, output=output, progress=progress)
        assert made is not None
        return made

    def interrupted(self) -> bytes:
        """Run until the first partition is measured; what the journal then has."""

        def stop(standing: RankProgress) -> None:
            if "'1' at micro-batch" in standing.what:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self(progress=stop)
        return journal_path(self.path, 0).read_bytes()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_run_goes_on_with_what_was_measured(run: Run) -> None:
    """The kept point is not measured again, and the journal is gone when the profile is there."""
    kept = run.interrupted()
    assert b'"partition": "0"' in kept
    assert b'"partition": "1"' not in kept
    assert not run.path.exists()
    measured: list[str] = []
    profile = run(resume=True, progress=lambda standing: measured.append(standing.what))
    assert not any("'0' at micro-batch" in what for what in measured)
    point = next(each for each in profile.measurements if each.partition == "0")
    assert f'"forward_s": {point.forward_s!r}'.encode() in kept
    assert {each.partition for each in profile.measurements} == {"0", "1"}
    assert all(each.optimizer_bytes > 0 for each in profile.partitions)
    assert all(each.reference is not None and each.reference.compute_s > 0 for each in profile.workers)
    assert load_profile(run.path) == profile
    assert not journal_path(run.path, 0).exists()
    assert run.said == []


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (LostConnectionError("worker:1", ConnectionError("closed")),
         r"worker:1 failed: its process is gone, cut off or stuck; worker:0 noticed in the exchange of x \(closed\)"),
        (StoreSilentError("no answer"), "worker:0 failed: .* noticed in the exchange of x"),
    ],
)  # fmt: skip
def test_a_lost_rank_is_named_with_what_was_done_then(
    run: Run, monkeypatch: pytest.MonkeyPatch, lost: Exception, words: str
) -> None:
    """And the hint of its loss is kept."""

    def measure(session: RankSession) -> None:
        session.table.begin("the exchange of x")
        raise lost

    monkeypatch.setattr(failure, "_ASK_S", 0.1)
    monkeypatch.setattr(failure, "_STAY_S", 0.1)
    monkeypatch.setattr(RankSession, "measure", measure)
    with pytest.raises(MeasurementError, match=words) as caught:
        run()
    assert caught.value.hint == "its own output, and its host, may say why"


@pytest.mark.long
def test_other_settings_refuse_the_journal_and_leave_it(run: Run) -> None:
    """What differs is named; the measurements are not lost."""
    kept = run.interrupted()
    with pytest.raises(RefusedError, match=r"micro_batches \[2\] there, \[4\] now"):
        run(resume=True, options=replace(OPTIONS, micro_batches=(4,)))
    with pytest.raises(RefusedError, match="fingerprint"):
        run(resume=True, width=12)
    assert journal_path(run.path, 0).read_bytes() == kept


@pytest.mark.long
def test_a_new_run_says_that_it_replaces_a_journal(run: Run) -> None:
    """And a resumed one that there is nothing to go on with."""
    run.interrupted()
    run()
    assert ["was left by an interrupted run and is replaced" in text for text in run.said] == [True]
    run.path.unlink()
    run(resume=True)
    assert run.said[1:] == ["nothing to go on with: measuring from the start"]


@pytest.mark.long
def test_only_a_part_is_measured_again(run: Run) -> None:
    """The profile's own sizes are taken, and what was not named stays."""
    old = run()
    new = run(only=("1",))
    assert new.measurements[0] == old.measurements[0]
    assert new.measurements[1] != old.measurements[1]
    assert new.measurements[1].micro_batch == 2
    assert load_profile(run.path) == new


@pytest.mark.long
def test_a_profile_that_does_not_fit_is_not_updated(run: Run) -> None:
    """Another model, no such partition, other workers: said before anything is measured."""
    old = run()
    with pytest.raises(FormatError, match="its fingerprint is"):
        run(only=("1",), width=12)
    with pytest.raises(FormatError, match="names no partition") as caught:
        run(only=("tail",))
    assert caught.value.exit_code == UsageError.exit_code
    other = replace(old, workers=(replace(old.workers[0], threads=64),))
    run.path.write_text(run.path.read_text().replace(f'"threads": {old.workers[0].threads}', '"threads": 64'))
    assert load_profile(run.path) == other
    with pytest.raises(FormatError, match="64 threads"):
        run(only=("1",))


@pytest.mark.long
def test_workers_measured_elsewhere_are_added(run: Run) -> None:
    """They follow this run's; a profile of another workload is refused before anything is measured."""
    there, file = run(), run.path.with_name("there.json")
    run.path.rename(file)
    whole = run(others=(file,))
    assert [worker.name for worker in whole.workers] == ["worker:0/cpu", "worker:1/cpu"]
    assert whole.measurements[2:] == tuple(replace(each, worker="worker:1/cpu") for each in there.measurements)
    run.path.unlink()
    made = run.path.with_name("made.json")
    save_profile(make_profile(work=[1e-3], slowness=[1.0]), made, force=False)
    with pytest.raises(FormatError, match=r"made\.json was measured of another workload than this run"):
        run(others=(made,))
    save_profile(
        replace(there, partitions=(replace(there.partitions[0], kind="k"), *there.partitions[1:])), made, force=True
    )
    with pytest.raises(FormatError, match=r"made\.json has other partitions than this run: they differ in '0'"):
        run(others=(made,))
    assert not run.path.exists()


@pytest.mark.long
def test_an_existing_file_is_refused_before_anything_is_measured(run: Run) -> None:
    """On all ranks, with what to do about it: rank 0 looks."""
    run()
    before, measured = run.path.read_bytes(), list[str]()
    with pytest.raises(RefusedError, match="exists") as caught:
        run(progress=lambda standing: measured.append(standing.what))
    assert (caught.value.exit_code, caught.value.hint) == (UsageError.exit_code, "--force replaces it")
    assert not any("compute" in what for what in measured)
    assert run.path.read_bytes() == before


@pytest.mark.long
def test_notes_of_points_run_for_company_are_not_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are another worker's; a note of no point, or of an own one, is."""
    kept = RankSession._keep

    def keep(self: RankSession, found: object) -> None:
        kept(self, found)  # type: ignore[arg-type]
        for point in (Point("0", 2), Point("0", 4), None):
            kept(self, Note(f"of {point}", point))

    monkeypatch.setattr(RankSession, "_keep", keep)
    assert [text for text in run().warnings if text.startswith("of ")] == [f"of {Point('0', 2)}", "of None"]


@pytest.mark.long
def test_a_run_does_not_read_what_an_earlier_one_left_in_the_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one process: the connections of each have a prefix of their own."""
    names: list[str] = []

    def prefixed(name: str, store: Store) -> PrefixStore:
        names.append(name)
        return PrefixStore(name, store)

    monkeypatch.setattr(session, "PrefixStore", prefixed)
    for _ in range(2):
        run()
        run.path.unlink()
    assert len(set(names[:3])) == len(set(names[3:])) == 1
    assert names[0] != names[3]


@pytest.mark.long
def test_every_rank_does_what_rank_0_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that differ between hosts do not part the ranks: what is measured comes with rank 0's start."""
    run()
    started: list[Start] = []
    agreed = RankSession.agree

    def agree(self: RankSession, start: Start, output: ProfileDestination | None) -> None:
        started.append(start)
        monkeypatch.setattr(self, "options", ProfileOptions(force_busy=True))  # as on a host with other flags
        agreed(self, start, output)
        assert self.selection.words == ("1",)
        assert self._link_options().pairs == "sampled"

    monkeypatch.setattr(RankSession, "agree", agree)
    run(only=("1",), options=replace(OPTIONS, isolated=True, links="sampled"))
    assert [(start.only, start.isolated, start.links) for start in started] == [(("1",), True, "sampled")]


@pytest.mark.long
def test_the_optimizers_builder_sees_the_whole_model(tmp_path, monkeypatch):
    """Every time, with all parameters in the model's order, though a partition's own share of it is measured."""
    made = replace(make_workload(), optimizer=by_name)
    SEEN.clear()
    be_only_rank(monkeypatch)
    measure_briefly(monkeypatch.setattr)
    found = profile_workload(made, "made.py:workload", OPTIONS)
    assert found is not None
    assert found.workload.optimizer == "Adam"
    assert {tuple(each) for each in SEEN} == {tuple((n, p.shape) for n, p in made.model().named_parameters())}
    assert [each.optimizer_bytes for each in found.partitions] == [2 * 4 * 72 + 2 * 4, 2 * 4 * 64 + 4]


@pytest.mark.long
def test_an_optimizer_that_needs_a_closure_is_measured(tmp_path, monkeypatch):
    """LBFGS with its history full: so many directions and steps, each as large as the partition's parameters."""
    made = replace(make_workload(), optimizer=lambda parameters: torch.optim.LBFGS(parameters, history_size=7))
    be_only_rank(monkeypatch)
    measure_briefly(monkeypatch.setattr)
    found = profile_workload(made, "made.py:workload", OPTIONS)
    assert found is not None
    assert found.workload.optimizer == "LBFGS"
    for each in found.partitions:
        assert each.optimizer_bytes >= 2 * 7 * each.parameter_bytes
