"""Wrong uses of every command: the exit code, what is said, and that nothing else happens."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
from assigner_cli.app import app
from builders import make_plan, make_profile
from made_runs import run_in
from typer.main import get_command

from assigner.formats.plan import save_plan
from assigner.formats.profile import save_profile
from assigner.formats.trace import save_trace

WORKLOADS = """
import sys
import torch
from assigner import Workload

def raises(): raise KeyError("lost")
def exits(): sys.exit(0)
def prints(): print("noise on stdout"); return None
def none(): return None
def takes(width): return None
VALUE = 3
"""


@pytest.fixture
def bench(folder, profile, solved):
    """The folder with everything in it that can be used wrongly."""
    text = (folder / "profile.json").read_text()
    document, plan = json.loads(text), json.loads((folder / "solved.json").read_text())
    save_trace(run_in(profile, solved), folder / "trace.json")
    other = make_profile(work=[2e-3] * 3, slowness=[1.0, 2.0, 4.0], batch=8)
    save_profile(other, folder / "other.json")
    save_plan(make_plan(other, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"])]), folder / "other-plan.json")
    save_plan(replace(solved, profile=None), folder / "orphan.json")
    cycle, strange = json.loads(text), json.loads((folder / "solved.json").read_text())
    cycle["edges"].append({**cycle["edges"][0], "source": "p3", "target": "p0", "output": 9})
    strange["stages"][0]["partitions"][0] = "nobody"
    write = {
        "cycle.json": json.dumps(cycle),
        "strange.json": json.dumps(strange),
        "nan.json": text.replace('"forward_s": 0.008', '"forward_s": NaN', 1),
        "empty.json": "",
        "timeline.json": '{"traceEvents": []}',
        "timeline.json.gz": b"\x1f\x8b\x08\x00",
        "list.json": "[1, 2]",
        "number.json": "3",
        "nothing.json": "{}",
        "cut.json": text[: len(text) // 2],
        "deep.json": "[" * 200_000,
        "deep-object.json": '{"kind": ' * 100_000,
        "bytes.json": b"\xff\xfe\x00",
        "infinite.json": text.replace('"forward_s": ', '"forward_s": -Infinity, "was": ', 1),
        "future.json": json.dumps({**plan, "format_version": "99.0"}),
        "twice.json": json.dumps({**document, "workers": [document["workers"][0]] * 2}),
        "weather.json": json.dumps({"kind": "weather", "format_version": "1.0"}),
        "negative.json": re.sub(r'"memory_bytes": [^,}\s]+', '"memory_bytes": -1', text, count=1),
        "broken.toml": "[solve\n",
        "bare.toml": "gap = 0.1\n",
        "typo.toml": "[slove]\ngap = 0.1\n",
        "key.toml": "[solve]\ngapp = 0.1\n",
        "kind.toml": "[solve]\ngap = true\n",
        "switch.toml": '[solve]\nrobust = "very"\n',
        "value.toml": "[solve]\ngap = 7\n",
        "threads.toml": "[profile]\nthreads = 0\n",
        "cluster.toml": '[[host]]\nname = "a"\ncpu = 0.5\n',
        "hosts.toml": '[[host]]\nname = "a"\ncpu = -1\n',
        "w.py": WORKLOADS,
        "bad.py": "def f(:\n",
        "notes.txt": "no script",
        "odd.json": '{"kind": "plan", "format_version": 7}',
        "half-orders.json": '{"worker:0/cpu": "0F0 0B0"}',
        "wide-orders.json": '{"worker:0/cpu": "0F0 0B0", "worker:7/cpu": "1F0 1B0"}',
        "wait-orders.json": '{"worker:0/cpu": "0B0 0F0", "worker:1/cpu": "1F0 1B0"}',
        "cut-orders.json": '{"worker:0/cpu" ',
        "twice-orders.json": '{"worker:0/cpu": "0F0", "worker:0/cpu": "0F0 0B0"}',
        "long-orders.json": '{"worker:0/cpu": 1' + 5_000 * "0" + "}",
        "deep-orders.json": '{"worker:0/cpu": ' + 200_000 * "[",
        "row.csv": "0F0,0B0\n",
        "letter.csv": "0F0,0X0\n1F0,1B0\n",
    }
    for name, content in write.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "dir").mkdir()
    return folder


S = "solve profile.json -o x.json"
CASES = [
    # of the program
    (2, "shwo profile.json", "did you mean show?"),
    (2, "frobnicate", "frobnicate"),
    (2, "--frobnicate", "no such flag: --frobnicate"),
    (2, "-q", "missing command"),
    (2, "--show-completion tcsh", "tcsh"),
    # files that are not what they should be
    (2, "show dir", "dir"),
    (5, "show empty.json", "empty.json"),
    (5, "show timeline.json", "timeline.json: a timeline for ui.perfetto.dev"),
    (5, "show timeline.json.gz", "timeline.json.gz: compressed by gzip"),
    (5, "simulate solved.json --profile profile.json --against timeline.json", "a timeline for ui.perfetto.dev"),
    (5, "show list.json", "list.json"),
    (5, "show number.json", "number.json"),
    (5, "show nothing.json", "nothing.json"),
    (5, "show deep.json", "deep.json"),
    (5, "show deep-object.json", "deep-object.json"),
    (5, "show bytes.json", "bytes.json"),
    (5, "show infinite.json", "infinite.json"),
    (5, "show future.json", "99.0"),
    (5, "show twice.json", "worker:0/cpu"),
    (5, "show weather.json", "weather.json: kind"),
    (5, "show negative.json", "-1"),
    (5, "show odd.json", "format_version"),
    (2, "show 'a\x00b'", "a"),
    (2, "show profile.json --jsn", "did you mean --json?"),
    (2, f"show {'x' * 300}.json", "name too long"),
    (2, "show", "FILE"),
    (2, "show nowhere.json", "nowhere.json"),
    (5, "show cut.json", "cut.json: not JSON"),
    (5, "show nan.json", "measurements[1].forward_s: NaN"),
    (5, "show cycle.json", "cycle: p0 -> p1 -> p2 -> p3 -> p0"),
    (2, "show profile.json --json=yes", "--json"),
    (2, "show profile.json extra", "extra"),
    # compare
    (2, "compare solved.json", "solved.json"),
    (5, "compare equal.json strange.json", "'nobody'"),
    (5, "compare solved.json trace.json", "trace.json"),
    (2, "compare solved.json equal.json --json --md", "--md"),
    (5, "compare solved.json equal.json --measured solved.json", "solved.json"),
    (2, "compare solved.json equal.json --precision many", "'many'"),
    # check
    (2, "bench", "PLAN"),
    (2, "bench nowhere.json", "nowhere.json"),
    (5, "bench profile.json", "profile.json"),
    (2, "check w.py", "FILE.py:FUNCTION"),
    (2, "check nowhere.py:f", "nowhere.py"),
    (2, "check w.py:nobody", "'nobody'"),
    (2, "check w.py:raises", "KeyError: 'lost'"),
    (2, "check w.py:none", "NoneType"),
    # simulate
    (5, "simulate trace.json", "trace.json"),
    (5, "simulate solved.json --profile other.json", "'p3'"),
    (2, "simulate orphan.json", "--profile"),
    (5, "simulate solved.json --profile solved.json", "expected 'profile'"),
    (5, "simulate solved.json --profile profile.json --against solved.json", "solved.json"),
    (2, "simulate solved.json --profile profile.json --calibrate x.json", "--against"),
    (2, "simulate solved.json --profile profile.json --trace no/where.json", "no"),
    (2, "simulate solved.json --profile profile.json --trace solved.json", "solved.json"),
    # schedule
    (2, "schedule", "PLAN"),
    (2, "schedule nowhere.json", "nowhere.json"),
    (5, "schedule profile.json", "expected 'plan'"),
    (2, "schedule orphan.json", "--profile"),
    (5, "schedule solved.json --profile solved.json", "expected 'profile'"),
    (2, "schedule solved.json --profile profile.json --orders row.csv --list", "--orders and --list"),
    (2, "schedule solved.json --profile profile.json -o x.json", "--output needs an order"),
    (2, "schedule solved.json --profile profile.json --orders nowhere.csv -o x.json", "nowhere.csv"),
    (5, "schedule solved.json --profile profile.json --orders solved.json -o x.json", "solved.json"),
    (5, "schedule solved.json --profile profile.json --orders cut-orders.json", "cut-orders.json: not JSON"),
    (5, "schedule solved.json --profile profile.json --orders half-orders.json", "worker:1/cpu"),
    (5, "schedule solved.json --profile profile.json --orders twice-orders.json", "stands twice"),
    (5, "schedule solved.json --profile profile.json --orders long-orders.json", "cannot be read"),
    (5, "schedule solved.json --profile profile.json --orders deep-orders.json", "nested too deeply"),
    (5, "schedule solved.json --profile profile.json --orders wide-orders.json", "worker:7/cpu"),
    (5, "schedule solved.json --profile profile.json --orders wait-orders.json", "wait-orders.json"),
    (5, "schedule solved.json --profile profile.json --orders row.csv", "row.csv: 1 row, and 2 workers"),
    (5, "schedule solved.json --profile profile.json --orders letter.csv", '"0X0"'),
    (2, "schedule solved.json --profile profile.json --list -o solved.json --force", "solved.json"),
    (2, "schedule solved.json --profile profile.json --list -o equal.json", "equal.json exists"),
    # solve
    (5, "solve solved.json -o x.json", "expected 'profile'"),
    (2, "solve profile.json -o equal.json", "equal.json exists"),
    (2, f"{S} --remat sometimes", "'sometimes'"),
    (2, f"{S} --schedule 1f2b", "'1f2b'"),
    (2, f"{S} --solver gurobi", "'gurobi'"),
    (2, f"{S} --seed -1", "seed"),
    (2, f"{S} --gap wide", "'wide'"),
    (2, f"{S} --gap 2", "gap"),
    (2, f"{S} --gap -0.5", "-0.5"),
    (2, f"{S} --gap nan", "nan"),
    (2, f"{S} --time-limit 0", "--time-limit: 0"),
    (2, f"{S} --time-limit -inf", "inf"),
    (2, f"{S} --time-limit inf", "inf is not allowed; expected a finite number of seconds"),
    (2, f"{S} --memory worker:0=2", "--memory: '2' is 2 bytes"),
    (2, f"{S} --reserve worker:0=1000000", "--reserve: '1000000' is 1,000,000 bytes"),
    (2, f"{S} --micro-batches 0", "'0'"),
    (2, f"{S} --micro-batches some", "'some'"),
    (2, f"{S} --micro-batches 99999999999999999999", "expected auto or a whole number, 1 to 65536"),
    (2, f"{S} --micro-batches 5", "5 is not allowed: training cuts a batch of 8 into 4"),
    (2, f"{S} --batch-size 0", "--batch-size: 0"),
    (2, f"{S} --max-workers 0", "--max-workers: 0"),
    (2, f"{S} --pin p0", "'p0'"),
    (2, f"{S} --pin nobody=worker:0", "'nobody'"),
    (2, f"{S} --pin p0=worker:0 --pin p0=worker:1", "worker:1"),
    (2, f"{S} --pin p0=worker:7", "worker:7"),
    (2, f"{S} --pin p0=worker:0 --apart p0,nobody", "nobody"),
    (2, f"{S} --order ,", "--order: ',' names nothing"),
    (2, f"{S} --together ,", "--together: '' names 0 partitions"),
    (2, f"{S} --apart p0,p0", "--apart: 'p0,p0' names 1 partition"),
    (2, f"{S} --never-remat nobody", "--never-remat: 'nobody'"),
    (2, f"{S} --always-remat nobody", "--always-remat: 'nobody'"),
    (2, f"{S} --objective cost --max-step 0", "--max-step: 0"),
    (2, f"{S} --max-step 1", "--max-step goes with"),
    (2, f"{S} --only nobody", "nobody"),
    (2, f"{S} --only worker:0,worker:1", "--only worker:0 --only worker:1"),
    (2, f"{S} --order worker:9", "worker:9"),
    (2, f"{S} --baseline magic", "'magic'"),
    (2, f"{S} --objective speed", "'speed'"),
    (5, f"{S} --complete profile.json", "profile.json"),
    (2, "solve profile.json -o profile.json", "profile.json"),
    (2, "solve profile.json -o profile.json --force", "profile.json"),
    (2, "solve profile.json -o no/such/folder.json", "no/such"),
    (2, "solve profile.json -o dir", "dir"),
    (2, "solve profile.json", "-o plan.json"),
    (3, f"{S} --only worker:0 --reserve worker:0=100TiB", "worker:0"),
    # settings
    (2, f"{S} --config nowhere.toml", "nowhere.toml"),
    (5, f"{S} --config broken.toml", "broken.toml"),
    (5, f"{S} --config bare.toml", "[solve]"),
    (5, f"{S} --config typo.toml", "did you mean solve?"),
    (5, f"{S} --config key.toml", "did you mean gap?"),
    (5, f"{S} --config kind.toml", "kind.toml: solve.gap: true"),
    (5, f"{S} --config switch.toml", "switch.toml: solve.robust"),
    (2, f"{S} --config value.toml", "value.toml: solve.gap: 7"),
    (2, "profile w.py:f -o x.json --config threads.toml", "threads.toml: profile.threads"),
    # profile
    (2, "profile w.py -o x.json", "FILE.py:FUNCTION"),
    (2, "profile nowhere.py:f -o x.json", "nowhere.py"),
    (2, "profile w.py:nobody -o x.json", "'nobody'"),
    (2, "profile w.py:VALUE -o x.json", "VALUE"),
    (2, "profile w.py:raises -o x.json", "KeyError: 'lost'"),
    (2, "profile w.py:exits -o x.json", "SystemExit"),
    (2, "profile w.py:prints -o x.json", "NoneType"),
    (2, "profile w.py:none -o x.json", "NoneType"),
    (2, "profile w.py:takes -o x.json", "width"),
    (2, "profile 'w.py:none(width=' -o x.json", "width="),
    (2, "profile bad.py:f -o x.json", "bad.py:1 (def f(:)"),
    (2, "profile w.py:none", "--output"),
    (2, "profile w.py:none -o x.json --workers 0", "--workers"),
    (2, "profile w.py:none -o x.json --threads many", "'many'"),
    (2, "profile w.py:none -o x.json --micro-batches 1,two", "1,two"),
    (2, "profile w.py:none -o solved.json", "solved.json"),
    (5, "profile --merge profile.json --merge solved.json -o x.json", "solved.json"),
    # init
    (2, "init nowhere.py:Net -o x.py", "nowhere.py"),
    (2, "init w.py:Net -o x.py", "Net"),
    (2, "init no.such.module:Net -o x.py", "no.such.module"),
    (2, "init w.py:none -o w.py", "w.py"),
    (2, "init bad.py:f -o x.py", "bad.py"),
    # run
    (2, "run solved.json", "SCRIPT"),
    (2, "run solved.json -- nowhere.py", "nowhere.py"),
    (2, "run solved.json -- nowhere-at-all", "nowhere-at-all"),
    (2, "run solved.json -- notes.txt", "notes.txt"),
    (2, "run solved.json --ranks 1 -- w.py", "needs 2 ranks"),
    (2, "run solved.json --nnodes 2 -- w.py", "--master-addr"),
    (2, "run solved.json --nnodes 2 --node-rank 2 --master-addr localhost -- w.py", "--node-rank"),
    (2, "run other-plan.json --nnodes 2 --master-addr localhost -- w.py", "3 ranks"),
    (2, "run solved.json --master-port 70000 -- w.py", "70000"),
    (5, "run profile.json -- w.py", "profile.json"),
    # lab
    (2, "lab", "no cluster file"),
    (2, "lab cluster.toml", "command"),
    (5, "lab hosts.toml -- true", "host[0].cpu"),
    (2, "lab cluster.toml --timeout 0 -- true", "--timeout"),
    (5, "lab --from solved.json", "solved.json"),
    # report, export, schema, doctor
    (2, "report", "PLAN"),
    (5, "report trace.json -o x.html", "trace.json"),
    (2, "report solved.json -o dir", "dir"),
    (2, "export solved.json", "--to"),
    (2, "export solved.json --to jpeg", "'jpeg'"),
    (2, "export orphan.json --to dot", "--profile"),
    (2, "export solved.json --profile profile.json --to pipelining-modules --workload nowhere.py:f", "nowhere.py"),
    (2, "export solved.json --profile profile.json --to dot -o solved.json", "solved.json"),
    (5, "export profile.json --to dot", "profile.json"),
    (2, "schema weather", "'weather'"),
    (2, "doctor now", "now"),
]


APART = "profile w.py:raises -o x.json"
"""The one that a process of its own finds, as all of `profile`'s: traceback, error and hint come from there."""


@pytest.mark.parametrize(("code", "line", "words"), CASES, ids=[line[:60].replace("\0", "0") for _, line, _ in CASES])
def test_wrong_use(request, assigner, bench, code, line, words):
    """One to three lines on stderr: what is wrong, then the next step; no file changes."""
    if line != APART:
        request.getfixturevalue("in_this_process")
    before = {path.name: path.read_bytes() for path in bench.iterdir() if path.is_file()}
    result = assigner(*shlex.split(line))
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    lines = [text for text in result.stderr.splitlines() if text != "noise on stdout"]
    if lines[0].startswith("Traceback"):  # of the user's own code
        assert ":raises" in line or ":exits" in line
        lines = lines[next(n for n, text in enumerate(lines) if text.startswith("error: ")) :]
    if code != 3:  # the ways out of what is infeasible are a table below
        assert len(lines) <= 3, result.stderr
    assert lines[0].startswith("error: ")
    assert any(text.startswith("hint: ") for text in lines[1:3]), result.stderr
    assert words.lower() in result.stderr.lower()
    assert not any("Traceback" in text for text in lines)
    assert {path.name: path.read_bytes() for path in bench.iterdir() if path.is_file()} == before


def test_every_command_is_used_wrongly():
    """The table has a line for each command."""
    named = {line.split()[0] for _, line, _ in CASES}
    assert set(get_command(app).commands) <= named


@pytest.mark.parametrize("name", sorted(get_command(app).commands))
def test_a_flag_with_a_slip_is_named_with_its_neighbour(assigner, name):
    """--hlep of any command: the flag that was meant is in the hint."""
    result = assigner(name, "--hlep")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "error: no such flag: --hlep"
    assert result.stderr.splitlines()[1].startswith("hint: did you mean --help?")
