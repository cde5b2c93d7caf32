"""What every command shows, kept as text files: on 80 columns, wider where that shows more, and on a pipe.

    ASSIGNER_SCREENS=update .venv/bin/pytest -q tests/cli/test_cli_screens.py      writes the files anew

Colours are taken out of the files: a screen must say the same without them, and a test holds that.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from assigner_cli.app import app
from assigner_cli.findings import Finding
from builders import make_profile
from made_runs import run_in, slower_worker
from typer.main import get_command

from assigner.formats.plan import ProfileReference, save_plan
from assigner.formats.profile import save_profile
from assigner.formats.trace import save_trace

SCREENS = Path(__file__).parent / "screens"
UPDATE = os.environ.get("ASSIGNER_SCREENS") == "update"
PIPED = 0

LINES = {
    "show-profile": "show profile.json",
    "show-profile-verbose": "show profile.json -v",
    "show-plan": "show solved.json",
    "show-plan-verbose": "show solved.json -v",
    "compare": "compare equal.json solved.json",
    "compare-all": "compare equal.json solved.json again.json --all",
    "compare-measured": "compare equal.json solved.json --measured trace.json",
    "simulate": "simulate solved.json --profile profile.json",
    "simulate-memory": "simulate solved.json --profile profile.json --memory",
    "simulate-against": "simulate solved.json --profile profile.json --against trace.json",
    "schedule": "schedule solved.json --list",
    "solve": "solve profile.json -o new.json --micro-batches 4 --schedule gpipe",
    "solve-baseline": "solve profile.json -o new.json --baseline equal",
    "profile-merge": "profile --merge profile.json --merge other.json -o new.json",
    "export-schedule": "export solved.json --to pipelining-schedule",
    "report": "report equal.json solved.json -o new.json",
    "doctor": "doctor",
    "lab-check": "lab --check",
    "infeasible": "solve profile.json -o new.json --only worker:0 --reserve worker:0=16374MiB",
    "wrong-flag": "solve profile.json --gpa 3",
    "wrong-file": "show nowhere.json",
    "check": "check model.py:workload",
    "check-refused": "check 'model.py:workload(mixed=True)'",
    "help": "--help",
    **{f"help-{name}": f"{name} --help" for name in get_command(app).commands},
}
WIDER = {
    "compare": (80, 120, PIPED),  # a column more at 120 than at 80, all of them on a pipe
    "simulate": (80, 200, PIPED),  # bars as long as the terminal allows, and of 120 columns on a pipe
    "show-plan": (80, 120, PIPED),
    "help-": (80,),
    "help-solve": (80, 120, PIPED),
}
"""Widths of the screens that begin so, the longest beginning counting; others are the same on all wide terminals."""
MESSAGES = ("wrong", "infeasible", "profile", "export", "report", "check-refused")
MASKS = (
    (r"HiGHS \d+\.\d+\.\d+", "HiGHS #.#.#"),
    (r"\b\d+(\.\d+)? (ms|s)\b(?=\)| of search)", "# s"),  # how long the search took on this machine
    (r"\b[\d.,]+ KiB(?=, open)", "# KiB"),  # the page holds a library
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "####-##-##T##:##:##Z"),
)


@pytest.fixture
def bench(folder, profile, solved, equal, monkeypatch):
    """The folder with a trace and a third plan, on a machine whose findings are always the same."""
    reference = ProfileReference("profile.json", _sha(folder / "profile.json"))
    for name, plan in (("solved", solved), ("equal", equal), ("again", replace(solved, stages=equal.stages))):
        save_plan(replace(plan, profile=reference, created_at="2026-01-01T00:00:00Z"), folder / f"{name}.json",
                  force=True)  # fmt: skip
    plan = replace(solved, profile=reference, created_at="2026-01-01T00:00:00Z")
    save_trace(run_in(slower_worker(profile, 1, forward=1.2, backward=1.2), plan), folder / "trace.json")
    save_profile(make_profile(work=[2e-3] * 6, slowness=[2.0], batch=8), folder / "other.json")
    (folder / "model.py").write_text(MODEL)
    monkeypatch.setattr("assigner_cli.findings.examine", lambda: FINDINGS)
    monkeypatch.setattr("assigner.lab.lacks", lambda *_: ())
    for name in ("TERM", "FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return folder


MODEL = """
import torch
from torch import nn

import assigner


class Joint(torch.optim.SGD):
    def step(self):
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1e-3)
        super().step()


def workload(mixed=False):
    return assigner.Workload(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        batch=lambda rows, generator: (torch.randn(rows, 4, generator=generator), torch.zeros(rows, 2)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: (Joint if mixed else torch.optim.SGD)(parameters, lr=0.1),
        batch_size=8,
    )
"""
FINDINGS = [
    Finding("python", "ok", "3.11.2 (Linux x86_64)", value="3.11.2"),
    Finding("torch", "ok", "2.15.0", value="2.15.0"),
    Finding("HiGHS", "missing", "not installed; solve --solver highs needs it", "pip install highspy"),
    Finding("processor", "ok", "16 cores, limited to 2.0 by a control group", value={"cores": 16, "limit": 2.0}),
    Finding("lab", "note", "assigner lab lacks the queue netem for latency", "modprobe sch_netem", ["latency"]),
]


def _sha(path):
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def masked(text):
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def screen(assigner, line, monkeypatch, columns=None, **variables):
    """Stdout, then stderr, of a call, on a terminal if `columns` are given."""
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        if columns is not None:
            patch.setenv("FORCE_COLOR", "1")
            patch.setenv("COLUMNS", str(columns))
        Path("new.json").unlink(missing_ok=True)
        result = assigner(*shlex.split(line))
    return result.stdout + result.stderr


def check(name, found):
    """Compare with the file, or write it."""
    path = SCREENS / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in masked(plain(found)).splitlines()) + "\n"
    if UPDATE:
        SCREENS.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path.name} is missing: ASSIGNER_SCREENS=update writes it"
    assert text == path.read_text(encoding="utf-8")


def widths(name):
    begins = [begin for begin in WIDER if name.startswith(begin)]
    return WIDER[max(begins, key=len)] if begins else (80, PIPED)


@pytest.mark.parametrize("name", LINES)
def test_screen(assigner, bench, monkeypatch, name):
    """As kept, and never wider than the terminal; on a pipe without escape codes."""
    for columns in widths(name):
        if columns == PIPED:
            found = screen(assigner, LINES[name], monkeypatch)
            assert "\x1b" not in found
            check(f"{name}.piped", found)
            continue
        found = screen(assigner, LINES[name], monkeypatch, columns, TERM="xterm-256color")
        check(f"{name}.{columns}", found)
        if not name.startswith(MESSAGES):  # the terminal wraps those, so that they can be copied
            assert max(map(len, plain(found).splitlines())) <= columns


def test_every_kept_screen_is_compared():
    """No file is left of a screen that nothing shows any more."""
    wanted = {f"{name}.{columns or 'piped'}.txt" for name in LINES for columns in widths(name)}
    assert {path.name for path in SCREENS.iterdir()} == wanted


@pytest.mark.parametrize("name", ["show-profile", "show-plan", "compare", "simulate", "solve", "doctor", "help"])
def test_without_colours_a_screen_says_the_same(assigner, bench, monkeypatch, name):
    """NO_COLOR leaves bold and dim alone, a dumb terminal nothing; the words are those of the coloured screen."""
    coloured = screen(assigner, LINES[name], monkeypatch, 100, TERM="xterm-256color")
    grey = screen(assigner, LINES[name], monkeypatch, 100, TERM="xterm-256color", NO_COLOR="1")
    dumb = screen(assigner, LINES[name], monkeypatch, 100, TERM="dumb")
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|4[0-7]|9[0-7]|38|48)\b", grey)
    assert "\x1b" not in dumb
    assert masked(plain(coloured)) == masked(plain(grey)) == masked(dumb)


@pytest.mark.parametrize("name", ["show-plan", "compare"])
def test_a_real_terminal_shows_the_kept_screen(bench, name):
    """Through a pseudo-terminal of 120 columns, without COLUMNS: its own width counts."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "assigner_cli", *shlex.split(LINES[name])]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}):
        os.close(theirs)
        received = b""
        while chunk := _read(ours):
            received += chunk
    os.close(ours)
    assert b"\x1b[" in received
    if not UPDATE:
        check(f"{name}.120", received.decode().replace("\r\n", "\n"))


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""
