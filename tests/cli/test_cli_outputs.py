"""What a command writes: never over what it reads, under whichever name, and whole or not at all."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
from made_runs import run_in

from assigner.formats.plan import ProfileReference, file_hash, load_plan, save_plan
from assigner.formats.profile import load_profile
from assigner.formats.trace import save_trace
from assigner.lab import Lack, Machine

CASES = [
    ("solve profile.json -o {}", "profile.json"),
    ("solve profile.json --complete equal.json -o {}", "equal.json"),
    ("solve profile.json --config settings.toml -o {}", "settings.toml"),
    ("simulate equal.json --profile profile.json --trace {}", "equal.json"),
    ("simulate equal.json --profile profile.json --trace {}", "profile.json"),
    ("simulate equal.json --profile profile.json --against trace.json --trace {}", "trace.json"),
    ("simulate equal.json --profile profile.json --against trace.json --calibrate {}", "trace.json"),
    ("report equal.json --profile profile.json -o {}", "equal.json"),
    ("report equal.json solved.json --profile profile.json -o {}", "solved.json"),
    ("report equal.json --profile profile.json -o {}", "profile.json"),
    ("report own.json -o {}", "profile.json"),
    ("report equal.json --profile profile.json --measured trace.json -o {}", "trace.json"),
    ("export equal.json --profile profile.json --to dot -o {}", "equal.json"),
    ("export equal.json --to device-map --profile profile.json -o {}", "profile.json"),
    ("export own.json --to torchgpipe -o {}", "profile.json"),
    ("export equal.json --profile profile.json --to device-map --workload model.py:workload -o {}", "model.py"),
    ("profile model.py:workload -o {}", "model.py"),
    ("profile model.py:workload --config settings.toml -o {}", "settings.toml"),
    ("profile --merge profile.json --merge other.json -o {}", "other.json"),
    ("lab --from profile.json -o {}", "profile.json"),
    ("lab --from profile.json --here other.json -o {}", "other.json"),
    ("init model.py:Model -o {}", "model.py"),
]


@pytest.fixture
def files(folder, equal):
    """Everything that the commands above read; own.json says which profile it is of."""
    origin = ProfileReference("profile.json", file_hash(folder / "profile.json"))
    save_plan(replace(equal, profile=origin), folder / "own.json")
    save_trace(run_in(load_profile(folder / "profile.json"), load_plan(folder / "equal.json")), folder / "trace.json")
    (folder / "other.json").write_bytes((folder / "profile.json").read_bytes())
    (folder / "settings.toml").write_text("[solve]\nseed = 1\n")
    (folder / "model.py").write_text("from torch import nn\n\nclass Model(nn.Linear):\n    pass\n")
    return folder


BY_LINK = ("solve profile.json -o {}", "profile model.py:workload -o {}", "init model.py:Model -o {}")
WAYS = [
    (line, name, link)
    for line, name in CASES
    for link in (("", "hard", "soft") if line in BY_LINK else ("",))
]  # fmt: skip


@pytest.mark.parametrize(("line", "name", "link"), WAYS, ids=[" ".join(each) for each in WAYS])
def test_no_command_writes_over_what_it_reads(assigner, files, in_this_process, line, name, link):
    """Not with --force, and not by a link's name: every file is as it was, and the message names it."""
    out = name
    if link:
        out = f"link{name[name.index('.') :]}"
        (files / out).hardlink_to(files / name) if link == "hard" else (files / out).symlink_to(files / name)
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    result = assigner(*line.format(out).split(), "--force")
    assert result.exit_code == 2, result.output
    assert out in result.stderr
    assert "is a file that this command reads" in result.stderr or "which the workload file imports" in result.stderr
    assert result.stdout == ""
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["lab --from profile.json -o", "solve profile.json -o", "report own.json -o", "export own.json --to dot -o"],
)
def test_a_full_disk_leaves_the_old_file(assigner, files, monkeypatch, line):
    """The message names the file that could not be written; the one that was there is whole, and nothing lies beside.

    The disk is full when the file's bytes are to reach it, as on a file system that allocates late.
    """
    monkeypatch.setattr(Machine, "here", lambda: Machine(4.0, 64e9, "kind0"))
    monkeypatch.setattr("assigner.lab.lacks", lambda *_: (Lack("netem", "modprobe sch_netem", "latency"),))
    (files / "out.dat").write_text("mine")
    before = {path.name: path.read_bytes() for path in files.iterdir()}

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = assigner(*line.split(), "out.dat", "--force")
    assert result.exit_code == 2, result.output
    assert "cannot write out.dat: No space left on device" in result.stderr
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before
