"""One case under one setting against plain torch: equal, refused, foreign or different."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from drawn_orders import with_drawn_order
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from assigner import AssignerError, Pipeline
from assigner.formats.fineness import micro_batch_count
from assigner.formats.graph import topological_order
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Replica, Stage
from assigner.model.marking import PartitionGraph, partition_graph
from assigner.model.workload import Workload, call_arguments
from assigner.runtime.batch.microbatch import Cutting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foreign.case import Case, Loop

RAGGED = (8, 8, 5)
"""Rows of the three training batches; the last is ragged."""
EVALUATED = 6
WORST = ("equal", "refused", "foreign", "different", "broken")
"""Verdicts, better ones first. foreign: an exception that is no AssignerError; broken: plain torch fails itself."""
REMEMBERING = ("python_state", "randomness")
"""Modules of the list whose models count calls, or draw, in Python objects."""
REMAT = {"none": "never", "half": "plan", "all": "always"}


@dataclass(frozen=True)
class Setting:
    """How a case is run.

    Args:
        ranks: Over how many workers its partitions are spread.
        micro_batches: Of a step.
        remat: "none", "half" (every second partition) or "all".
        devices: Of the ranks in their order, with commas between; the last one is also that of those left.
            Plain torch trains on the first.
        plan: One of PLANS.
    """

    ranks: int = 1
    micro_batches: int = 1
    remat: str = "none"
    devices: str = "cpu"
    plan: str = "equal"

    def device(self, rank: int) -> str:
        """That of a rank."""
        return (self.devices.split(",") + [self.devices.rpartition(",")[2]] * rank)[rank]

    def __str__(self) -> str:
        where = "" if self.devices == "cpu" else f", on {self.devices}"
        return f"{self.ranks} ranks, {self.micro_batches} micro-batches, remat {self.remat}, {self.plan} plan{where}"


@dataclass(frozen=True)
class Verdict:
    """What a setting gave.

    Args:
        kind: One of WORST.
        words: The error's, or what differs first.
        inherent: Plain torch over the micro-batches differs from plain torch over the whole batch, where that was seen.
        lost: Names of state that plain training changed, and that this rank does not hold.
    """

    kind: str
    words: str = ""
    inherent: bool = False
    lost: tuple[str, ...] = ()

    def worse(self, other: Verdict) -> Verdict:
        """The worse of two ranks' verdicts; lost is what neither holds."""
        first, second = sorted((self, other), key=lambda each: -WORST.index(each.kind))
        lost = tuple(name for name in first.lost if name in second.lost)
        return replace(first, inherent=first.inherent or second.inherent, lost=lost)

    def settled(self) -> Verdict:
        """With all ranks' verdicts in it: state that none of them holds is a difference."""
        if self.kind == "equal" and self.lost:
            return replace(self, kind="different", words=f"no rank has {', '.join(self.lost)}")
        return self


@dataclass
class Record:
    """A training: losses, gradients and state after each step, and the loss in eval mode."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor | None]]
    states: list[dict[str, torch.Tensor]]
    evaluated: float = math.nan
    moved: frozenset[str] = frozenset()
    """Names of the state that training changed; of a shared tensor the first one."""
    modes_alike: bool = False
    """In eval mode the forward does what it does in training, operation by operation."""


def seeded(number: int) -> None:
    """The same state of every global generator before a step, for both sides."""
    random.seed(number)
    np.random.seed(number)  # the global state that models draw from
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes a stack for each kind of GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def put(batch: Any, device: str) -> Any:
    """A batch on a device; where it lies there, itself: its input may be its target, too."""
    if device == "cpu":
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), batch)


def call(model: torch.nn.Module, inputs: Any) -> Any:
    args, kwargs = call_arguments(inputs)
    return model(*args, **kwargs)


def pieces(made: Workload, batch: Any, micro_batches: int) -> Iterator[tuple[Any, Any, float]]:
    """(args and kwargs, targets, weight) of each micro-batch, as the runtime cuts them; of one: the batch as it is."""
    inputs = call_arguments(batch[0])
    if micro_batches == 1:
        yield inputs, batch[1], 1.0
        return
    cutting = Cutting(made)
    planned = -(-made.batch_size // micro_batches)
    count = micro_batch_count(cutting.row_count(batch[0]), micro_batches, planned)
    for cut in cutting.split(batch, count):
        yield pytree.tree_unflatten(cut.inputs, cut.structure), cut.targets, cut.weight


class Operations(TorchDispatchMode):
    """What is computed, one operation after another."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func)
        return func(*args, **(kwargs or {}))


def modes_alike(model: torch.nn.Module, made: Workload, batch: Any) -> bool:
    """Whether a forward computes the same in both modes, to the last bit; False where that cannot be seen."""
    found = []
    try:
        for training in (False, True):
            model.train(training)
            seeded(len(RAGGED))
            with torch.no_grad(), Operations() as operations:
                loss = float(made.compute_loss(call(model, batch[0]), batch[1]))
            found.append((operations.found, loss))
    except Exception:  # noqa: BLE001 - a model may have its own way with such modes
        torch._dynamo.reset()  # torch.cond's graph, whose compiling has failed, would fail ever after
        return False
    return found[0] == found[1]


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and what else belongs to its state, by the names under which they lie, whatever it calls them."""
    found: dict[str, torch.Tensor] = dict(torch.nn.Module.named_parameters(model, remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, each in module._buffers.items():
            if each is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}".lstrip(".")] = each
    return found


def plain(made: Workload, micro_batches: int, loop: Loop | None = None, device: str = "cpu") -> Record:
    """The same training in plain torch, its micro-batches one after another."""
    torch.manual_seed(made.seed)
    model = made.model()
    if device != "cpu":
        shared = len({*map(id, model.state_dict(keep_vars=True).values())})
        if len({*map(id, model.to(device).state_dict(keep_vars=True).values())}) != shared:
            raise ValueError("Module.to parts buffers that were one")
    optimizer = made.make_optimizer(model.named_parameters())
    if any(type(each).train is not torch.nn.Module.train for each in model.modules()):
        model.train()  # a loop's own call; it changes nothing for other models
    record = Record([], [], [])
    firsts = {id(each): name for name, each in reversed(held(model).items())}
    start = {name: each.detach().clone() for name, each in held(model).items()}
    for n, rows in enumerate(RAGGED):
        batch = put(made.make_batch(rows, n), device)
        if loop is not None:
            loop(n, dict(model.named_parameters()), optimizer)
        seeded(n)
        for _, each in torch.nn.Module.named_parameters(model):
            each.grad = None
        total = 0.0
        for (args, kwargs), targets, weight in pieces(made, batch, micro_batches):
            loss = made.compute_loss(model(*args, **kwargs), targets) * weight
            loss.backward()
            total += loss.item()
        optimizer.step()
        grads = {name: each.grad for name, each in torch.nn.Module.named_parameters(model, remove_duplicate=False)}
        record.gradients.append({name: None if each is None else each.clone() for name, each in grads.items()})
        record.losses.append(total)
        record.states.append({name: each.detach().clone() for name, each in held(model).items()})
    record.moved = frozenset(name for name in firsts.values() if distance(record.states[-1][name], start.get(name)))
    model.eval()
    seeded(len(RAGGED))
    with torch.no_grad():
        cut = pieces(made, put(made.make_batch(EVALUATED, 99), device), micro_batches)
        record.evaluated = sum(
            float(made.compute_loss(model(*args, **kwargs), targets)) * weight
            for (args, kwargs), targets, weight in cut
        )
    record.modes_alike = modes_alike(model, made, put(made.make_batch(EVALUATED, 99), device))
    return record


def planned(made: Workload, graph: PartitionGraph, setting: Setting, case: Case) -> Plan:
    """A setting's plan; every second partition rematerialises."""
    names = [piece.name for piece in graph.pieces]
    rng = random.Random(f"{case.name} {setting}")
    stages = PLANS[setting.plan](graph, setting, rng, shares=not case.inherent)
    plan = Plan(
        workload=WorkloadReference(made.name, batch_size=made.batch_size, fingerprint=graph.fingerprint),
        micro_batches=setting.micro_batches,
        micro_batch_size=-(-made.batch_size // setting.micro_batches),
        stages=tuple(
            replace(each, rematerialise=tuple(name for name in each.partitions if names.index(name) % 2 == 0))
            for each in stages
        ),
    )
    return plan if setting.plan == "equal" else with_drawn_order(plan, graph.edges, rng, halves=rng.random() < 0.5)


def equal_stages(graph: PartitionGraph, setting: Setting, rng: random.Random, *, shares: bool) -> list[Stage]:
    """Partitions in their order, as many on each rank."""
    names = [piece.name for piece in graph.pieces]
    bounds = [round(n * len(names) / setting.ranks) for n in range(setting.ranks + 1)]
    held = [tuple(names[a:b]) for a, b in itertools.pairwise(bounds)]
    return [Stage(f"worker:{n}/{setting.device(n)}", mine) for n, mine in enumerate(held) if mine]


def drawn_stages(graph: PartitionGraph, setting: Setting, rng: random.Random, *, shares: bool) -> list[Stage]:
    """Partitions in any order in which they can run, cut anywhere, on any ranks; some stages on several of them.

    Args:
        graph: The partitions.
        setting: How many ranks and micro-batches there are.
        rng: What draws.
        shares: Whether ranks may share a stage: batch statistics are then those of one run on one rank.
    """
    names = [piece.name for piece in graph.pieces]
    order = topological_order(rng.sample(names, len(names)), [(edge.source, edge.target) for edge in graph.edges])
    cuts = sorted(rng.sample(range(1, len(order)), rng.randint(0, min(4, len(order) - 1))))
    workers = [f"worker:{n}/{setting.device(n)}" for n in range(setting.ranks)]
    most = min(setting.ranks, setting.micro_batches) if shares else 1
    return [
        _drawn_stage(order[a:b], rng.sample(workers, rng.randint(1, most)), setting.micro_batches, rng)
        for a, b in itertools.pairwise([0, *cuts, len(order)])
    ]


def _drawn_stage(held: tuple[str, ...], workers: list[str], micro_batches: int, rng: random.Random) -> Stage:
    """With shares of any sizes; the workers update all of it, or divide that."""
    if len(workers) == 1:
        return Stage(workers[0], held)
    cuts = sorted(rng.sample(range(1, micro_batches), len(workers) - 1))
    counts = [b - a for a, b in itertools.pairwise([0, *cuts, micro_batches])]
    updater = {name: rng.choice(workers) for name in held}
    updates = [tuple(name for name in held if updater[name] == each) for each in workers]
    divides = rng.random() < 0.5
    return Stage(
        None, held, replicas=tuple(
            Replica(*each, updates=mine if divides else None)
            for *each, mine in zip(workers, counts, updates, strict=True)
        ),
    )  # fmt: skip


PLANS = {"equal": equal_stages, "drawn": drawn_stages}
"""How partitions lie on ranks; those of `drawn` have an order drawn for them, too."""
PLACES = {"equal": "", "drawn": "micro-batches alone|another (worker holds|stage of its worker has) too"}
"""What these may be refused for, where a plan with other places would not be: a regular expression."""


def distance(mine: Any, theirs: Any) -> float:
    """Relative; infinite where one is missing, of another shape, or nan or infinite elsewhere than the other."""
    if mine is None or theirs is None:
        return 0.0 if mine is theirs else math.inf
    kept = torch.float64  # Python's numbers are, and would be read as torch's default type
    mine, theirs = (
        torch.as_tensor(each, dtype=kept if isinstance(each, float) else None).detach().cpu() for each in (mine, theirs)
    )
    if mine.shape != theirs.shape:
        return math.inf
    if not mine.numel():
        return 0.0
    mine, theirs = (each.to_dense() if each.layout is not torch.strided else each for each in (mine, theirs))
    mine, theirs = (each.to(torch.complex128) for each in (mine, theirs))
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())  # what plain torch makes nan or infinite must be that
    off = float((mine - theirs).masked_fill(same, 0.0).abs().max())
    largest = float(theirs.abs().nan_to_num(0.0, 0.0).max())
    return off / max(1.0, largest) if math.isfinite(off) else math.inf


def first_difference(
    pipeline: Pipeline, made: Workload, record: Record, case: Case, *, evaluates: bool
) -> Iterator[str]:
    """What differs, step by step, and then in eval mode."""
    for n, rows in enumerate(RAGGED):
        batch = made.make_batch(rows, n)
        if case.loop is not None:
            case.loop(n, dict(pipeline.named_parameters()), pipeline.optimizer)
        seeded(n)
        loss = pipeline.step(batch)
        if case.random:
            if not math.isfinite(loss):
                yield f"step {n}: the loss is {loss}"
            continue
        if distance(loss, record.losses[n]) > case.tolerance:
            yield f"step {n}: loss {loss:.12g}, plain {record.losses[n]:.12g}"
        gradients = pipeline.gradients()
        for name, parameter in pipeline.named_parameters():
            off = distance(gradients.get(name), record.gradients[n].get(name))
            if off > case.tolerance and parameter.requires_grad:
                yield f"step {n}: gradient of {name} is {off:.2g} off"
        for name, tensor in pipeline.state_dict().items():
            if name in record.states[n] and (off := distance(tensor, record.states[n][name])) > case.tolerance:
                yield f"step {n}: {name} is {off:.2g} off"
    if not evaluates:
        return
    seeded(len(RAGGED))
    evaluated = pipeline.evaluate(made.make_batch(EVALUATED, 99))
    if not case.random and distance(evaluated, record.evaluated) > case.tolerance:
        yield f"eval: loss {evaluated:.12g}, plain {record.evaluated:.12g}"


def told(error: BaseException) -> str:
    words = f"{type(error).__name__}: {error}"
    hint = getattr(error, "hint", None)
    return f"{words} | {hint}" if hint else words


class Judge:
    """All settings of one case; its partitions are found once, unless Python objects of the model remember runs.

    Args:
        case: The case.
        timeout_s: How long a rank waits for another one in the pipeline.
        spares: It is evaluated only where that is something else than training: it takes a capture of its own.
        tells: Verdicts say whether plain torch over micro-batches differs, also of a case that declares it equal.
    """

    def __init__(self, case: Case, timeout_s: float = 30.0, *, spares: bool = False, tells: bool = False) -> None:
        self.case, self._spares, self._tells = case, spares, tells
        self._timeout_s = timeout_s
        self._found: tuple[Workload, PartitionGraph] | None = None
        self._refused: AssignerError | None = None
        self._records: dict[tuple[int, str], Record] = {}

    def _record(self, micro_batches: int, device: str) -> Record:
        if (micro_batches, device) not in self._records:
            self._records[micro_batches, device] = plain(self.case.make(), micro_batches, self.case.loop, device)
        return self._records[micro_batches, device]

    def _partitions(self) -> tuple[Workload, PartitionGraph]:
        """A workload with the graph of its own model: a loss may close over what the builder made."""
        if self._refused is not None:
            raise self._refused
        if self._found is None or self.case.group in REMEMBERING:
            made = self.case.make()
            try:
                self._found = made, partition_graph(made)
            except AssignerError as error:
                self._refused = error
                raise
        return self._found

    def verdict(self, setting: Setting) -> Verdict:
        """What a setting gives on this rank."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._verdict(setting)

    def _verdict(self, setting: Setting) -> Verdict:
        try:
            whole = self._record(1, setting.device(0))
        except Exception as error:  # noqa: BLE001 - a case that plain torch cannot train is no case
            return Verdict("broken", told(error))
        inherent, lost, found = False, (), ""
        try:
            record = whole
            if setting.micro_batches > 1 and (self.case.inherent or self._tells):
                record = self._record(setting.micro_batches, setting.device(0))
                inherent = not self.case.random and unlike(record, whole, self.case.tolerance)
                if not self.case.inherent:
                    record = whole
            made, graph = self._partitions()
            plan = planned(made, graph, setting, self.case)
            moved = "micro_batch" if self.case.inherent else "deferred"
            with Pipeline(
                made, plan, remat=REMAT[setting.remat], graph=graph, batch_norm=moved, timeout_s=self._timeout_s
            ) as pipeline:
                lost = tuple(sorted(record.moved - set(pipeline.state_dict())))
                evaluates = not (self._spares and whole.modes_alike)
                all_found = [*first_difference(pipeline, made, record, self.case, evaluates=evaluates)]  # ranks go on
                found = next(iter(all_found), "")
        except AssignerError as error:
            return Verdict("refused", told(error), inherent)
        except Exception as error:  # noqa: BLE001 - what comes out raw is the finding
            return Verdict("foreign", told(error), inherent)
        return Verdict("different" if found else "equal", found, inherent, lost)


def unlike(record: Record, whole: Record, tolerance: float) -> bool:
    """Whether two plain trainings differ."""
    pairs = [*zip(record.losses, whole.losses, strict=True), (record.evaluated, whole.evaluated)]
    for mine, theirs in zip(record.states, whole.states, strict=True):
        pairs += [(mine[name], theirs[name]) for name in theirs]
    return any(distance(mine, theirs) > tolerance for mine, theirs in pairs)
