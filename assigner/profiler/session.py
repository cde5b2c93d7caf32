"""One profiling run: every rank measures its worker and its links, rank 0 puts the profile together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map_only

from assigner.errors import AssignerError, MeasurementError, UsageError
from assigner.files import refuse_existing
from assigner.formats.fineness import ANY
from assigner.formats.merging import check_same_workload, merged
from assigner.formats.profile import Profile, load_profile, save_profile
from assigner.launch.limitedstore import StoreSilentError
from assigner.machine.launchedrank import launched
from assigner.model.marking.modules import TOO_FEW_VALUES, batch_norms
from assigner.model.workload import call_arguments
from assigner.profiler.assembly import RankReport, assemble, renew, verified, workload_reference
from assigner.profiler.options import Selection
from assigner.profiler.rank import RankSession
from assigner.profiler.rankprogress import OTHERS, Exchange, Heartbeat
from assigner.profiler.tasks import RefusedError, Start, describe
from assigner.runtime.failures.failure import FailureWatch
from assigner.runtime.forward.randomness import kept_generators
from assigner.runtime.messages.rendezvous import (
    check_backend,
    farewell,
    group_connections,
    group_store,
    join_group,
    leave_group,
)
from assigner.runtime.messages.sending import LostConnectionError
from assigner.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from assigner.formats.fineness import Fineness
    from assigner.formats.profile import Verification
    from assigner.launch.sockets import Connections
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload
    from assigner.profiler.options import ProfileDestination, ProfileOptions
    from assigner.profiler.rankprogress import RankProgress

_count = itertools.count()  # the n-th run of every rank is the same one


def default_micro_batches(batch_size: int, fineness: Fineness = ANY) -> tuple[int, ...]:
    """The sizes of 16 and 4 micro-batches and the whole batch, as near as the batch size has divisors.

    So plans lie between what is measured. Beyond it lines go wrong, those of the bytes that a heap takes beside its
    tensors most: these grow with rows far more slowly than in proportion (measured on a ResNet of 32 rows, in one
    micro-batch: 59 % too high from 2, 4 and 8 rows, 2 % too low from 2, 8 and 32).
    """
    most = fineness.most(batch_size)
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0 and batch_size // size <= most]
    sizes = {min(divisors, key=lambda size: abs(size - batch_size / count)) for count in (16, 4, 1)}
    return tuple(sorted(sizes))


def check_sizes(workload: Workload, sizes: Iterable[int]) -> None:
    """Refuse micro-batch sizes that no plan for the workload may use.

    Raises:
        UsageError: naming the first one.
    """
    batch = workload.batch_size
    for size in sizes:
        if size > batch:
            raise UsageError(
                f"micro-batch size {size}: Workload.batch_size is {batch}, and no micro-batch of it has more rows",
                hint=f"1 to {batch}; where plans are to have larger batches, say so by Workload.batch_size",
            )
        obstacle = workload.fineness.obstacle(max(1, batch // size), batch)
        if obstacle is not None:
            least = -(-batch // workload.fineness.most(batch))
            raise UsageError(
                f"micro-batch size {size}: no plan uses it: {obstacle}", hint=f"{least} is the smallest that is allowed"
            )


def without_single_rows(workload: Workload, graph: PartitionGraph) -> Workload:
    """The workload with `min_rows=2` where its BatchNorm has one value of a channel in one row; else as it is.

    The model is called on one row without memory; one that fails of anything else there is not asked.
    """
    norms = batch_norms(graph.deferred.model)
    if norms is None or workload.fineness.most(workload.batch_size) < workload.batch_size:
        return workload
    try:
        args, kwargs = call_arguments(workload.make_batch(1, workload.seed)[0])
        args, kwargs = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (args, kwargs))
        with graph.deferred.mode(training=True), torch.no_grad():
            graph.deferred.model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - of the user's code
        if TOO_FEW_VALUES in str(error):
            return replace(workload, min_rows=2)
    return workload


def profile_workload(
    workload: Workload,
    entry: str,
    options: ProfileOptions,
    *,
    output: ProfileDestination | None = None,
    progress: Callable[[RankProgress], None] | None = None,
    verification: Verification | None = None,
) -> Profile | None:
    """Measure a workload. Every rank of the run calls this; the process group is made here and left again.

    Weights, gradients and buffers of a model that the builder hands out, random generators and torch's settings are as
    before when it returns. On rank 0 `progress` is called with where the slowest rank stands, and `verification` is how
    the partitions were compared with the model; None: they were not, and a profile that is updated keeps what it has.

    Returns:
        The profile on rank 0, None elsewhere.

    Raises:
        MarkingError: the model cannot be cut.
        FormatError: a file that the run starts from belongs to something else.
        MeasurementError: a rank was lost, or its machine is too busy to measure anything there.
    """
    place = launched()
    if place is None:
        raise UsageError("this process was started alone", hint="assigner profile starts the ranks; torchrun does, too")
    check_backend(options.backend)
    join_group(place, options.timeout_s)
    rank, goodbye = dist.get_rank(), farewell()
    jobs, name = group_store(), f"profile {next(_count)}"
    worker, ranks = f"worker:{rank}", dist.get_world_size()
    table, beats = (
        Exchange(PrefixStore(name, each), rank, ranks, timeout_s=options.timeout_s)
        for each in (jobs, jobs.clone())  # type: ignore[attr-defined]  # calls on one wait for each other
    )
    connections = group_connections()
    own = PrefixStore(name, jobs.clone())  # type: ignore[attr-defined]
    watch = FailureWatch(own, worker, ranks=ranks, connections=connections, exit_code=MeasurementError.exit_code)
    heart = Heartbeat(beats, lambda lost, why: watch.accuse(f"worker:{lost}", why), watch.vouched)
    table.watch, watch.doing = watch, lambda: (table.at, table.awaited)
    table.why_lost = functools.partial(_why_lost, heart, connections)
    table.begin("the start")
    try:
        with process_state_kept():
            session = RankSession(workload, entry, options, table, progress or (lambda _: None))
            session.workload = without_single_rows(workload, session.graph)
            if session.workload is not workload and output is not None and rank == 0:
                output.notice(
                    "micro-batches of one row are neither measured nor planned, as with Workload.min_rows=2: one row"
                    " has one value of each channel, which BatchNorm cannot normalise"
                )
            profile = _measure(session, output, verification)
            for each in (watch, heart, table):
                each.close()
            goodbye()  # the rank that hosts the run's store stays until nobody looks into it
            return profile
    except (RefusedError, KeyboardInterrupt):
        watch.close()  # it would meet a store that has gone
        raise  # every rank does
    except Exception as error:
        at = table.at
        # torch has no type for a broken gloo connection
        if "gloo" in str(error) or isinstance(error, DistError | LostConnectionError):
            found = watch.lost(_missed(error, table), at, error).to_error()
            raise MeasurementError(found.message, hint=found.hint) from error
        watch.report(at, error)
        with user_code(f"the measurement of {at}"):
            raise
    finally:
        for each in (heart, table):
            each.close()
        leave_group()
        watch.close()


def _missed(error: Exception, table: Exchange) -> str:
    """Whom a wait missed that has failed, in words."""
    if isinstance(error, StoreSilentError):
        return "the launcher" if os.environ.get("GROUP_WORLD_SIZE") == "1" else "worker:0"
    return error.peer if isinstance(error, LostConnectionError) else table.awaited or OTHERS


def _why_lost(heart: Heartbeat, connections: Connections | None, rank: int) -> str:
    """See `Exchange.why_lost`."""
    if why := heart.why_stopped(rank):
        return why
    return "Connection closed by peer" if connections is not None and connections.has_ended(rank) else ""


def _measure(
    session: RankSession, output: ProfileDestination | None, verification: Verification | None
) -> Profile | None:
    """Agree, measure, and on rank 0 put together and write."""
    start, old, others = _start(session, output) if session.rank == 0 else (Start(), None, ())
    session.agree(start, output)
    reports = session.table.to_first("reports", session.measure(), RankReport)
    profile = None
    if session.rank == 0:
        if old is not None:
            profile = renew(old, reports)
        else:
            reserve = session.options.reserved
            profile = assemble(session.workload, session.graph, reports, entry=session.entry, reserve=reserve)
        if verification is not None:
            profile = verified(profile, verification)
        if output is not None:
            if others:
                profile = merged([("this run", profile), *others])
            save_profile(profile, output.path, force=output.force or old is not None)
    session.meet()  # no journal goes before the profile is there
    session.journal.remove()
    return profile


_Others = tuple[tuple[str, Profile], ...]
"""Profiles that are added, with their files' names."""


def _start(session: RankSession, output: ProfileDestination | None) -> tuple[Start, Profile | None, _Others]:
    """On rank 0: what all ranks are to do, or why it cannot be; the profile that is updated, and those that are added.

    Of the first None: none is.
    """
    options = session.options
    start = Start(isolated=options.isolated, links=options.links, only=output.only if output else ())
    try:
        check_sizes(session.workload, options.micro_batches)
        old, others = _read(session, output) if output else (None, ())
    except AssignerError as error:
        return Start(refused=error.message, usage=isinstance(error, UsageError), hint=error.hint), None, ()
    sizes = options.micro_batches
    if old is None:
        sizes = sizes or default_micro_batches(session.workload.batch_size, session.workload.fineness)
    else:
        sizes = sizes or tuple(each.micro_batch for each in old.measurements)
        workers = tuple(describe(each.name, each.kind, each.threads) for each in old.workers)
        start = replace(start, workers=workers, updates=old.created_at)
    return replace(start, micro_batches=tuple(sorted(set(sizes)))), old, others


def _read(session: RankSession, output: ProfileDestination) -> tuple[Profile | None, _Others]:
    """The profiles that the run starts from, as `_start` gives them; they are of this workload."""
    here = workload_reference(session.workload, session.graph, session.entry)
    kinds = {piece.name: piece.kind for piece in session.graph.pieces}
    Selection(output.only).check([*kinds], session.table.ranks)
    if not output.only:
        refuse_existing(output.path, force=output.force, reads=output.others)
    others = tuple((str(path), load_profile(path)) for path in output.others)
    old = load_profile(output.path) if output.only else None
    for name, profile in (*others, *([(str(output.path), old)] if old else [])):
        check_same_workload(here, kinds, profile, names=("this run", name))
    return old, others


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Put back Python's, numpy's and torch's generators, the grad mode, the default dtype and the thread count.

    Profiling changes nothing; a model's builder and its batches are the user's code, and may draw from any generator.
    """
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    try:
        with kept_generators(torch.device("cpu"), draws=True):
            yield
    finally:
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
