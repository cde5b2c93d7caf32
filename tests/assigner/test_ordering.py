"""Messages without tags: both ends of a channel find one order, and no program waits for itself in it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from builders import make_plan, make_profile
from drawn_plans import drawn

from assigner.errors import UsageError
from assigner.runtime.messages.nccl import DirectChannels, alone_on_theirs, check_workers, use_many_queues
from assigner.runtime.messages.ordering import Message, Posting, sending_orders
from assigner.runtime.messages.staging import Staging
from assigner.schedule.orders import SCHEDULES, listed
from assigner.schedule.program import Action, ActionKind, Payload, Program, Route, build_program

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

    from assigner.formats.plan import Plan

ON_GPUS = {
    count: pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")
    for count in (1, 2)
}
COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD)
CASES = list(itertools.product(range(12), SCHEDULES))


def program_of(seed: int, schedule: str) -> Program:
    profile, plan = drawn(seed, "1f1b" if schedule == "listed" else schedule)
    plan = listed(plan) if schedule == "listed" else plan
    return build_program(plan, profile.edges, profile.ties)


class Receiver:
    """One worker's receives, posted as the executor does it: in order, and `ahead` computations early."""

    def __init__(self, actions: tuple[Action, ...], posting: Posting, ahead: int) -> None:
        self.actions, self.posting, self.ahead = actions, posting, ahead
        self.posted: list[Message] = []
        self.next = 0

    def post_before(self, index: int) -> None:
        """What is posted when action `index` begins."""
        computed = sum(action.kind in COMPUTE for action in self.actions[: index + 1]) + self.ahead
        seen = 0
        for n, action in enumerate(self.actions):
            seen += action.kind in COMPUTE
            if (seen >= computed and n > index) or n < self.next:
                if n >= self.next:
                    break
                continue
            self.next = n + 1
            if action.kind is ActionKind.RECEIVE:
                assert action.route is not None
                self.posted += self.posting.due(Message(action.route, action.micro_batch))


def run(program: Program, ahead: int) -> dict[str, list[Message]]:
    """Run a program on channels whose n-th send meets the n-th receive; what each worker posted, in order.

    A send holds up nobody; a receive waits until everything before it on its channel has passed.
    """
    orders = sending_orders(program)
    receivers = {name: Receiver(actions, Posting(orders), ahead) for name, actions in program.actions.items()}
    sent: Counter[tuple[str, str, bool]] = Counter()
    place = {message: n for order in orders.values() for n, message in enumerate(order)}
    at = dict.fromkeys(program.actions, 0)
    moved = True
    while moved:
        moved = False
        for name, actions in program.actions.items():
            while at[name] < len(actions):
                receivers[name].post_before(at[name])
                action = actions[at[name]]
                if action.route is not None:
                    message = Message(action.route, action.micro_batch)
                    if action.kind is ActionKind.SEND:
                        assert place[message] == sent[message.channel]
                        sent[message.channel] += 1
                    elif place[message] >= sent[message.channel]:
                        break
                    else:
                        assert message in receivers[name].posted
                at[name] += 1
                moved = True
    waiting = {name: actions[at[name]] for name, actions in program.actions.items() if at[name] < len(actions)}
    assert not waiting, waiting
    return {name: receiver.posted for name, receiver in receivers.items()}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("seed", "schedule"), CASES)
def test_both_ends_have_one_order(seed: int, schedule: str, ahead: int) -> None:
    """Every program ends, and each receiver has posted each channel's messages in the order of their sends."""
    program = program_of(seed, schedule)
    posted = run(program, ahead)
    for (source, target, ties), order in sending_orders(program).items():
        assert all(message.route.source == source for message in order)
        mine = [each for each in posted[target] if each.channel == (source, target, ties)]
        assert mine == list(order)


def test_a_receiver_with_another_order() -> None:
    """What is needed later but was sent before is posted first, once; a program that runs again starts over."""
    a, b = (Message(Route(Payload.ACTIVATION, "p", n, "worker:0/cuda:0", "worker:1/cuda:0"), 0) for n in range(2))
    posting = Posting({a.channel: [a, b]})
    assert posting.due(b) == [a, b]
    assert posting.due(a) == []
    posting.start_over()
    assert posting.due(a) == [a]


def test_only_what_is_carried_has_a_place() -> None:
    """Messages that go another way leave no gap."""
    program = program_of(3, "gpipe")
    kept = program.routes[0]
    orders = sending_orders(program, lambda route: route == kept)
    assert {message.route for order in orders.values() for message in order} == {kept}


def test_ties_have_a_round_of_their_own() -> None:
    """A step without an update sends none of them."""
    route = Route(Payload.TIE, "p", 0, "worker:0/cuda:0", "worker:1/cuda:0")
    assert Message(route, -1).channel != Message(route, 0).channel


def test_ranks_with_a_gpu_of_their_own() -> None:
    """Two ranks on one GPU have none for themselves; the third has."""
    assert alone_on_theirs({0: "host a", 1: "host a", 2: "host b"}) == {2}
    assert alone_on_theirs({0: "host a", 3: "host b"}) == {0, 3}


def on_gpus() -> Plan:
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0])
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])])
    first, second = plan.stages
    moved = replace(first, sole_worker="worker:0/cuda:0"), replace(second, sole_worker="worker:1/cpu")
    return replace(plan, stages=moved)


def test_nccl_wants_gpus() -> None:
    """Asked for by name, it is refused where a worker is a CPU; left to itself, it is not used there."""
    with pytest.raises(UsageError, match="backend 'nccl': worker:1/cpu is no GPU"):
        check_workers(on_gpus(), "nccl")
    check_workers(on_gpus(), None)


def test_cuda_has_a_queue_for_each_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has said how many."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    use_many_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "4"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    use_many_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.long
@pytest.mark.distributed
def test_training_on_ordered_channels(forked: ForkedRanks, tmp_path: Path) -> None:
    """Plans of every shape train as the plain model does when every message goes without a tag (gloo for NCCL)."""
    for found in forked.found("ordered.py", tmp_path, ranks=3):
        assert found["messages"] > 100
        assert max(max(case.values()) for case in found["worst"].values()) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "through_nccl"),
    [
        ("cpu,cpu", False),
        pytest.param("cuda:0,cpu", False, marks=[pytest.mark.gpu, ON_GPUS[1]]),
        pytest.param("cuda:0,cuda:0", False, marks=[pytest.mark.gpu, ON_GPUS[1]]),
        pytest.param("cuda:0,cuda:0 apart", True, marks=[pytest.mark.gpu, ON_GPUS[1]]),
        pytest.param("cuda:0,cuda:1", True, marks=[pytest.mark.gpu, ON_GPUS[2]]),
    ],
)
@pytest.mark.distributed
def test_training_on_two_devices(forked: ForkedRanks, tmp_path: Path, devices: str, *, through_nccl: bool) -> None:
    """It is the plain model's training on any two; messages go through NCCL where each rank has a GPU for itself.

    Apart: two ranks on one GPU, which are made to believe that each has one.
    """
    if "cuda" not in devices:
        forked.run("gpus.py", tmp_path, devices, ranks=2)
    else:  # torch starts CUDA in no fork of a process that has looked for it
        script = Path(__file__).resolve().parents[1] / "runs" / "gpus.py"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run(
            [*launcher, str(script), str(tmp_path), *devices.split()],
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert not ended.returncode, ended.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (found["messages"] > 10) == through_nccl
        assert max(found["worst"].values()) < 1e-10


@pytest.mark.gpu
@ON_GPUS[1]
def test_tensors_pass_through_pinned_memory() -> None:
    """They come back as they were, computed before and read after on the GPU's own stream."""
    staging = Staging(torch.device("cuda", 0))
    made = torch.arange(1 << 20, device="cuda:0").sin()
    copy, copied = staging.to_host(made)
    copied.synchronize()
    assert copy.is_pinned()
    assert torch.equal(staging.to_device(copy), made)


def test_values_with_headers_are_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their receiver learns the shape late; a route that gets a header once is not carried any more, and ties are."""
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(DirectChannels, "_make", lambda _, *ends: made.append(ends))
    channels = DirectChannels(frozenset({0, 1}), device=torch.device("cpu"), timeout=timedelta(seconds=1))

    def route(payload: Payload, output: int, target: int = 1) -> Route:
        return Route(payload, "p", output, "worker:0/cuda:0", f"worker:{target}/cuda:0")

    shaped, unshaped, far = (route(Payload.ACTIVATION, n, target) for n, target in ((0, 1), (1, 1), (2, 2)))
    tie = route(Payload.TIE, 1)
    channels.open([shaped, unshaped, far, tie, route(Payload.SHAPE, 1)])
    assert [channels.carries(each) for each in (shaped, unshaped, far, tie)] == [True, False, False, True]
    program = program_of(3, "gpipe")
    channels.begin(program)
    channels.open([route(Payload.SHAPE, 0)])
    channels.open([shaped])
    assert not channels.carries(shaped)
    assert channels.carries(tie)
    assert not channels._postings
    assert set(made) == {(0, 1)}


def test_after_a_failure_channels_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this rank, before the process group is left; nothing of them is destroyed a second time."""
    ended: list[object] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda _: pytest.fail("it was aborted"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", ended.append)
    channels = DirectChannels(frozenset({0, 1, 2}), device=torch.device("cuda", 0), timeout=timedelta(seconds=1))
    channels._groups.update({(0, 1): "mine", (1, 2): "theirs"})  # type: ignore[dict-item]
    channels.abort()
    channels.close()
    assert ended == ["mine"]
