"""Files for the command line's tests, and one way to call it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from assigner_cli import console
from assigner_cli.app import app
from builders import make_plan, make_profile
from typer.testing import CliRunner

from assigner.formats.plan import Plan, save_plan
from assigner.formats.profile import Profile, save_profile
from assigner.formats.solverreport import Baseline, SolverReport
from assigner.formats.stage import Stage
from assigner.schedule.simulate import priced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typer.testing import Result

NAMES = [f"p{i}" for i in range(6)]


@pytest.fixture(autouse=True)
def global_flags() -> Iterator[None]:
    """Commands called in this process have no other's -q and -v, and leave theirs to nobody."""
    console.configure(console.Settings())
    yield
    console.configure(console.Settings())


@pytest.fixture
def profile() -> Profile:
    """Six partitions on a fast worker and one that takes three times as long."""
    return make_profile(work=[2e-3] * 6, slowness=[1.0, 3.0], batch=8)


@pytest.fixture
def equal(profile: Profile) -> Plan:
    """Three partitions on each worker."""
    return priced(make_plan(profile, [(0, NAMES[:3]), (1, NAMES[3:])]), profile)


@pytest.fixture
def solved(profile: Profile, equal: Plan) -> Plan:
    """Five partitions on the fast worker, the last of them rematerialised."""
    stages = (Stage("worker:0/cpu", tuple(NAMES[:5]), ("p4",)), Stage("worker:1/cpu", ("p5",)))
    plan = priced(replace(make_plan(profile, [(0, NAMES)]), stages=stages), profile)
    assert plan.predicted is not None
    assert equal.predicted is not None
    step = plan.predicted.step_s
    return replace(
        plan,
        solver=SolverReport("HiGHS", "1.0", "optimal", step, step * 0.982, 0.018, 0.5),
        baselines=(Baseline("equal split", equal.predicted.step_s), Baseline("best single worker", None)),
    )


@pytest.fixture
def folder(tmp_path: Path, profile: Profile, equal: Plan, solved: Plan, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with profile.json, equal.json and solved.json in it."""
    save_profile(profile, tmp_path / "profile.json")
    save_plan(equal, tmp_path / "equal.json")
    save_plan(solved, tmp_path / "solved.json")
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "ASSIGNER_GAP", "ASSIGNER_SOLVER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def assigner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Calls the command line in `folder`: `assigner("show", "plan.json", columns=80)`."""

    def call(*args: str, columns: int | None = None) -> Result:
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        return CliRunner().invoke(app, list(args), prog_name="assigner")

    return call


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`assigner profile` looks at the workload here: to start a process for that takes longer than all the rest."""
    monkeypatch.setattr("assigner_cli.profile._apart", lambda body, *args, **kwargs: body(*args, **kwargs))
