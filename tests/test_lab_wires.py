"""A wire that is cut, on the lab: nothing closes, and yet the run ends soon and says who is cut off."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from assigner.errors import WorkerError
from assigner.lab import Cluster, Host, run_on_hosts
from assigner.lab.hosts import lab_name
from assigner.lab.network import call

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.distributed, pytest.mark.usefixtures("lab")]

SCRIPT = Path(__file__).resolve().parent / "runs" / "wire.py"
VICTIM = 1


def cut_when_all_train(folder: Path, trains: list[bool], cut_s: list[float]) -> None:
    """Take the victim's port off its switch: what is sent is lost without a word."""
    until = time.monotonic() + 120
    while len(list(folder.glob("ready.*"))) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    trains.append(len(list(folder.glob("ready.*"))) == 3)
    call("ip", "-n", f"{lab_name()}.switch0", "link", "set", f"p{VICTIM}", "nomaster")
    cut_s.append(time.time())


def test_a_cut_wire_is_noticed_and_named(tmp_path, monkeypatch):
    """All ranks raise within seconds: the others name the host behind the wire, and that one says it of itself."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trains: list[bool] = []
    cut_s: list[float] = []
    cutter = threading.Thread(target=cut_when_all_train, args=(tmp_path, trains, cut_s))
    cutter.start()
    with pytest.raises(WorkerError, match=r"host . ended with exit code 7"):
        run_on_hosts(
            Cluster(tuple(Host(name) for name in "abc")), [str(SCRIPT), str(tmp_path)], timeout_s=200, grace_s=40
        )
    cutter.join()
    assert trains == [True]
    said = [(tmp_path / f"said.{rank}").read_text().partition(" ") for rank in range(3)]
    for rank, (at_s, _, text) in enumerate(said):
        assert float(at_s) - cut_s[0] < 30  # about 8 where the machine has time; a wait for a message would take 120
        assert f"worker:{VICTIM}" in text.partition(" failed: ")[0]
        assert ("its host is cut off, or its wire loses much: no other host answers" in text) == (rank == VICTIM)
