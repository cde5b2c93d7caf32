"""Copies of a weight on several workers, of one stage or of several: does the script treat them alike?

The workers update their copies by the same gradients, so these stay alike, but for what unlike kinds of workers round
in unlike ways. A script that changes a weight, a gradient or an optimizer's state in another way on one of them
would have them drift apart, and no loss would show it: noise that each rank draws for the parameters that it holds, or
a norm over `named_parameters()`, by which it clips. So the members of a group compare a sample of each weight in every
step and evaluation, while that goes on. Copies may be as far apart as they have been, and as rounding explains; those
that have drifted far by rounding alone are all set to the first worker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.ranks.workergroups import PendingTensor, WorkerGroup
    from assigner.runtime.stages.localpartitions import LocalPartitions

_SAMPLE = 16
_OF_VALUES, _OF_CHANGE = 16, 1000  # times a type's resolution: what rounding explains, of values and of their change
_MOST_OF_CHANGE = 0.125
_AGAIN = 1.25  # times as far as before
_FAR, _MOST_FAR = 64, 1 / 64  # times a type's resolution of the largest value, and a share of it at most
_BY_NAME = (
    "; under this plan the groups of pipeline.optimizer list what a rank updates, and it holds more: go by"
    " pipeline.named_parameters()"
)
_APART = 64  # more than a sample has values


class CopyComparison:
    """The weights of this rank that other workers hold too."""

    def __init__(self, share: LocalPartitions, member: Membership) -> None:
        self._member = member
        self._groups: list[_GroupCopies] = []
        copies = share.copies()
        for workers, group in member.groups.items():
            held = {
                name: parameter
                for name, parameter in copies.get(workers, {}).items()
                if parameter.is_floating_point() or parameter.is_complex()
            }
            if held:
                self._groups.append(_GroupCopies(group, held, is_divided=share.plan.is_divided))

    def note_gradients(self) -> None:
        """The gradients are about to be applied, perhaps by one worker for all: they are compared next time, too."""
        for each in self._groups:
            each.note_gradients()

    def begin(self) -> None:
        """Begin to compare. Through NCCL nothing begins in the middle of a step (see `reduction`)."""
        for each in self._groups:
            if not each.group.direct:
                each.begin()

    def end(self) -> None:
        """Compare what was begun.

        Raises:
            UsageError: the copies of a weight have come apart.
            LostConnectionError: a worker is gone.
        """
        self._member.at = "the comparison of weights that several workers hold"
        self._member.before_sums()
        for each in self._groups:
            each.end()

    def compare(self) -> None:
        """Begin, and end at once: between steps."""
        self.begin()
        self.end()

    def accept(self) -> None:
        """Copies may be as far apart as they are when they are compared next: they are known from another plan."""
        for each in self._groups:
            each.apart = None

    def forget(self) -> None:
        """Drop what was begun."""
        for each in self._groups:
            each.pending = None


class _GroupCopies:
    """What one group of workers holds.

    Attributes:
        apart: How far apart the copies of each parameter have been; None: nobody knows.
        pending: The largest values, and the largest of what is opposite to them, on their way: of the parameters, of
            the gradients of the last update, of how many values of each of both are no finite numbers, and of which
            parameters want gradients.
    """

    def __init__(self, group: WorkerGroup, held: Mapping[str, nn.Parameter], *, is_divided: bool = False) -> None:
        self._also = _BY_NAME if is_divided else ""
        self.group, self._names, self._held = group, list(held), list(held.values())
        sizes = [len(_sample(each)) for each in self._held]
        self._owner = torch.repeat_interleave(torch.tensor(sizes * 2, device="cpu")).to(group.device)
        eps = [torch.finfo(each.dtype).eps for each in self._held] * 2
        self._eps = torch.tensor(eps, dtype=torch.float64, device="cpu").to(group.device)
        self.apart: torch.Tensor | None = self._eps[: len(held)] * 0
        self.pending: PendingTensor | None = None
        self._views: list[torch.Tensor] = []  # what is compared of the weights, and where these lay when it was taken
        self._places: list[int] = []
        self._before = self._weights()
        self._gradients = torch.zeros_like(self._before)
        self._now = self._before

    @staticmethod
    @torch.no_grad()
    def _sampled(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([_sample(each) for each in tensors]).double()

    def _weights(self) -> torch.Tensor:
        """Views show what weights hold now, as long as these lie where they did; of most there are such."""
        places = [*map(torch.Tensor.data_ptr, self._held)]
        if places != self._places:
            self._views = [_sample(each.detach()) for each in self._held]
            self._places = places if all(map(torch.Tensor.is_contiguous, self._held)) else []
        return torch.cat(self._views).double()

    def note_gradients(self) -> None:
        held = [(each, each.grad) for each in self._held]
        self._gradients = self._sampled(_sample(each) * 0 if grad is None else grad for each, grad in held)

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        """Of the values of each parameter, and of each gradient."""
        return torch.zeros_like(self._eps).scatter_reduce_(0, self._owner, values, "amax")

    def begin(self) -> None:
        now = torch.cat([self._weights(), self._gradients])
        odd = now.isnan() + _APART * now.isposinf() + _APART**2 * now.isneginf()  # no difference tells these
        odd = torch.zeros_like(self._eps).index_add_(0, self._owner, odd.double())
        wanted = torch.tensor([float(each.requires_grad) for each in self._held], device="cpu").to(odd)
        self._now = now.nan_to_num(0.0, 0.0, 0.0)
        told = torch.cat([self._now, odd, wanted])
        self.pending = self.group.begin_largest(torch.cat([told, -told]))

    def end(self) -> None:
        if self.pending is None:
            self.begin()
        assert self.pending is not None
        (ends, opposite), self.pending = self.pending.wait().chunk(2), None
        half, now = len(self._before), self._now
        off = ends + opposite
        self._check_wanted(off[2 * half + len(self._eps) :])
        odd = off[2 * half : 2 * half + len(self._eps)] > 0
        apart = self._largest(off[: 2 * half]).masked_fill(odd, torch.inf)
        change = torch.cat([now[:half] - self._before, now[half:]]).abs()
        self._before, self._gradients = now[:half], torch.zeros_like(self._gradients)
        rounding = _OF_VALUES * self._eps * self._largest(now.abs())
        rounding += (_OF_CHANGE * self._eps).clamp(max=_MOST_OF_CHANGE) * self._largest(change)
        known = apart[: len(self._held)] if self.apart is None else self.apart
        allowed = rounding + torch.cat([_AGAIN * known, torch.zeros_like(known)])
        for n in (apart > allowed).nonzero().flatten().tolist():
            name = self._names[n % len(self._held)]
            what = name if n < len(self._held) else f"the gradient of {name}"
            raise UsageError(
                f"{', '.join(self.group.workers)} hold copies of {what}, and these have come apart, by"
                f" {float(apart[n]):.3g}: since the last step the script has changed it, its gradient or its"
                " optimizer's state in another way on one of them than on another",
                hint="change them alike on all ranks: draw by each one's name, clip with step(batch, max_norm=...) or"
                " pipeline.clip_grad_norm_; weights of one rank are handed out by"
                f" pipeline.load_state_dict{self._also}",
            )
        self.apart = torch.maximum(apart[: len(self._held)], known)
        largest = self._largest(torch.maximum(ends[: 2 * half], opposite[: 2 * half]))
        self._align((apart > (_FAR * self._eps).clamp(max=_MOST_FAR) * largest)[: len(self._held)].nonzero().flatten())

    @torch.no_grad()
    def _align(self, far: torch.Tensor) -> None:
        """Give copies the first worker's values; by the same numbers all members find the same ones to be far apart."""
        assert self.apart is not None
        for n in far.tolist():
            flat = self._held[n].detach().clone(memory_format=torch.contiguous_format)
            self._held[n].copy_(self.group.hand_out(flat, self.group.workers[0]).wait())
            self.apart[n] = 0
        if len(far):
            self._before = self._weights()

    def _check_wanted(self, unlike: torch.Tensor) -> None:
        """A worker that wants no gradient of a parameter would leave that of its micro-batches out of the sum."""
        for n in unlike.nonzero().flatten().tolist():
            raise UsageError(
                f"{', '.join(self.group.workers)} hold copies of {self._names[n]}, and its requires_grad is True on one"
                " of them and False on another",
                hint=f"freeze it and train it again on all ranks alike{self._also}",
            )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its values, real ones."""
    values = tensor.to_dense() if tensor.is_sparse else tensor
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values if values.is_contiguous() else values.contiguous()
    every = -(-values.numel() // _SAMPLE) or 1
    return values.as_strided((-(-values.numel() // every),), (every,), values.storage_offset())  # one call: it adds up
