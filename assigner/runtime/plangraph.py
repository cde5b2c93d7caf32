"""The partitions that a plan speaks of, found in the workload's model."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner import formatting as fmt
from assigner.errors import FormatError, MarkingError, UsageError
from assigner.machine.generators import kept_python
from assigner.model.deferred import DeferredModel
from assigner.model.deferred.mutation import storage_of
from assigner.model.deferred.origins import digest, named, own_code, python_release
from assigner.model.marking import PartitionGraph, partition_graph
from assigner.model.marking.cut import check_mode
from assigner.model.marking.domain import input_key
from assigner.model.marking.rows import EXAMPLE_ROWS
from assigner.model.workload import Workload, call_arguments, entry_settings
from assigner.runtime.batch.recurrence import check_carried
from assigner.runtime.stages.replicas import check_shared, obstacles
from assigner.runtime.step.loss import check_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.runtime.ranks.membership import Membership


_DRAWN = (("Python's generator", "random.seed(...)"), ("NumPy's generator", "numpy.random.seed(...)"))
_OF_A_SET = (
    "the order of a set is another one in each process: go over sorted(...) of it, or a list; of texts, ranks that are"
    " started with the same PYTHONHASHSEED, as by assigner run, have the same one"
)


def check_workload(workload: Any) -> None:
    """Raise UsageError where it is no Workload, but the model or the name of a workload's file."""
    if not isinstance(workload, Workload):
        raise UsageError(
            f"a pipeline is made of a workload and a plan, and the workload is of type {type(workload).__name__}",
            hint="assigner.load_workload(plan.workload.entry), or the assigner.Workload that your function returns",
        )


def plan_graph(workload: Workload, plan: Plan, known: PartitionGraph | None = None) -> PartitionGraph:
    """The partitions of a plan's model, found again from the workload.

    Raises:
        FormatError: the plan is for another model.
        MarkingError: the forward of the plan's model fails where it is followed.
        UsageError: its schedule cannot have the workload's loss, it cuts batches finer than the workload allows, the
            model lacks what the workload carries, workers share a stage that cannot be shared, or two workers would
            each have a part of one memory.
    """
    graph = known if known is not None and _fits(plan, known) else _found(workload, plan)
    check_mode(workload, graph.deferred)
    check_carried(workload, graph)
    if plan.is_replicated:
        check_shared(plan, obstacles(workload, graph))
    check_schedule(workload, plan, graph)
    _check_storages(plan, graph)
    obstacle = workload.fineness.obstacle(plan.micro_batches, plan.workload.batch_size)
    if obstacle is not None:
        raise UsageError(
            f"the plan cuts a batch into {fmt.plural(plan.micro_batches, 'micro-batch')}, and {obstacle}",
            hint="profile this workload and solve again: plans keep to what it allows",
        )
    return graph


def _check_storages(plan: Plan, graph: PartitionGraph) -> None:
    """Two tensors of the model that lie in one memory must be on one worker.

    Elsewhere, what is written to one of them the other would not have. One tensor under two names is kept alike.
    """
    tensors, first = graph.deferred.tensors(), dict[int, tuple[str, str]]()
    for piece in graph.pieces:
        for name in (each for each in piece.state if each in tensors):
            other, holder = first.setdefault(storage_of(tensors[name]), (name, piece.name))
            if tensors[other] is tensors[name] or plan.holders[holder] == plan.holders[piece.name]:
                continue
            raise UsageError(
                f"{other!r} and {name!r} lie in one memory, and the plan has them on {', '.join(plan.holders[holder])}"
                f" and {', '.join(plan.holders[piece.name])}",
                hint="give each a memory of its own (clone), or keep their partitions on one worker:"
                f" assigner solve --together {holder},{piece.name}",
            )


def _found(workload: Workload, plan: Plan) -> PartitionGraph:
    with kept_python():  # the builder is called once more below, and draws the same then
        names = {name for name, _ in DeferredModel(workload.model, seed=workload.seed).model.named_modules()}
    found = [name for name in plan.partitions if name in names]
    try:
        graph = partition_graph(workload, found)
        if _fits(plan, graph):
            return graph
        detail = _difference(plan, graph)
    except MarkingError as error:
        _check_inputs(workload, plan)
        if plan.workload.inputs and found == list(plan.partitions) and not _changed(workload, plan):
            raise  # names, inputs and settings are the plan's: nothing says that the model is another one
        detail = error.message if found or not workload.marks else _difference(plan, partition_graph(workload))
    _check_inputs(workload, plan)
    again = (
        "profile this workload and solve again; if that does not help, each process has a graph of its own, by the"
        " order of a set (sorted(...) is the same; or set one PYTHONHASHSEED for profile and run), or by a builder that"
        " draws from a generator which nobody seeds"
    )
    is_other = _is_other(workload, plan)
    named = f" of {workload.name!r}" if is_other else ""
    raise FormatError(
        f"the plan is for workload {plan.workload.name!r}, and this model{named} is another one: {detail}"
        f"{_changed(workload, plan)}",
        hint="give a plan that was solved for it" if is_other else again,
    )


def _is_other(workload: Workload, plan: Plan) -> bool:
    """Whether the workload has a name, and the plan is of another one."""
    return workload.name not in ("", plan.workload.name)


def _changed(workload: Workload, plan: Plan) -> str:
    """Which settings of the workload are others than the plan's entry gives, where that is known."""
    try:
        then = entry_settings(plan.workload.entry) if workload.settings else {}
    except UsageError:  # the entry's file is not here, or another one by now
        return ""
    pairs = [(key, then[key], now) for key, now in workload.settings.items() if key in then]
    changed = [f"{key}={now!r} in place of {was!r}" for key, was, now in pairs if repr(was) != repr(now)]
    return f"; it was made with {', '.join(changed)}" if changed else ""


def check_alike(workload: Workload, graph: PartitionGraph, member: Membership, given: Mapping[str, Any]) -> None:
    """Each rank has its own part of one model, and trains it as the others do. All ranks call it together.

    Raises:
        UsageError: another rank makes the pipeline in another way, or runs other code of the user's own; its builder
            draws from other seeds, or makes the model of other numbers or in another order; or a forward there runs its
            operations in another order.
    """
    if member.transport is None:
        return
    settings = {f"Pipeline({name}=...)": each for name, each in given.items()} | {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "Workload.reduction": workload.reduction,
        "Workload.loss_over": workload.loss_over,
        "Workload.autocast": workload.autocast,
        "Workload.loss": named(workload.loss),
        "Workload.weight": named(workload.weight),
        "Workload.metrics": sorted((name, named(each)) for name, each in (workload.metrics or {}).items()),
    }
    numbers = [digest([str(each)]) for each in settings.values()]
    rank, what = _first_unlike(member.numbers_of_all(numbers))
    if rank is not None:
        raise UsageError(
            f"{list(settings)[what]} is another on worker:{rank} than on worker:0",
            hint="have all ranks make the pipeline in the same way, of the same workload; where a loss depends on the"
            " device, let one function choose, by its outputs' device",
        )
    _check_origins(graph, member)
    _check_code(workload, graph, member)


def _check_origins(graph: PartitionGraph, member: Membership) -> None:
    """All parts of the model are from one builder's draws and numbers."""
    mine = graph.deferred.origins
    ordered = {f"the model's builder has the texts or names of {name}": each for name, each in mine.texts.items()} | {
        f"the forward of {name} has its operations": each for name, each in graph.order.items()
    }
    numbers = [*mine.numbers, digest(map(str, ordered.items()))]
    told = member.numbers_of_all(numbers)
    rank, what = _first_unlike(told)
    if rank is None:
        return
    where = f"on worker:{rank} than on worker:0: their parts would be of two models"
    if what == 0:
        raise UsageError(
            f"the model's builder draws from other seeds {where}",
            hint="seed by nothing that differs between ranks (a rank's number, the time), in Workload(seed=...) too",
        )
    if what < len(_DRAWN) + 1:
        generator, seed = _DRAWN[what - 1]
        raise UsageError(
            f"the model's builder draws from {generator}, which has another state {where}",
            hint=f"{seed} before the model is made, with the same number on every rank: nothing else seeds it",
        )
    if what == len(numbers) - 1:
        _check_ordered(ordered, member)
        return
    names = list(mine.values)
    rank, what = _first_unlike(member.told(mine.placed))
    name = names[what] if rank is not None and what < len(names) else "something"
    raise UsageError(
        f"the model's builder makes {name} of other numbers {where}",
        hint="make it of nothing that differs between ranks: a generator that nobody seeds, the order of a set, the"
        " number of a rank; seed (torch.manual_seed) what is made before the builder runs, or load the same into it",
    )


def _check_code(workload: Workload, graph: PartitionGraph, member: Membership) -> None:
    """The user's own code is the same on all ranks, as far as the model and what is beside it run it.

    What is there on one rank alone, as a hook, is none of the others' business.

    Raises:
        UsageError: a function or a method is another one on another rank of the same release of Python.
    """
    beside = workload.model, workload.loss, workload.weight, workload.optimizer, *(workload.metrics or {}).values()
    mine = own_code(beside, graph.deferred.model)
    numbers = python_release(), digest([json.dumps(mine)])
    told = member.numbers_of_all(numbers)
    release, first = told[0]
    unlike = [rank for rank, (their_release, theirs) in enumerate(told) if their_release == release and theirs != first]
    every = member.told(mine) if unlike else []  # all ranks come here alike
    for rank in unlike:
        ours, other = every[0], every[rank]
        for name in sorted(ours.keys() & other.keys()):
            if not ({*ours[name]} <= {*other[name]} or {*other[name]} <= {*ours[name]}):
                raise UsageError(
                    f"{name} has other code on worker:{rank} than on worker:0: their parts would be of two models",
                    hint="have the same files on every host, and start the ranks anew",
                )


def _check_ordered(mine: Mapping[str, tuple[int, int]], member: Membership) -> None:
    """The same texts, or operations, follow each other alike on all ranks; others are none of anybody's business.

    Of each place, in words, it is given what is there, and how that is ordered.
    """
    places = {digest([f"{place}: {what}"]): place for place, (what, _) in mine.items()}
    pairs = zip(places, (how for _, how in mine.values()), strict=True)
    known: dict[int, int] = {}
    for rank, numbers in enumerate(member.told([each for pair in pairs for each in pair])):
        for what, how in zip(numbers[::2], numbers[1::2], strict=True):
            if known.setdefault(what, how) != how:
                raise UsageError(
                    f"{places.get(what, 'a list, a dict or a forward has what is in it')} in another order on"
                    f" worker:{rank} than on others: their parts would be of two models",
                    hint=_OF_A_SET,
                )


def _first_unlike(told: Sequence[Sequence[float]]) -> tuple[int | None, int]:
    """The first number in which a rank differs from the first rank, and that rank; None: there is none."""
    for n, column in enumerate(itertools.zip_longest(*told, fillvalue=0.0)):
        for rank, each in enumerate(column):
            if each != column[0]:
                return rank, n
    return None, 0


def _check_inputs(workload: Workload, plan: Plan) -> None:
    """The model has the inputs that it was profiled with.

    Raises:
        FormatError: it has others, so that nothing can be said of the model itself.
    """
    inputs, _ = workload.make_batch(EXAMPLE_ROWS, workload.seed)
    leaves, structure = pytree.tree_flatten(call_arguments(inputs))
    now = input_key(structure, leaves).noted
    if not plan.workload.inputs or now == plan.workload.inputs:
        return
    this = f", and this workload is {workload.name!r}" if _is_other(workload, plan) else ""
    raise FormatError(
        f"the plan is for workload {plan.workload.name!r}{this} with other inputs: for {EXAMPLE_ROWS} rows the plan's"
        f" batches had ({plan.workload.inputs}), and Workload.batch gives ({now}){_changed(workload, plan)}",
        hint="give a plan that was solved for it"
        if _is_other(workload, plan)
        else "give Workload.batch's inputs the types and shapes that were profiled; or profile and solve again",
    )


def _difference(plan: Plan, graph: PartitionGraph) -> str:
    strange = set(graph.piece) ^ set(plan.partitions)
    if strange:
        return f"partition {min(strange)!r} is in only one of the two"
    return "shapes, edges, autocast or a setting of a module (a dropout's share, ...) differ"


def _fits(plan: Plan, graph: PartitionGraph) -> bool:
    """The names are compared as well: a plan may have been edited by hand."""
    return graph.fingerprint == plan.workload.fingerprint and set(graph.piece) == set(plan.partitions)
