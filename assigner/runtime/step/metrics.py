"""A workload's metrics on the rank that makes the model's output: called as often as the loss, seen by nobody.

They see what the last partition made before the loss does, which may write there. In a rematerialised partition that is
its first forward's. Their values stay where they are made until the step has ended: nothing waits for a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.runtime.forward.randomness import kept_generators, seed_device, seed_python
from assigner.runtime.step.results import MetricTotal, exact_sum
from assigner.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.model.workload import Metric

Number = float | torch.Tensor

_HINT = "a metric is called as the loss is, with the outputs and targets of a micro-batch (loss_over='batch': of all)"


class StepMetrics:
    """The metrics of a step, or of an evaluation.

    Args:
        metrics: By name.
        device: Where the outputs are.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics, self._device = metrics, device
        self.begin()

    def begin(self) -> None:
        """A step comes next."""
        self._seen: dict[str, list[tuple[float, Number, Number | None]]] = {name: [] for name in self._metrics}

    def see(self, outputs: Any, targets: Any, weight: float, seed: int = 0) -> None:
        """Call them.

        Args:
            outputs: The model's, in its own structure.
            targets: On the same device.
            weight: What a number counts for; 0: it counts for nothing, whatever it is.
            seed: Of what they draw.

        Raises:
            UsageError: a metric fails, gives something else than a number or a pair of them, or writes into what it is
                given.
        """
        with torch.no_grad(), kept_generators(self._device, draws=True):
            seed_device(seed, self._device)
            seed_python(seed)
            for name, metric in self._metrics.items():
                mine = pytree.tree_map_only(torch.Tensor, _detached, (outputs, targets))
                tensors = (each for each in pytree.tree_leaves(mine) if isinstance(each, torch.Tensor))
                given = [each for each in tensors if not each.is_inference()]
                before = [each._version for each in given]
                with user_code(f"Workload.metrics[{name!r}]", hint=_HINT):
                    made = metric(*mine)
                self._seen[name].append((weight, *_checked(made, name)))
                if [each._version for each in given] != before:
                    raise UsageError(
                        f"Workload.metrics[{name!r}] writes into the outputs or the targets that it is given",
                        hint="the loss and its gradients would see that: have it work on a copy, outputs.clone()",
                    )

    def numbers(self) -> list[float]:
        """What their values add up to, in the order of the names; see `assigner.runtime.step.results`."""
        return [number for name in sorted(self._seen) for number in _total(self._seen[name])]


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph; a copy where torch counts no writes: in its inference mode, and through NumPy on the CPU."""
    return tensor.detach().clone() if tensor.is_inference() or tensor.device.type == "cpu" else tensor.detach()


def _total(values: list[tuple[float, Number, Number | None]]) -> MetricTotal:
    pairs = [(float(total), float(count)) for _, total, count in values if count is not None]
    numbers = [weight * float(value) for weight, value, count in values if count is None and weight]
    parts = [*numbers, *(total for total, _ in pairs)]
    return MetricTotal(exact_sum(parts), exact_sum(count for _, count in pairs), len(values), len(pairs))


def _checked(made: Any, name: str) -> tuple[Number, Number | None]:
    """A number, and None or the count that it is to be divided by."""
    if isinstance(made, tuple | list) and len(made) == 2:
        return _number(made[0], name, "a total that is "), _number(made[1], name, "a count that is ")
    return _number(made, name, ""), None


def without_values(what: str) -> UsageError:
    """An error of what computes with tensors that the builder has made beside the model."""
    return UsageError(
        f"{what} computes with a tensor that Workload.model has made, where tensors have no values (the meta device)",
        hint="return what it needs from the model's forward; a teacher is made outside of Workload.model, and weights"
        " decay in the optimizer (weight_decay)",
    )


def _number(made: Any, name: str, what: str) -> Number:
    if isinstance(made, torch.Tensor) and made.is_meta:
        raise without_values(f"Workload.metrics[{name!r}]")
    if isinstance(made, torch.Tensor) and not made.dim() and not made.is_complex():
        return made.detach().clone()  # a running sum moves on, and a view keeps all outputs
    if isinstance(made, bool | int | float | np.bool_ | np.integer | np.floating):
        return float(made)
    if isinstance(made, torch.Tensor | np.ndarray):
        kind = f"{'a tensor' if isinstance(made, torch.Tensor) else 'an array'} of shape {tuple(made.shape)}"
        kind += f" and type {made.dtype}"
    else:
        kind = f"a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple | list) else "")
    raise UsageError(
        f"Workload.metrics[{name!r}] gave {what}{kind if made is not None else 'None'}",
        hint="return a number, or (total, count)",
    )
