"""The gradients of a rank's parameters, and what is done with those of all ranks together.

A parameter that several workers hold has one gradient: the sum of what each of them adds, exchanged at the end of every
step's backwards, so that every holder has the whole of it whenever the training script looks. What earlier steps left
is set aside meanwhile, for it was summed then:

    step 1    a1 | b1  -> both a1 + b1
    step 2    a2 | b2  -> both (a1 + b1) + (a2 + b2)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError
from assigner.runtime.absent import absent_like, is_absent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from assigner.marking import PartitionGraph
    from assigner.plan import Plan
    from assigner.runtime.executor import Executor
    from assigner.runtime.membership import Membership
    from assigner.runtime.scaling import GradientScaling
    from assigner.schedule import Program


class Gradients:
    """The gradients of one rank.

    Args:
        parameters: This rank's parameters by name.
        graph: The model's partitions.
        plan: Who holds which.
        member: This process in the run.
        scaling: What the loss was multiplied by.
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
        self._member = member
        self._shared: dict[int, nn.Parameter] = {}
        self._counted_elsewhere: set[str] = set()
        for n, tie in enumerate(graph.ties):
            holders = [plan.placement[name] for name in tie.partitions]
            if len(set(holders)) > 1 and tie.parameter in parameters:
                self._shared[n] = parameters[tie.parameter]
                if holders[0] != member.worker:
                    self._counted_elsewhere.add(tie.parameter)
        self._aside: dict[int, torch.Tensor | None] = {}

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
        """The backwards of a step will add to the gradients."""
        self.scaling.begin(self._held())
        self._aside = {n: parameter.grad for n, parameter in self._shared.items()}
        for parameter in self._shared.values():
            parameter.grad = None

    def sum_shared(self, program: Program, executor: Executor) -> None:
        """A shared parameter's gradient is the sum over the holders that have one, in one order on all of them."""
        added = {n: absent_like(each) if each.grad is None else each.grad for n, each in self._shared.items()}
        for n, parts in executor.exchange_ties(program, added).items():
            present = [part for _, part in parts if not is_absent(part)]
            before = self._aside[n]
            if present:
                total = functools.reduce(torch.add, present)
                self._shared[n].grad = total if before is None else before + total
            else:
                self._shared[n].grad = before
        self._aside = {}

    def norm(self, norm_type: float) -> float:
        """The norm of all ranks' gradients as one vector, on every rank; a shared parameter counts once.

        Raises:
            UsageError: `norm_type` is not positive.
        """
        if not norm_type > 0:
            raise UsageError(f"norm_type={norm_type}: expected a positive number or math.inf")
        self.scaling.unscale(self._held())
        counted = [
            torch.linalg.vector_norm(each.grad, norm_type, dtype=torch.promote_types(each.grad.dtype, torch.float32))
            for name, each in self.parameters.items()
            if each.grad is not None and name not in self._counted_elsewhere
        ]
        mine = torch.stack([norm.double() for norm in counted] or [torch.zeros((), dtype=torch.float64)])
        all_norms = self._member.numbers(float(torch.linalg.vector_norm(mine, norm_type)))
        return float(torch.linalg.vector_norm(torch.tensor(all_norms, dtype=torch.float64), norm_type))

    def shrink(self, norm: float, max_norm: float) -> None:
        """Multiply the gradients so that a norm that is larger than `max_norm` becomes that."""
        share = max_norm / (norm + 1e-6)
        if share >= 1:
            return
        for gradient in self._held():  # also where the norm is not a number: then the gradients are none either
            gradient.mul_(share)

    def clamp(self, limit: float) -> None:
        """Cut every element to within plus or minus `limit`."""
        self.scaling.unscale(self._held())
        for gradient in self._held():
            gradient.clamp_(-limit, limit)

    def ready(self) -> bool:
        """Whether they can be applied: unscaled, and finite on all ranks where they were scaled."""
        self.scaling.unscale(self._held())
        return self.scaling.good()

    def _held(self) -> list[torch.Tensor]:
        return [each.grad for each in self.parameters.values() if each.grad is not None]
