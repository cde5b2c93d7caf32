"""What Python and a notebook show of results, and which names they find."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from builders import make_plan, make_profile
from rich.console import Console

import assigner
from assigner.report.plan import plan_report
from assigner.report.profile import profile_report
from assigner.report.sheet import draw
from assigner.schedule.simulate import priced
from assigner.solver import Solution

PROFILE = make_profile(work=[1e-3] * 4, slowness=[1, 2])
PLAN = priced(make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2", "p3"])]), PROFILE)
REPORTS = {"plan": plan_report(PLAN), "solution": plan_report(PLAN), "profile": profile_report(PROFILE)}
RESULTS = {"plan": PLAN, "solution": Solution(PLAN), "profile": PROFILE}


def printed(what, width):
    stream = io.StringIO()
    Console(file=stream, width=width, height=25, markup=False, highlight=False).print(what)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_what_show_prints(name, monkeypatch):
    """As wide as the terminal, and with rich as wide as its console."""
    for width in (80, 150):
        monkeypatch.setenv("COLUMNS", str(width))
        whole = printed(draw(REPORTS[name], width=width), width)
        assert str(RESULTS[name]).splitlines() == whole
        assert printed(RESULTS[name], width) == whole


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_tables_in_a_notebook(name):
    """HTML with every table, in which no name of a file is markup."""
    html = RESULTS[name]._repr_html_()
    assert html.count("<table") >= 2
    assert "worker:1/cpu" in html
    strange = replace(PLAN, workload=replace(PLAN.workload, name="<script>"))
    assert "<script>" not in strange._repr_html_()


def test_a_solved_profile_prints_its_plan():
    """What `solve` gives needs no unpacking to be looked at."""
    text = str(assigner.solve(PROFILE))
    assert text.startswith("plan for ")
    assert "limits the plan" in text
    assert "status: " in text


def test_the_names_of_the_package_are_listed():
    """`dir(assigner)` has each public name, though most are loaded when they are first used."""
    assert set(assigner.__all__) <= set(dir(assigner))
    assert not {"os", "importlib", "TYPE_CHECKING", "Any"} & set(dir(assigner))
    for name in assigner.__all__:
        assert getattr(assigner, name) is not None


def test_the_package_runs_as_a_module():
    """`python -m assigner` is the command line, with its exit codes."""
    done = subprocess.run([sys.executable, "-m", "assigner", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"assigner {assigner.__version__}\n"
    wrong = subprocess.run(
        [sys.executable, "-m", "assigner", "show", "no"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
