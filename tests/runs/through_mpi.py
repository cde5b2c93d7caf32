"""On two ranks that mpirun has started: messages through MPI, and training by them beside gloo's.

    mpirun -n 2 python tests/runs/through_mpi.py FOLDER

Rank r writes FOLDER/r.json: what it found.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.machine.launchedrank import launched
from assigner.profiler.host import host_facts
from assigner.profiler.links import SweepOptions, measure_links
from assigner.runtime.messages import mpi
from assigner.runtime.messages.carriers import open_carrier
from assigner.runtime.messages.ordering import Message
from assigner.runtime.messages.rendezvous import join_group, leave_group
from assigner.runtime.messages.transport import Transport
from assigner.schedule.program import Payload, Route

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from workloads import graph_of, make_plan, skips

if TYPE_CHECKING:
    from assigner.formats.profile import Link

WAIT_S = 200.0  # for what comes: a loaded machine is slow, and the test waits longer for mpirun
CPU = torch.device("cpu")
SHORT = timedelta(seconds=0.3)
SENT = [
    torch.tensor(4.5),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.arange(6, dtype=torch.bfloat16),
    torch.tensor([float("nan"), -0.0]),
    torch.tensor([1 + 2j]),
    torch.arange(700_000, dtype=torch.int64),  # some parts
    torch.tensor([[1, -2]], dtype=torch.int8),
]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def messages() -> dict[str, Any]:
    """Values of all kinds both ways at once, received in another order than sent; their bits arrive."""
    mpi._PART_BYTES = 1 << 20
    transport = Transport(device=CPU, timeout_s=WAIT_S, carrier=open_carrier("mpi", timeout_s=WAIT_S))
    me = dist.get_rank()
    there, back = (Route(Payload.ACTIVATION, "p", 0, f"worker:{a}/cpu", f"worker:{1 - a}/cpu") for a in range(2))
    transport.know([there, back])
    out, in_ = (there, back) if me == 0 else (back, there)
    for n in reversed(range(len(SENT))):
        transport.post(Message(in_, n), tuple(SENT[n].shape), SENT[n].dtype)
    for n, each in enumerate(SENT):
        transport.send(Message(out, n), each)
    right = [same_bits(transport.receive(Message(in_, n)), each) for n, each in enumerate(SENT)]
    transport.flush()
    put = b"words" * 100_000
    transport.put(put, 1 - me)
    got = transport.get(1 - me)
    transport.flush()
    dist.barrier()
    transport.close()
    return {"right": right, "got": got == put}


def refusals() -> dict[str, str]:
    """What comes in another size, or never, and what is waited for when the run is left."""
    carrier, me = open_carrier("mpi", timeout_s=WAIT_S), dist.get_rank()
    found: dict[str, str] = {}

    def refused(name: str, wait: Any) -> None:
        try:
            wait()
        except RuntimeError as error:
            found[name] = str(error)

    sent = carrier.isend(torch.zeros(3), 1 - me, 1)
    short = carrier.irecv(torch.zeros(4), 1 - me, 1)
    refused("short", lambda: short.wait(timedelta(seconds=WAIT_S)))
    sent.wait(timedelta(seconds=WAIT_S))
    never = carrier.irecv(torch.zeros(4), 1 - me, 2)
    refused("never", lambda: never.wait(SHORT))
    dist.barrier()
    carrier.close(failed=True)
    refused("left", lambda: never.wait(timedelta(seconds=WAIT_S)))
    return found


def moves_by_itself() -> bool:
    """Whether a large message arrives though neither end calls MPI meanwhile."""
    carrier, me = open_carrier("mpi", timeout_s=WAIT_S), dist.get_rank()
    tensor = torch.full((4_000_000,), float(me + 1))
    come = torch.zeros(4_000_000)
    under_way: Any = [carrier.irecv(come, 1 - me, 1), carrier.isend(tensor, 1 - me, 1)]
    until = time.monotonic() + WAIT_S
    while any(each.requests for each in under_way) and time.monotonic() < until:
        time.sleep(0.01)
    dist.barrier()
    carrier.close(failed=False)
    return not any(each.requests for each in under_way) and bool((come == 2 - me).all())


def measured_links() -> list[str]:
    """What carries the links that this rank has measured."""
    found: list[Link] = []
    options = SweepOptions(largest=100_000, typical=20_000, timeout_s=WAIT_S, backend="mpi", force_busy=True)
    measure_links(
        [host_facts(CPU)] * 2, options, CPU,
        wanted=lambda _source, _target: True, done=found.append, progress=lambda _done, _all: None,
    )  # fmt: skip
    return [each.backend for each in found if all(point.seconds > 0 for point in each.points)]


def trained(backend: Any, *, shared: bool) -> list[float]:
    """The losses of some steps, in the same numbers whatever carries them."""
    made = skips()
    stages: Any = [({0: 1, 1: 3}, ["parts.0", "parts.1"]), (1, ["parts.2"]), (0, ["last"])]
    alone: Any = [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])]
    plan = make_plan(made, stages if shared else alone, schedule="gpipe" if shared else "1f1b")
    with Pipeline(made, plan, graph=graph_of(made), backend=backend, timeout_s=WAIT_S) as pipeline:
        losses = [pipeline.step(made.make_batch(8, n)) for n in range(6)]
        return [*losses, float(pipeline.evaluate(made.make_batch(8, 9)))]


def unlike_backends() -> str:
    """What is said where the ranks were asked for unlike ones."""
    try:
        open_carrier("mpi" if dist.get_rank() else None, timeout_s=WAIT_S)
    except UsageError as error:
        return error.message
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    place = launched()
    assert place is not None
    join_group(place, WAIT_S)
    found: dict[str, Any] = {
        "messages": messages(),
        "refusals": refusals(),
        "moves": moves_by_itself(),
        "links": measured_links(),
        "unlike": unlike_backends(),
    }
    leave_group()
    for shared in (False, True):
        found[f"losses {shared}"] = [trained(backend, shared=shared) for backend in ("gloo", "mpi")]
    (folder / f"{place.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
