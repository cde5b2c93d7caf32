"""Messages through MPI: ranks that Open MPI's own mpirun has started, and what is refused without it."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from assigner.errors import UsageError
from assigner.runtime.messages import mpi
from assigner.runtime.messages.carriers import GlooCarrier
from assigner.runtime.messages.rendezvous import asked_backend, check_backend
from assigner.runtime.messages.transport import Transport
from assigner.schedule.program import Payload, Route

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

    Mpirun = Callable[..., CompletedProcess[str]]

by_mpirun = [pytest.mark.distributed, pytest.mark.long]


@pytest.fixture(scope="module")
def found(mpirun: Mpirun, programs: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    folder = tmp_path_factory.mktemp("mpi")
    done = mpirun(2, programs / "python", root / "tests/runs/through_mpi.py", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


class TestMessages:
    """Between two ranks of mpirun."""

    pytestmark = by_mpirun

    def test_bits_arrive_in_any_order(self, found: list[dict[str, Any]]) -> None:
        """Of every type, without elements, in several parts, and received in another order than sent."""
        assert all(all(each["messages"]["right"]) for each in found)
        assert [each["messages"]["got"] for each in found] == [True, True]

    def test_every_wait_ends(self, found: list[dict[str, Any]]) -> None:
        """With the message's size where it is wrong, with the time-out, and when the run is left."""
        for rank, each in enumerate(found):
            assert each["refusals"] == {
                "short": f"worker:{1 - rank} has sent 12 bytes where 16 are due",
                "never": "no message for 0.3 s",
                "left": "the run was left before the message was there",
            }

    def test_messages_travel_while_workers_compute(self, found: list[dict[str, Any]]) -> None:
        """A thread lets MPI move them."""
        assert [each["moves"] for each in found] == [True, True]

    def test_links_are_measured_through_it(self, found: list[dict[str, Any]]) -> None:
        """A profile says so of each link."""
        assert [each["links"] for each in found] == [["mpi"], ["mpi"]]

    def test_ranks_agree_on_a_backend(self, found: list[dict[str, Any]]) -> None:
        """Else one would wait for messages where the other sends none."""
        assert [each["unlike"] for each in found] == ["backend: worker:0 has none, and worker:1 has mpi"] * 2

    @pytest.mark.parametrize("shared", [False, True])
    def test_training_has_the_same_losses_as_with_gloo(self, found: list[dict[str, Any]], shared: bool) -> None:
        """Stages on one worker each, and one that two share, whose gradients gloo adds up."""
        for each in found:
            gloo, through_mpi = each[f"losses {shared}"]
            assert gloo == through_mpi
            assert len(set(gloo)) == 7


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "flags", "said"),
    [
        ("raise", [], "10 ArithmeticError the trap snapped\n(ArithmeticError on worker:1/cpu"),
        ("kill", ["--enable-recovery"], "10 WorkerError worker:1/cpu failed: its process is gone, cut off or stuck"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    mpirun: Mpirun, programs: Path, root: Path, tmp_path: Path, how: str, flags: list[str], said: str
) -> None:
    """With its own error; or with the word that it is gone, where mpirun is told to leave them alone."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    done = mpirun(2, *flags, programs / "python", root / "tests/runs/failing_mpi.py", tmp_path, how)
    assert flags or done.returncode == 4
    assert (tmp_path / "said").read_text().startswith(said), done.stderr[-4000:]


@pytest.mark.distributed
@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_run(mpirun: Mpirun, root: Path, tmp_path: Path) -> None:
    """With the signal in mpirun's exit code; here the ranks are real programs, which import torch."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    done = mpirun(2, sys.executable, root / "tests/runs/failing_mpi.py", tmp_path, "kill")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr[-4000:]


def test_a_rank_that_no_mpi_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be alone in a world of its own."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    for name in mpi._LAUNCHED:
        monkeypatch.delenv(name, raising=False)

    class Untouched:
        def Is_initialized(self) -> bool:  # noqa: N802 - MPI's name
            return False

    with pytest.raises(UsageError, match="no launcher of MPI's has started this process") as raised:
        mpi._begin(Untouched())
    assert "mpirun" in str(raised.value.hint)


def test_without_mpi4py_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any rank waits for another; and so is a library that cannot be loaded."""
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="mpi4py is not installed") as raised:
        check_backend("mpi")
    assert "mpi4py>=4" in str(raised.value.hint)
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(UsageError, match="finds no MPI library"):
        check_backend("mpi")


def test_the_environment_asks_for_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script needs no change; a word that nobody knows is refused."""
    assert asked_backend() is None
    monkeypatch.setenv("ASSIGNER_BACKEND", "mpi")
    assert asked_backend() == "mpi"
    monkeypatch.setenv("ASSIGNER_BACKEND", "pigeons")
    with pytest.raises(UsageError, match="ASSIGNER_BACKEND: 'pigeons' is unknown"):
        asked_backend()


def test_an_mpi_with_few_tags_refuses_many_values() -> None:
    """Two messages under one tag would be taken for each other. Each pair of workers counts by itself."""

    class FewTags(GlooCarrier):
        most_tag = 1 << 18

        def __init__(self) -> None:
            """Nothing is sent."""

    transport = Transport(device=mpi.torch.device("cpu"), timeout_s=5.0, carrier=FewTags())
    ways = [Route(Payload.ACTIVATION, "p", n, "worker:0/cpu", f"worker:{1 + n % 2}/cpu") for n in range(7)]
    transport.know(ways[:6])
    with pytest.raises(UsageError, match="worker:0/cpu and worker:1/cpu exchange 4 values or more, and gloo has tags"):
        transport.know(ways)
    transport.close()
