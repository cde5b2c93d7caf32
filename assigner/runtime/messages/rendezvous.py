"""Where the ranks of a run meet: at a store under one address and port, which torchrun keeps or else rank 0 hosts.

A process connects to the store once and keeps it to its end. Each process group that it makes has its own keys there:
a second one would otherwise read the first one's addresses.

    launcher    address                                          port
    torchrun    MASTER_ADDR                                      MASTER_PORT
    mpirun      MASTER_ADDR, or 127.0.0.1 on one host            MASTER_PORT, or from the job's name
    srun        MASTER_ADDR, or the step's first host            MASTER_PORT, or from the job's and the step's number
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import socket
import time
import zlib
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, rendezvous  # type: ignore[attr-defined]

from assigner.errors import AssignerError, FormatError, UsageError, WorkerError
from assigner.formats.document import decode, encode
from assigner.formats.terms import Backend
from assigner.launch.failurereport import LEFT, LEFT_HINT, ended_hint
from assigner.launch.launcherwatch import end_with_launcher
from assigner.launch.limitedstore import STARTING_S, StoreSilentError, limited, opened
from assigner.launch.seal import clean, unseal, write
from assigner.launch.shutdown import is_done, local_store, signalled, take_leave, wait_for_name
from assigner.launch.sockets import ConnectionEnds, Connections
from assigner.machine.launchedrank import first_host, launched, launcher_process
from assigner.runtime.failures.failure import FailureWatch, joining
from assigner.runtime.messages.mpi import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from assigner.machine.launchedrank import Launched

T = TypeVar("T")

_BACKEND = "ASSIGNER_BACKEND"
_PORTS = range(10_000, 30_000)  # below those that systems hand out for connections
_IS_LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+|::1")
_COMMON_PORT = 29_500  # torchrun's
_FAREWELL_S = 5.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.25
_MOST_NAMES = 8
_SECOND_S = 1.0  # four looks of the first one
_TELL_S = 10.0
_JOIN_S = 300.0  # a rank that takes longer to come has died, or was never started

_DIED = "a rank may have died before it came: its own output says why; srun -K and torchrun then end the others at once"
_HELD = (
    "another program may have the port there: set MASTER_PORT to one that is free on rank 0's host, the same on every"
    " rank; or rank 0 is stopped, or torchrun, which keeps the store"
)


class _JoinedGroup(NamedTuple):
    """A process group, the keys of its own in the run's store, and what looks after its connections."""

    store: Store
    connections: Connections
    group: dist.ProcessGroup


_groups = itertools.count()  # the n-th group of every rank is the same one
_smaller_groups = itertools.count()  # likewise, of those of some ranks
_stores: dict[tuple[str, int, int, int], Store] = {}
_joined: list[_JoinedGroup] = []  # the one that this process is in, where it was made here
_kept_here: dict[int, Store] = {}  # stores that this process hosts for its own host, by port


def meeting_point(place: Launched, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The address and port of a run's store.

    Raises:
        UsageError: nothing says where rank 0 is.
    """
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if port is not None and not (port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"MASTER_PORT is {port!r}; expected a port's number", hint="take a free one, 1024 to 65535")
    if place.launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                raise UsageError(f"RANK is {place.rank}, and {name} is not set", hint="torchrun sets both")
    return address or _address(place, environment)[0], int(port) if port else _port(place)


def _address(place: Launched, environment: Mapping[str, str]) -> tuple[str, str]:
    """Rank 0's host, where MASTER_ADDR does not say it, and what says it."""
    if place.on_one_host:
        return "127.0.0.1", "this host"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environment.get(name):
            return first_host(environment[name]), f"{name}={environment[name]}"
    raise UsageError(
        f"{place.launcher} has started {place.ranks} ranks, and nothing says on which host rank 0 is",
        hint="set MASTER_ADDR to that host's name or address on every rank (mpirun -x MASTER_ADDR=HOST,"
        " or -genv MASTER_ADDR HOST)",
    )


def _port(place: Launched) -> int:
    """A port that all ranks of a job find, and that two jobs of a host rarely share."""
    job = place.job
    if not job and place.on_one_host:
        job = f"launcher {launcher_process(place.variable)}"
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else _COMMON_PORT


def job_store(place: Launched, timeout_s: float, *, join_s: float = _JOIN_S) -> Store:
    """The run's store; the same connection at every call. Ranks wait for rank 0 here where that hosts it.

    Args:
        place: This rank.
        timeout_s: Of its calls, and of the wait for it.
        join_s: The longest wait for it.

    Raises:
        UsageError: nothing says where it is, its host's name is unknown here, or rank 0 cannot open its port.
        WorkerError: it cannot be reached.
    """
    address, port = meeting_point(place)
    key = (address, port, place.rank, place.ranks)
    if key not in _stores:
        host = f"[{address}]" if ":" in address else address
        source = "MASTER_ADDR" if os.environ.get("MASTER_ADDR") else _address(place, os.environ)[1]
        wait_for_name(address, source=source, limit_s=min(timeout_s, join_s))
        # rank 0 waits for itself alone here: torch says how many have come, and `_wait_for_all` which have not
        url = f"tcp://{host}:{port}?rank={place.rank}&world_size=1"
        try:
            _keep_to_this_host(place, address, port)
            meet = rendezvous(url, timeout=timedelta(seconds=min(timeout_s, join_s)))
            store: Store = opened(lambda: next(meet)[0], port)
            store.set_timeout(timedelta(seconds=timeout_s))
            _stores[key] = store
        except (DistError, OSError) as error:
            reason = str(error).partition("\n")[0]  # what stands below, C++ frames, Python would print first
            if "EADDRINUSE" in reason or getattr(error, "errno", None) == errno.EADDRINUSE:
                raise UsageError(
                    f"port {port} of this host is taken: rank 0 cannot host the run's store there",
                    hint="set MASTER_PORT to a free port, the same on every rank; or is another process rank 0, too?",
                ) from None
            named = "MASTER_PORT" if os.environ.get("MASTER_PORT") else "the job"
            raise WorkerError(
                f"the {place.ranks} ranks did not meet at {host}:{port} ({source} and {named} say so): {reason}",
                hint=_HELD
                if isinstance(error, StoreSilentError)
                else "rank 0's host must be reachable there from all ranks; MASTER_ADDR and MASTER_PORT say where."
                f" {_DIED}",
            ) from None
    return _stores[key]


def _keep_to_this_host(place: Launched, address: str, port: int) -> None:
    """Where this process will host the store, and all ranks are here, open it under this host's own address.

    torch finds a store that is open at the port, and would open it to other hosts.
    """
    is_host = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    address = "127.0.0.1" if address == "localhost" else address
    if is_host and port and _IS_LOOPBACK.fullmatch(address) and port not in _kept_here:
        _kept_here[port] = local_store(address, port)


def join_group(place: Launched, timeout_s: float) -> None:
    """Make the process group of a run's ranks, gloo's. NCCL's come later, among the ranks with GPUs of their own.

    Raises:
        UsageError, WorkerError: see `job_store`.
    """
    end_with_launcher(joins=True)
    timeout = timedelta(seconds=timeout_s)
    opened = Connections(meeting_point(place)[1])
    try:
        store, name = job_store(place, timeout_s), _next_group(place)
        own = PrefixStore(name, store)
        with joining(store.clone(), name, f"worker:{place.rank}", place.ranks) as watch:  # type: ignore[attr-defined]
            with limited(own, limit_s=STARTING_S) as limited_own, limited(store, limit_s=STARTING_S) as jobs:
                _wait_for_all(limited_own, jobs, place, min(timeout_s, _JOIN_S), watch)
            dist.init_process_group("gloo", store=own, rank=place.rank, world_size=place.ranks, timeout=timeout)
            _settle(own, place.rank, range(place.ranks), opened)
    except BaseException:
        opened.close()
        raise
    assert dist.group.WORLD is not None
    _joined[:] = [_JoinedGroup(own, opened, dist.group.WORLD)]


def _next_group(place: Launched) -> str:
    # two jobs may derive one port; torchrun's ranks may be of several jobs, one on each host
    return f"assigner/{'' if place.launcher == 'torchrun' else place.job} group {next(_groups)}"


@contextmanager
def told_if_refused() -> Iterator[None]:
    """A block before this rank joins the run: where it fails, ranks that wait for this one end with its error.

    That is for ranks without a launcher that ends the others. It takes some seconds where they cannot be reached.
    """
    try:
        yield
    except Exception as error:
        place = None if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ else launched()
        if place is not None and place.ranks > 1:
            name = _next_group(place)
            with suppress(AssignerError, DistError):  # they have not come, or have gone
                store = job_store(place, _JOIN_S, join_s=_TELL_S)
                with joining(store.clone(), name, f"worker:{place.rank}", place.ranks) as watch:  # type: ignore[attr-defined]
                    watch.stay_s = _TELL_S if place.rank == 0 else 0.0  # the store goes with rank 0
                    watch.report("finding its part of the model", error)
        raise


def _wait_for_all(store: Store, jobs: Store, place: Launched, limit_s: float, watch: FailureWatch) -> None:
    """Gloo waits as long as for a message, and says neither for whom nor that one will not come any more.

    Raises:
        UsageError: another rank has come that counts more ranks, or fewer; or a second process with this one's rank.
        WorkerError: some ranks did not come, or another one has failed.
    """
    came = [f"assigner/came {rank}" for rank in range(place.ranks)]
    own = came[place.rank]
    mine = f"{place.ranks} {clean(socket.gethostname())}:{os.getpid()}"  # how many it counts, and which process it is

    def refuse(failure: AssignerError) -> NoReturn:
        watch.report("joining the run", failure)
        raise failure

    def check_alone() -> None:
        """Refuse a second process with this one's rank, which has come after it and says so under the same name."""
        found = clean(store.get(own).decode(errors="replace"))
        if found != mine:
            refuse(_second_process(mine, found, place))

    before = clean(store.compare_set(own, "", mine).decode(errors="replace"))
    alone_at = 0.0
    if before != mine:  # of one that has died, or that is there
        if store.check(came):
            refuse(_second_process(before, mine, place))
        store.set(own, mine)
        alone_at = time.monotonic() + _SECOND_S
    until = time.monotonic() + limit_s
    pause_s = _LEAST_PAUSE_S
    while not store.check(came) or time.monotonic() < alone_at:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        late = time.monotonic() > until
        if not late and pause_s < _MOST_PAUSE_S:
            continue
        watch.check()
        check_alone()
        missing = [rank for rank, name in enumerate(came) if not store.check([name])]
        if (gone := _gone(jobs, missing)) is not None:
            worker, how, hint = gone
            watch.report("joining the run", WorkerError(f"it {how}", hint=hint), worker)
            raise WorkerError(f"{worker} {how}", hint=hint)
        if missing and late:
            if unlike := _unlike_count(store, [name for n, name in enumerate(came) if n not in missing], place):
                refuse(unlike)
            names = ", ".join(f"worker:{rank}" for rank in missing[:_MOST_NAMES])
            names += ", ..." if len(missing) > _MOST_NAMES else ""
            told = f"{place.ranks - len(missing)} of {place.ranks} ranks have come to the run within {limit_s:g} s"
            refuse(WorkerError(f"{told}; missing: {names}", hint=_DIED))
    check_alone()
    if unlike := _unlike_count(store, came, place):
        refuse(unlike)


def _gone(jobs: Store, missing: Iterable[int]) -> tuple[str, str, str] | None:
    """The first of some ranks that will not come, as its launcher tells: how it ended, and a hint."""
    for rank in missing:
        if is_done(jobs, rank):
            return f"worker:{rank}", LEFT, LEFT_HINT
        if (ended := signalled(jobs, rank)) is not None:
            return f"worker:{rank}", ended.how, ended_hint(ended.how)
    return None


def _second_process(first: str, second: str, place: Launched) -> UsageError:
    names = (each.partition(" ")[2] or each for each in (first, second))
    return UsageError(
        f"two processes are worker:{place.rank}: {' and '.join(names)}",
        hint=f"start one process for each rank, 0 to {place.ranks - 1}: {place.variable} says which it is",
    )


def _unlike_count(store: Store, came: Sequence[str], place: Launched) -> UsageError | None:
    """What is wrong where ranks that have come, and say it there, count others than this one: each waits for others."""
    for name, told in zip(came, store.multi_get([*came]), strict=True):
        count = told.partition(b" ")[0]
        if count.isdigit() and int(count) != place.ranks:
            return UsageError(
                f"worker:{place.rank} was started as one of {place.ranks} ranks, and worker:{name.rpartition(' ')[2]}"
                f" as one of {int(count)}",
                hint="start every rank with the same count: WORLD_SIZE, or what its launcher sets in its place",
            )
    return None


def _settle(store: Store, me: int, ranks: Iterable[int], opened: Connections) -> None:
    """Tell the other ranks of a group this one's connections, and learn theirs: by now each has all of the group's."""
    write(store, f"assigner/ends {me}", opened.ends())
    names = {rank: f"assigner/ends {rank}" for rank in ranks if rank != me}
    told = store.multi_get(list(names.values())) if names else []
    found = zip(names.items(), told, strict=True)
    opened.settle({rank: unseal(tuple[ConnectionEnds, ...], name, text) for (rank, name), text in found})


def settle_group(ranks: Sequence[int]) -> None:
    """Look after the connections of a group of some ranks, which has just been made, as after those of all ranks.

    Every rank of the run calls this; the ranks of the group tell each other their ends.
    """
    number, me = next(_smaller_groups), dist.get_rank()
    if _joined and me in ranks:
        own, opened, _ = _joined[0]
        _settle(PrefixStore(f"assigner/smaller group {number}", own), me, ranks, opened)


def asked_backend() -> Backend | None:
    """What the environment asks messages to be carried by, ASSIGNER_BACKEND; None: nothing.

    Raises:
        UsageError: a backend that nobody knows.
    """
    found = next((each for each in get_args(Backend) if each == os.environ.get(_BACKEND)), None)
    if found is None and os.environ.get(_BACKEND):
        raise UsageError(
            f"{_BACKEND}: {os.environ[_BACKEND]!r} is unknown", hint=f"one of {', '.join(get_args(Backend))}, or unset"
        )
    return found


def check_backend(backend: Backend | None) -> None:
    """Raise UsageError unless what is asked for is there."""
    if backend is not None and backend not in get_args(Backend):
        raise UsageError(f"backend {backend!r} is unknown", hint=f"one of {', '.join(get_args(Backend))}, or none")
    if backend == "mpi":
        load()
    if backend == "nccl" and not dist.is_nccl_available():
        raise UsageError("backend 'nccl': this torch was built without NCCL", hint="install torch for CUDA")


def group_store() -> Store:
    """The store of the process group that this process is in."""
    return _joined[0].store if _joined else dist.distributed_c10d._get_default_store()


def group_connections() -> Connections | None:
    """The connections of that group; None: it was not made here."""
    return _joined[0].connections if _joined else None


def leave_group() -> None:
    """Leave the group that `join_group` made, where the script has not; the run's store stays."""
    opened = _joined[0].connections
    if _joined.pop().group is dist.group.WORLD:
        dist.destroy_process_group()
    opened.hang_up()  # an exception on its way may hold a message that is still awaited, and that the connections
    opened.close()


def farewell() -> Callable[[], None]:
    """What each rank calls once it has left the group for good: the one that hosts the store stays until all have."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return functools.partial(take_leave, group_store(), ranks, stays=rank == 0, limit_s=_FAREWELL_S)


def all_gather(kind: Any, value: T) -> list[T]:
    """Every rank's `value`, in their order, on every rank: JSON in tensors. All ranks call this at the same time.

    Raises:
        RuntimeError: a rank is gone, in torch's words.
        WorkerError: a rank has sent something else.
    """
    mine = torch.frombuffer(bytearray(json.dumps(encode(value)).encode()), dtype=torch.uint8)
    sizes = _gathered(torch.tensor([len(mine)], device="cpu"))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(mine)] = mine
    texts = [text[: int(size)] for text, size in zip(_gathered(padded), sizes, strict=True)]
    return [_read(kind, bytes(text.tolist()), rank) for rank, text in enumerate(texts)]


def _gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def _read(kind: Any, text: bytes, rank: int) -> Any:
    try:
        return decode(kind, json.loads(text))
    except (ValueError, RecursionError, FormatError) as error:
        raise WorkerError(
            f"worker:{rank} has told something else than was asked for ({type(error).__name__})",
            hint="all hosts run one release of assigner",
        ) from error
