"""The lab for real: namespaces, quotas, limits and wires of this machine's kernel, and that nothing of them stays."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from assigner.errors import UsageError, WorkerError
from assigner.lab import Cluster, Host, RackLink, run_on_hosts
from assigner.lab.cgroups import Mounts
from assigner.lab.hosts import PREFIX, remove_left_behind
from assigner.lab.network import NAMESPACES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.usefixtures("lab")]

PAIR = Cluster((Host("left", cpu=0.8), Host("right", cpu=0.8)))

SEND = """
import os, socket, sys, time
size = int(sys.argv[1])
if os.environ["NODE_RANK"] == "0":
    server = socket.create_server(("", 7000))
    peer, _ = server.accept()
    left = size
    while left:
        left -= len(peer.recv(1 << 16))
    peer.sendall(b"k")
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 7000))
            break
        except OSError:
            time.sleep(0.05)
    start = time.perf_counter()
    peer.sendall(bytes(size))
    peer.recv(1)
    print("mbit", size * 8e-6 / (time.perf_counter() - start))
"""

SPIN = """
import time
wall, used = time.perf_counter(), time.process_time()
while time.process_time() - used < 0.4:
    pass
print("share", 0.4 / (time.perf_counter() - wall))
"""


def on(cluster: Cluster, *command: str, timeout_s: float = 60.0, grace_s: float = 1.0) -> str:
    """What the hosts said on stdout."""
    said = io.StringIO()
    run_on_hosts(cluster, command, timeout_s=timeout_s, grace_s=grace_s, stdout=said, stderr=said)
    return said.getvalue()


def figure(said: str, word: str, host: str) -> float:
    match = re.search(rf"\[{host}\] {word} ([0-9.]+)", said)
    assert match, said
    return float(match[1])


def remains() -> list[str]:
    """Everything of any lab that this machine still has."""
    groups = [path for mount in Mounts.here().all for path in mount.folder.glob(f"{PREFIX}*")]
    return sorted(map(str, [*groups, *NAMESPACES.glob(f"{PREFIX}*"), *Path("/run").glob(f"{PREFIX}*")]))


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, no lab that has ended leaves anything behind; others may run beside the tests."""
    before = remains()
    yield
    labs = {name: re.search(rf"{PREFIX}(\d+)-\d+", name) for name in remains() if name not in before}
    over = [name for name, lab in labs.items() if lab and not (_runs(int(lab[1])) and int(lab[1]) != os.getpid())]
    assert over == []


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_every_host_gets_its_place_and_its_name():
    """Placeholders, environment, host name, address and /etc/hosts are the host's own; output bears its name."""
    code = "import os, socket; print(socket.gethostname(), socket.gethostbyname('{host}'), os.environ['NODE_RANK'])"
    said = on(PAIR, "python", "-c", code).splitlines()
    assert sorted(said) == ["[left] left 10.77.0.1 0", "[right] right 10.77.0.2 1"]


def test_streams_stay_apart_and_the_last_line_needs_no_end():
    """stdout and stderr of the hosts go where theirs go here."""
    out, err = io.StringIO(), io.StringIO()
    one = Cluster((Host("a"),))
    run_on_hosts(one, ["sh", "-c", "echo said; echo warned >&2; printf rest"], stdout=out, stderr=err)
    assert out.getvalue() == "[a] said\n[a] rest\n"
    assert err.getvalue() == "[a] warned\n"


def test_a_wire_has_its_rate():
    """4 MB over a wire of 50 Mbit/s: TCP gets 96 % of it, and never twice of it."""
    cluster = Cluster((Host("a", bandwidth_mbit=50), Host("b")))
    assert 2 < figure(on(cluster, "python", "-c", SEND, "4000000"), "mbit", "b") < 75


def test_the_wire_between_racks_is_the_narrow_one():
    """Two fast hosts in two racks talk at the racks' rate."""
    hosts = (Host("a", rack="x", bandwidth_mbit=1000), Host("b", rack="y", bandwidth_mbit=1000))
    said = on(Cluster(hosts, RackLink(40.0)), "python", "-c", SEND, "3000000")
    assert 2 < figure(said, "mbit", "b") < 60


def test_a_share_of_the_processor_is_a_share():
    """A host with 0.4 of a core computes 0.4 of the time, however idle the machine is; so does one under 0.2."""
    said = on(Cluster((Host("a", cpu=0.4), Host("b", cpu=0.15))), "python", "-c", SPIN)
    assert figure(said, "share", "a") < 0.55
    assert figure(said, "share", "b") < 0.22


def test_the_host_that_runs_out_of_memory_is_named():
    """The kernel kills what passes the limit; the error names host and limit, not the host that missed it."""
    cluster = Cluster((Host("large", memory_mib=900), Host("tiny", memory_mib=80)))
    code = "import time; x = bytearray(200 << 20); time.sleep({node_rank} or 30)"
    with pytest.raises(WorkerError, match="host tiny was out of memory: limit 80 MiB"):
        on(cluster, "python", "-c", code)


def test_a_child_that_is_killed_for_memory_counts_too():
    """Where a launcher's child is the victim and the launcher fails with a code of its own."""
    code = "python -c 'bytearray(200 << 20)'; exit 1"
    with pytest.raises(WorkerError, match="host a was out of memory: limit 80 MiB"):
        on(Cluster((Host("a", memory_mib=80),)), "sh", "-c", code)


def test_the_first_host_that_fails_is_named_with_its_code():
    """The others are ended after the grace period, and their ends are no news."""
    with pytest.raises(WorkerError, match="host right ended with exit code 3") as caught:
        on(PAIR, "sh", "-c", "[ {host} = left ] && sleep 100; exit 3", grace_s=0.2)
    assert caught.value.exit_code == 7
    with pytest.raises(WorkerError, match="host left was killed by SIGKILL"):
        on(PAIR, "sh", "-c", "[ {host} = left ] && kill -9 $$; sleep 0.1")


def test_the_others_may_end_by_themselves_within_the_grace_period():
    """What they say after the failure is still passed on."""
    said = io.StringIO()
    with pytest.raises(WorkerError, match="host left ended with exit code 1"):
        run_on_hosts(
            PAIR, ["sh", "-c", "[ {host} = left ] && exit 1; sleep 0.5; echo lost left"],
            timeout_s=30, stdout=said,
        )  # fmt: skip
    assert "[right] lost left" in said.getvalue()


def test_time_up_says_who_still_ran():
    """A host that has ended is not among them."""
    with pytest.raises(WorkerError, match="stopped after 8 s; still running: right"):
        on(PAIR, "sh", "-c", "[ {host} = left ] || sleep 100", timeout_s=8.0)


def test_processes_that_hide_are_killed_with_their_host():
    """A daemon that left its session still ends with the lab: it cannot leave the host."""
    said = on(Cluster((Host("a"),)), "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo pid $!")
    pid = int(figure(said, "pid", "a"))
    for _ in range(100):
        if not _sleeps(pid):
            break
        time.sleep(0.05)
    assert not _sleeps(pid)


def _sleeps(pid: int) -> bool:
    try:
        return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_what_cannot_be_made_leaves_nothing_behind(monkeypatch):
    """The third step of building fails: the first two are taken back."""
    from assigner.lab import network

    def refuse(*_: object) -> None:
        raise UsageError("no shaping today")

    monkeypatch.setattr(network, "_shape", refuse)
    with pytest.raises(UsageError, match="no shaping today"):
        on(PAIR, "true")
    assert not [name for name in remains() if str(os.getpid()) in name]


def started(tmp_path: Path) -> subprocess.Popen[str]:
    """A lab in a process of its own, whose hosts sleep."""
    file = tmp_path / "c.toml"
    file.write_text('[[host]]\nname = "a"\ncpu = 0.5\nmemory_mib = 200\n[[host]]\nname = "b"\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "assigner_cli", "lab", str(file), "--", "sh", "-c", "echo up; sleep 1000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"[a] up\n", "[b] up\n"}
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_lab_and_cleans_up(tmp_path, number):
    """The hosts' processes, groups and namespaces are gone when the lab is; it ends as the signal would have it."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored in this session, and so by what it starts: nohup does that")
    lab = started(tmp_path)
    assert any(f"{PREFIX}{lab.pid}-" in name for name in remains())
    lab.send_signal(number)
    _, said = lab.communicate(timeout=1200)
    assert not [name for name in remains() if f"{PREFIX}{lab.pid}-" in name]
    code, line = {
        signal.SIGINT: (130, "error: interrupted\n"),
        signal.SIGTERM: (143, "error: ended by SIGTERM, and what it had started with it\n"),
        signal.SIGHUP: (-signal.SIGHUP, said),
    }[number]
    assert (lab.returncode, said) == (code, line)


def test_what_a_killed_lab_left_goes_with_the_next_start(tmp_path):
    """SIGKILL leaves everything; the next lab removes it, with the processes that still run in it."""
    lab = started(tmp_path)
    lab.kill()
    lab.communicate(timeout=1200)
    name = f"{PREFIX}{lab.pid}-"
    assert [each for each in remains() if name in each]
    on(Cluster((Host("a"),)), "true")
    assert not [each for each in remains() if name in each]
    assert remove_left_behind(Mounts.here(), warn=pytest.fail) == []


def test_a_killed_lab_that_nobody_has_waited_for_is_gone_too(tmp_path):
    """A zombie keeps its number, and runs no lab."""
    lab = started(tmp_path)
    lab.kill()
    os.waitid(os.P_PID, lab.pid, os.WEXITED | os.WNOWAIT)
    on(Cluster((Host("a"),)), "true")
    assert not [each for each in remains() if f"{PREFIX}{lab.pid}-" in each]
    lab.communicate(timeout=1200)


def test_a_running_lab_is_left_alone(tmp_path):
    """Two labs at once: the second removes nothing of the first, and their addresses do not meet."""
    lab = started(tmp_path)
    try:
        on(PAIR, "true")
        assert any(f"{PREFIX}{lab.pid}-" in name for name in remains())
        assert lab.poll() is None
    finally:
        lab.terminate()
        lab.communicate(timeout=1200)
