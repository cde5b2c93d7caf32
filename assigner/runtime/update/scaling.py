"""Loss scaling for float16: one scale on all ranks, and all of them skip an update that overflowed on one.

Gradients are scaled by the backward, which starts from the scale instead of 1, and unscaled once before anything is
done with them. `torch.amp.GradScaler` keeps the options, the scale and the count of good updates.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.runtime.ranks.membership import Membership


class GradientScaling:
    """The loss's scale and what the gradients of this rank have of it.

    Args:
        scaler: The user's; None: torch's own with its defaults under float16, and a disabled one else. One that is
            enabled on any rank is on all: torch's own for "cuda" disables itself where there is no GPU.
        autocast: The workload's.
        member: Tells an overflow to the other ranks. All of them make their `GradientScaling` together.

    Attributes:
        scaled: The gradients are multiplied by the scale.
        applied: Gives the gradients of this rank that an update applies: those of others may overflow.

    Raises:
        UsageError: `scaler` is of another class, or set otherwise on another rank.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, autocast: str | None, member: Membership) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise UsageError(f"scaler={scaler!r} is not allowed", hint="give a torch.amp.GradScaler")
        mine = scaler or torch.amp.GradScaler(member.device.type, enabled=autocast == "float16")
        self.scaler = _agreed(mine, member)
        self._member = member
        self._checked = self._overflowed = False
        self.scaled = False
        self.applied: Callable[[], Sequence[torch.Tensor]] = tuple

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before the backward."""
        return self.scaler.get_scale() if self.scaler.is_enabled() else 1.0

    @property
    def carried(self) -> float:
        """What the gradients are multiplied by at this moment."""
        return self.factor if self.scaled else 1.0

    def begin(self, gradients: Sequence[torch.Tensor]) -> None:
        """A backward will add scaled gradients: these, of steps before, must be scaled too."""
        if self.scaler.is_enabled() and not self.scaled:
            _multiply(gradients, self.factor)
            self.scaled = True

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take the scale out of the gradients; a second call does nothing. All ranks call it together."""
        if not self.scaled:
            return
        _multiply(gradients, 1 / self.factor)
        self.scaled = False
        peaks = [torch.linalg.vector_norm(each, math.inf).double() for each in self.applied()]
        overflowed = bool(peaks) and not bool(torch.stack(peaks).isfinite().all())
        everywhere = self._member.numbers(float(overflowed))
        self._overflowed |= any(everywhere)  # until the update: what clipping made finite since then is still wrong
        self._checked = True

    def check_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients from which the script has taken the scale, too, by its handle on the optimizer.

        Raises:
            UsageError: it has called the scaler's `step` or `unscale_`.
        """
        if id(optimizer) in getattr(self.scaler, "_per_optimizer_states", {}):
            raise UsageError(
                "the scaler's step() or unscale_() was called with pipeline.optimizer: the pipeline itself takes the"
                " scale out of the gradients",
                hint="pipeline.optimizer.step() is scaler.step(optimizer) and scaler.update(); pipeline.clip_grad_norm_"
                " unscales before it clips",
            )

    def good(self) -> bool:
        """Whether an update can be made; adapts the scale after it looked at new gradients."""
        good = not self._overflowed
        if self._checked:
            state = self.scaler.state_dict()
            if good:
                state["_growth_tracker"] += 1
                if state["_growth_tracker"] == state["growth_interval"]:
                    grown = state["scale"] * state["growth_factor"]
                    state.update(scale=grown if grown <= _LARGEST else state["scale"], _growth_tracker=0)
            else:
                state.update(scale=state["scale"] * state["backoff_factor"], _growth_tracker=0)
            self.scaler.load_state_dict(state)
        self._checked = self._overflowed = False
        return good

    def load(self, state: dict[str, float]) -> None:
        """Take over a scaler's state; the gradients, of which none is left, are not scaled."""
        if self.scaler.is_enabled() and state:
            self.scaler.load_state_dict(state)
        self._checked = self._overflowed = self.scaled = False


def _agreed(scaler: torch.amp.GradScaler, member: Membership) -> torch.amp.GradScaler:
    """This rank's scaler, enabled and set as on all ranks: an own one where it is disabled on this rank alone."""
    mine = scaler.state_dict()
    found = {key: member.numbers(float(mine.get(key, math.nan))) for key in _SETTINGS}
    enabled = [rank for rank, scale in enumerate(found["scale"]) if not math.isnan(scale)]
    if not enabled:
        return scaler
    for key, numbers in found.items():
        first, other = enabled[0], next((rank for rank in enabled if numbers[rank] != numbers[enabled[0]]), None)
        if other is not None:
            raise UsageError(
                f"the scaler's {key} is {numbers[first]:g} on worker:{first} and {numbers[other]:g} on worker:{other}",
                hint="give every rank a scaler with the same settings",
            )
    if mine:
        return scaler
    made = torch.amp.GradScaler("cpu")
    state = {key: numbers[enabled[0]] for key, numbers in found.items()}
    made.load_state_dict({key: type(value)(state[key]) for key, value in made.state_dict().items()})
    return made


_SETTINGS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_LARGEST = torch.finfo(torch.float32).max  # GradScaler keeps the scale in float32


def _multiply(gradients: Sequence[torch.Tensor], factor: float) -> None:
    for each in gradients:
        each.mul_(factor)
