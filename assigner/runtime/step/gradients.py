"""The gradients of a rank's parameters, and what is done with those of all ranks together.

A parameter that several workers hold has one gradient: the sum of what each of them adds, exchanged at the end of every
step's backwards, so that every holder has the whole of it whenever the training script looks. What earlier steps left
is set aside meanwhile, for it was summed then:

    step 1    a1 | b1  -> both a1 + b1
    step 2    a2 | b2  -> both (a1 + b1) + (a2 + b2)

The second sum is added into the tensor that holds the first, as a backward does: the script may have kept it.

Those of a stage that several workers share are added up by `reduction`, which begins while the step goes on; what
earlier steps left is set aside for it, too.

A hook on a parameter sees one gradient for each backward in plain PyTorch: that of the whole batch. Here it is taken
off while micro-batches add to the gradient, and called on the step's sum, h(a1 + b1) and then h(a2 + b2).

A step that fails leaves what it has found, as a plain forward that fails: a script on one rank may leave out its batch.
Where its backwards have added to gradients of steps before, these are no more to be had, and are not used either.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.model.deferred.likeness import check_no_late_hooks
from assigner.model.marking.marks import matches
from assigner.model.members import named_parameters
from assigner.model.singleprocess import as_single_process
from assigner.runtime.forward.randomness import partition_seed, seed_device, seed_python
from assigner.runtime.stages.reduction import Reduction, SharedStage
from assigner.runtime.stages.updaters import holders_of
from assigner.runtime.update.rankfactor import RankFactor
from assigner.schedule.replication import is_exchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set

    from torch import nn

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.step.executor import Executor
    from assigner.runtime.update.scaling import GradientScaling
    from assigner.schedule.program import Program


class Gradients:
    """The gradients of one rank.

    Attributes:
        reduction: Adds up those of stages that several workers share.
        factor: What a script multiplies all of them by.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        graph: PartitionGraph,
        plan: Plan,
        member: Membership,
        scaling: GradientScaling,
    ) -> None:
        self.parameters, self.scaling = parameters, scaling
        self._member, self._graph = member, graph
        self._tied = {
            n: tie.parameter
            for n, tie in enumerate(graph.ties)
            if is_exchanged(plan, tie) and tie.parameter in parameters
        }
        self._holders = holders_of(graph, plan)
        self._left_out: dict[tuple[str, ...], Set[str]] = {}
        self._wanted = {name: each.requires_grad for name, each in parameters.items()}
        self.reduction = Reduction(dict(self._reduced(graph, plan)))
        listed = {name: each for name, each in parameters.items() if name not in self._unlisted}
        self.factor = RankFactor(listed, member)
        self._hooks: dict[str, Any] = {}
        self._before: dict[str, tuple[torch.Tensor | None, int]] = {}  # with its count of changes
        self._apart: set[str] = set()  # of these, what is set aside
        self._is_spoilt = False
        self._applied: list[tuple[nn.Parameter, Callable[[], torch.Tensor | None], int]] = []

    def _reduced(self, graph: PartitionGraph, plan: Plan) -> Iterator[tuple[int, SharedStage]]:
        """What this rank shares of a stage with others, by the stage's number: of its partitions, what is their own."""
        for n, stage in enumerate(plan.stages):
            group = self._member.groups.get(stage.workers)
            if group is None:
                continue
            apart = set(self._tied.values())
            own: dict[str, dict[str, nn.Parameter]] = {}
            for partition in stage.partitions:
                names = [graph.canonical[each] for each in graph.piece[partition].parameters]
                own[partition] = {
                    name: self.parameters[name] for name in names if self._wanted.get(name) and name not in apart
                }
                apart.update(own[partition])
            yield n, (group, own)

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter, which others may hold too."""
        return self._holders[name][0] == self._member.worker

    def named(self) -> dict[str, torch.Tensor]:
        """Gradients by parameter name, without the loss's scale."""
        factor = self.scaling.carried
        found = {name: each.grad for name, each in self.parameters.items() if each.grad is not None}
        return found if factor == 1 else {name: gradient / factor for name, gradient in found.items()}

    def drop(self) -> None:
        """Have no gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def begin(self) -> None:
        """The backwards of a step will add to the gradients.

        Raises:
            UsageError: a parameter wants a gradient that did not when the model was captured; or it has a hook that
                cannot be called on a step's gradient; or an earlier step has failed with half of its gradients added to
                those that there are.
        """
        self.check_whole()
        self._applied = []
        self._wanting = {name: each.requires_grad for name, each in self.parameters.items()}
        for name, wants in self._wanting.items():  # what gets gradients between partitions was settled at the capture
            if wants and not self._wanted[name]:
                raise UsageError(
                    f"requires_grad of {name} is True now; the pipeline was made with False",
                    hint="build it trainable, and freeze it in the script until it shall train; or load a checkpoint"
                    " into the pipeline of a workload that trains it",
                )
        for name, parameter in self.parameters.items():
            check_no_late_hooks(name, parameter)
            if parameter._backward_hooks:
                self._hooks[name], parameter._backward_hooks = parameter._backward_hooks, None
        if self.scaling.scaler.is_enabled():
            self.scaling.begin(self._elements())
        self._before = {
            name: (each.grad, 0 if each.grad is None else each.grad._version) for name, each in self.parameters.items()
        }
        self._apart = {*self._tied.values(), *self.reduction.names, *self._hooks}
        for name in self._apart:
            self.parameters[name].grad = None

    def end(self, program: Program, executor: Executor, number: int) -> None:
        """The backwards of a step have added to the gradients: sum those that workers share, call hooks on the sums.

        Raises:
            UsageError: the step's forwards have changed what wants a gradient, or hooked on to a parameter.
        """
        for name, wants in self._wanting.items():
            if self.parameters[name].requires_grad != wants:
                raise UsageError(
                    f"a forward has changed requires_grad of {name}",
                    hint="decide in the model's builder or in the script's loop what is trained",
                )
        self._sum_shared(program, executor)
        executor.member.at = "the sum of the gradients of stages that several workers share"
        executor.member.before_sums()
        self.reduction.begin_rest(executor.recorder)
        self.reduction.end()
        executor.member.at = "the hooks on parameters"
        for name, parameter in self.parameters.items():
            if parameter._backward_hooks:
                raise UsageError(
                    f"a forward registers a hook on {name}: it would be called for every micro-batch",
                    hint="register it in the model's builder, once",
                )
        for name, hooks in self._hooks.items():
            parameter = self.parameters[name]
            parameter._backward_hooks = hooks
            if parameter.grad is not None:
                seed = partition_seed(executor.seed, number, name, -1)
                seed_device(seed, parameter.device)
                seed_python(seed)
                made = _hooked(parameter.grad, hooks.values())
                # a hook may have kept it, and what is kept of one step no later one adds to
                parameter.grad = made.clone() if self._before[name][0] is None else made
        for name in self._apart:
            parameter, (before, _) = self.parameters[name], self._before[name]
            if before is not None:
                parameter.grad = before if parameter.grad is None else _added(before, parameter.grad)
        self._hooks, self._before = {}, {}

    def forget(self) -> None:
        """Leave hooks and gradients as the step that has failed, if one has, has found them."""
        self.reduction.forget()
        for name, hooks in self._hooks.items():
            self.parameters[name]._backward_hooks = hooks
        for name, (gradient, version) in self._before.items():
            self.parameters[name].grad = gradient
            self._is_spoilt |= gradient is not None and gradient._version != version
        self._hooks, self._before = {}, {}

    def check_whole(self) -> None:
        """Refuse to go on with gradients to which a step that failed has added half of its own."""
        self._is_spoilt &= any(each.grad is not None for each in self.parameters.values())
        if self._is_spoilt:
            raise UsageError(
                "an earlier step failed when some of its micro-batches had added to the gradients of steps before it",
                hint="drop them (pipeline.optimizer.zero_grad()), and begin again with the first of these batches",
            )

    def _sum_shared(self, program: Program, executor: Executor) -> None:
        """A shared parameter's gradient is the sum over the holders that have one, in one order on all of them.

        It is dense: a holder cannot know whether the others' are sparse (`nn.Embedding(sparse=True)`).
        """
        shared = {n: self.parameters[name] for n, name in self._tied.items()}
        added = {n: each.grad.to_dense() for n, each in shared.items() if each.grad is not None}
        for n, parts in executor.messages.exchange_ties(program, shared, added, executor.recorder).items():
            alone = len(parts) == 1  # perhaps still on its way to others, and changed in place next
            shared[n].grad = (parts[0].clone() if alone else functools.reduce(torch.add, parts)) if parts else None

    @functools.cached_property
    def _unlisted(self) -> set[str]:
        """What the model's own `parameters()` leaves out: a script clips what that gives."""
        model = self._graph.deferred.model
        listed = {id(each) for each in model.parameters()}
        return {name for name, each in named_parameters(model, remove_duplicate=False) if id(each) not in listed}

    def left_out(self, names: Sequence[str] | None) -> Set[str]:
        """The parameters, by all ranks' names, that a clipping leaves as they are.

        Args:
            names: Of those that are clipped, or of modules that hold them; patterns. None: what the model itself lists.

        Raises:
            UsageError: a pattern fits none, or there is none.
        """
        if names is None:
            return self._unlisted
        if not (patterns := tuple(names)):
            raise UsageError("names is empty: nothing would be clipped", hint="leave it out to clip all gradients")
        if patterns not in self._left_out:
            named = list(named_parameters(self._graph.deferred.model, remove_duplicate=False))
            fitting = {pattern: {id(each) for name, each in named if _is_of(pattern, name)} for pattern in patterns}
            if strange := next((pattern for pattern, found in fitting.items() if not found), None):
                raise UsageError(
                    f"no parameter, and no module with parameters, has a name as {strange!r}",
                    hint=f"names are those of the whole model, as {fmt.first_of([name for name, _ in named])}",
                )
            clipped = set[int]().union(*fitting.values())
            self._left_out[patterns] = {name for name, each in named if id(each) not in clipped}
        return self._left_out[patterns]

    def norm(self, norm_type: float, left_out: Set[str]) -> float:
        """The norm of all ranks' gradients as one vector, on every rank; a shared parameter counts once.

        They are those of the parameters that are not `left_out`.
        """
        self.scaling.unscale(self._elements())
        elsewhere = {name for name in self.parameters if not self.counts(name)}
        counted = [
            torch.linalg.vector_norm(each, norm_type, dtype=torch.promote_types(each.dtype, torch.float32))
            for each in self._elements(without=elsewhere | left_out)
        ]
        mine = torch.stack([norm.double() for norm in counted] or [torch.zeros((), dtype=torch.float64, device="cpu")])
        all_norms = self._member.numbers(float(torch.linalg.vector_norm(mine, norm_type)))
        return float(torch.linalg.vector_norm(torch.tensor(all_norms, dtype=torch.float64, device="cpu"), norm_type))

    def shrink(self, norm: float, max_norm: float, left_out: Set[str]) -> None:
        """Multiply the gradients but those `left_out` so that a norm that is larger than `max_norm` becomes that."""
        share = max_norm / (norm + 1e-6)
        if share >= 1:
            return
        was_applied = self._is_applied()
        for gradient in self._elements(without=left_out):  # also where the norm is no number: then they are none either
            gradient.mul_(share)
        self.factor.multiplied(share, [each for name, each in self.parameters.items() if name not in left_out])
        if was_applied:
            self.note_applied()

    def clamp(self, limit: float) -> None:
        """Cut every element to within plus or minus `limit`."""
        self.scaling.unscale(self._elements())
        was_applied = self._is_applied()
        for gradient in self._elements(without=self._unlisted):
            gradient.clamp_(-limit, limit)
        if was_applied:
            self.note_applied()

    def note_applied(self) -> None:
        """They were applied as they are now; held weakly, for the script may drop them."""
        found = [(each, each.grad) for each in self.parameters.values()]
        self._applied = [
            (each, (lambda: None) if grad is None else weakref.ref(grad), -1 if grad is None else grad._version)
            for each, grad in found
        ]

    def _is_applied(self) -> bool:
        """Since `note_applied` no backward has run, no other tensor has come, and nobody has written to one."""
        return bool(self._applied) and all(
            each.grad is noted() and (each.grad is None or each.grad._version == version)
            for each, noted, version in self._applied
        )

    def _check_others(self) -> None:
        """Refuse an update if no rank has other gradients than those that were applied last, and some has any."""
        some = any(each.grad is not None for each in self.parameters.values())
        others = self._member.numbers(float(some) if self._is_applied() else -float(some))
        if min(others) >= 0 and any(others):
            raise UsageError(
                "pipeline.optimizer.step() would apply gradients again that pipeline.step(batch) has applied already",
                hint="leave it out; or call pipeline.step(batch, update=False), which only adds to the gradients",
            )

    def ready(self, *, again: bool = False) -> bool:
        """Whether they can be applied: unscaled, and finite on all ranks where they were scaled.

        Args:
            again: A step has made an update behind its backwards, and none have come since; on all ranks alike.

        Raises:
            UsageError: as of `check_whole`; or it would be by the gradients that the step has applied.
        """
        self.check_whole()
        if again:
            self._check_others()
        if self.scaling.scaled:
            self.scaling.unscale(self._elements())
        for parameter in self.parameters.values():
            # places that come several times come as often as there are micro-batches
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        return self.scaling.good()

    def _elements(self, *, without: Container[str] = ()) -> list[torch.Tensor]:
        """The gradients, to be changed in place; of a sparse one its values, of which it has each place's once then."""
        found = []
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and name not in without:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                found.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
        return found


def _is_of(pattern: str, name: str) -> bool:
    """Whether a parameter, or a module that holds it, has such a name."""
    parts = name.split(".")
    return any(matches(pattern, ".".join(parts[: n + 1])) for n in range(len(parts)))


def _hooked(gradient: torch.Tensor, hooks: Iterable[Callable[[torch.Tensor], torch.Tensor | None]]) -> torch.Tensor:
    """What a parameter's hooks make of its gradient, one after the other; they run as in a backward."""
    with torch.no_grad(), as_single_process():
        for hook in tuple(hooks):
            made = hook(gradient)
            gradient = gradient if made is None else made
    return gradient


@torch.no_grad()
def _added(before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient and what comes to it, in the same tensor, unless that is sparse and the sum is not."""
    return before + gradient if before.is_sparse and not gradient.is_sparse else before.add_(gradient)
