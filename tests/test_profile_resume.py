"""`assigner profile` interrupted and gone on with, and measured again in part: ranks that are killed for real."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from assigner.formats.document import decode
from assigner.formats.profile import Measurement, load_profile
from assigner.schedule.cost import CostModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.long]

SETTINGS = "width=16,blocks=2,context=8,heads=2"
ENDING = """
import os, signal, sys, threading, time
from pathlib import Path
sys.path.append({examples!r})
from gpt import workload
def end():
    kept = []
    while len(kept) < 2 or not all(kept) or sum(kept) <= int(os.environ["POINTS"]):
        time.sleep(0.005)
        kept = [each.read_text().count('"measurement"') for each in Path(__file__).parent.glob(".*.jsonl")]
    if os.environ["WHO"] == "rank 1":
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
if os.environ.get("RANK") == "1" and "POINTS" in os.environ:
    threading.Thread(target=end, daemon=True).start()
"""
"""The workload of examples/gpt.py. Once both ranks have kept a point, and both together more than POINTS, rank 1 is
killed, or it sends the launcher's group what Ctrl-C sends.
"""
SIZES = (2, 4, 8)
KINDS = ("embed", "blocks.0", "head")
FLAGS = ["--workers", "2", "--max-message", "4096", "--no-check"]


class Folder:
    """A folder in which one profile is being measured, by processes that need no import of torch."""

    def __init__(self, root: Path, path: Path, programs: Path) -> None:
        self.root, self.path, self.profile = root, path, path / "profile.json"
        self._assigner = str(programs / "assigner")
        (path / "ending.py").write_text(ENDING.format(examples=str(root / "examples")))

    def call(self, *flags: str, code: int, settings: str = SETTINGS, **variables: str) -> str:
        """Run it to its end; what it said on stderr."""
        words = [f"{self.path / 'ending.py'}:workload({settings})", "-o", str(self.profile), *FLAGS, *flags]
        done = subprocess.run(
            [self._assigner, "profile", *words], cwd=self.root, capture_output=True, text=True,
            timeout=1200, check=False, env={**os.environ, **variables},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert done.stdout == ""
        return done.stderr

    def journals(self) -> list[Path]:
        return sorted(self.profile.parent.glob(".profile.json.part-*.jsonl"))

    def points(self) -> dict[tuple[str, str, int], Measurement]:
        """The measurements in the journals, a torn line left out."""
        found = {}
        for journal in self.journals():
            for line in journal.read_text().rpartition("\n")[0].splitlines()[1:]:
                if "measurement" in json.loads(line):
                    point = decode(Measurement, json.loads(line)["measurement"])
                    found[point.partition, point.worker, point.micro_batch] = point
        return found


@pytest.fixture(scope="module")
def folder(root: Path, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(root, tmp_path_factory.mktemp("resume"), programs)


@pytest.fixture(scope="module")
def kept(folder: Folder) -> Iterator[dict[tuple[str, str, int], Measurement]]:
    """The points that a run kept whose rank 1 was killed, and that of one that went on and was stopped by Ctrl-C."""
    sizes = ("--micro-batches", ",".join(map(str, SIZES)))
    said = folder.call(*sizes, code=6, POINTS="0", WHO="rank 1")
    assert "worker:1 was killed by SIGKILL" in said
    assert "--resume goes on from there" in said
    assert not folder.profile.exists()
    first = folder.points()
    assert 0 < len(first) < 2 * len(KINDS) * len(SIZES)

    said = folder.call("--resume", "--micro-batches", "1,2", code=5)  # other settings
    assert "belongs to another measurement: micro_batches [2, 4, 8] there, [1, 2] now" in said
    assert folder.points() == first

    said = folder.call("--resume", *sizes, code=130, POINTS=str(len(first)), WHO="all")
    assert said.count("error: interrupted") == 1
    assert "--resume goes on from there" in said
    second = folder.points()
    assert {key: second[key] for key in first} == first
    folder.call("--resume", *sizes, code=0)
    return second


def test_measured_points_are_kept_and_the_rest_is_measured(
    folder: Folder, kept: dict[tuple[str, str, int], Measurement]
) -> None:
    """What was measured before an interruption stands in the profile to the last digit, and nothing is missing."""
    profile = load_profile(folder.profile)
    found = {(each.partition, each.worker, each.micro_batch): each for each in profile.measurements}
    assert {key: found[key] for key in kept} == kept
    assert set(found) == {
        (name, worker, size) for name in KINDS for worker in ("worker:0/cpu", "worker:1/cpu") for size in SIZES
    }
    assert {(link.source[7], link.target[7]) for link in profile.links} == {("0", "1"), ("1", "0")}
    assert [each.workers for each in profile.collectives] == [("worker:0/cpu", "worker:1/cpu")]
    assert profile.collectives[0].points[-1].bytes == 4096
    cost = CostModel(profile)
    assert all(cost.partition(name, "worker:1/cpu", 4).update_s > 0 for name in profile.order)
    assert all(part.optimizer_bytes >= 2 * part.parameter_bytes for part in profile.partitions)  # AdamW's moments
    assert not folder.journals()


def is_new(point: Measurement) -> bool:
    """Whether the test below measures it again."""
    return point.partition == "embed" and point.micro_batch in (2, 4)


@pytest.mark.usefixtures("kept")
def test_only_what_is_named_is_measured_again(folder: Folder) -> None:
    """A partition on all workers, at two sizes, and a pair's links and all-reduces are new; all else is as it was."""
    old = load_profile(folder.profile)
    said = folder.call("--only", "embed", "--only", "worker:0-worker:1", "--micro-batches", "2,4", code=0)
    assert "profile written" in said
    new = load_profile(folder.profile)
    parts = [{each for each in profile.measurements if is_new(each)} for profile in (old, new)]
    assert set(old.measurements) - parts[0] == set(new.measurements) - parts[1]
    assert [len(each) for each in parts] == [4, 4]
    assert not parts[0] & parts[1]
    assert (new.workers, new.partitions) == (old.workers, old.partitions)
    assert all(one.points != two.points for one, two in zip(old.links, new.links, strict=True))
    (one,), (two,) = old.collectives, new.collectives
    assert one.points != two.points
    folder.call("--only", "collectives", code=0)
    again = load_profile(folder.profile)
    assert again.collectives != new.collectives
    assert (again.links, again.measurements) == (new.links, new.measurements)
    assert all(min(each.forward_s, each.backward_s) > 0 for each in parts[1])


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("flags", "settings", "code", "said"),
    [
        (["--only", "links"], SETTINGS.replace("blocks=2", "blocks=3"), 5, "its fingerprint is"),
        (["--only", "tail"], SETTINGS, 2, "names no partition"),
    ],
)
def test_a_profile_that_does_not_fit_is_not_touched(
    folder: Folder, flags: list[str], settings: str, code: int, said: str
) -> None:
    """Another model, another partition, other workers: an error, and the file is as before."""
    before = folder.profile.read_text()
    assert said in folder.call(*flags, code=code, settings=settings)
    assert folder.profile.read_text() == before
    assert not folder.journals()
