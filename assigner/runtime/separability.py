"""Does an optimizer treat every parameter by itself? On several workers each one's sees its own parameters alone.

    clipping by the global norm in step()    plain PyTorch    |g1 g2 g3 g4|
                                             worker 0         |g1 g2|        another norm, other weights

torch's own optimizers do. Of others, and of those with hooks on their step, small stand-ins for the parameters tell:
the user's builder makes one optimizer over all of them and one over each worker's, all get the same gradients for some
steps, and then the parameters must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Named = Mapping[str, nn.Parameter]
Build = Callable[[Named, Named], torch.optim.Optimizer]
"""Of the user's optimizer, over all of a model's parameters; it is to keep some, the others have no values."""

_SCALES = (1e-3, 1.0, 30.0, 30.0, 1e3, 1e3, 1.0, 1e-3)
"""Of the gradients in the steps, with a factor of up to 10 for each parameter: below and above what a clipping leaves
alone. They keep their direction, so that a rate that is learnt from the distance to the start does rise."""

_NOISE = 1e-7  # relative to an update, in float64
_MOST = 2  # entries in a stand-in's dimension


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """It is torch's own, as it was built: each of these treats every parameter by itself."""
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks,
    )  # fmt: skip
    own = type(optimizer).__module__.startswith("torch.optim") and "step" not in vars(optimizer)
    return own and not any(hooks)


def check_separable(
    optimizer: torch.optim.Optimizer,
    model: Sequence[tuple[str, nn.Parameter]],
    shares: Sequence[Collection[str]],
    build: Build,
) -> None:
    """Refuse an optimizer that would make other weights on several workers than on one.

    Args:
        optimizer: What the user's builder made of the model's parameters.
        model: Those by name, for their shapes and attributes.
        shares: Names of those that each worker has.
        build: Makes such an optimizer over others.

    Raises:
        UsageError: what it does with a parameter depends on the others; or this cannot be found out.
    """
    name = type(optimizer).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            together = _updates(model, [name for name, _ in model], build)
            apart = [_updates(model, share, build) for share in dict.fromkeys(map(frozenset, shares))]
    except Exception as error:
        said = str(error).strip().splitlines()
        raise UsageError(
            f"whether {name} treats every parameter by itself cannot be found out: with small tensors in their place it"
            f" fails: {type(error).__name__}{f': {said[0]}' if said else ''}",
            hint=_HINT,
        ) from error
    differs = [key for share in apart for key, update in share.items() if not _alike(together[key], update)]
    if differs:
        raise UsageError(
            f"{name}, with the hooks on its step if there are any, looks at several parameters at once: what it does to"
            f" {differs[0]!r} depends on others that another worker has under this plan",
            hint=_HINT,
        )


_HINT = (
    "clip gradients by their global norm with pipeline.step(batch, max_norm=...) or pipeline.clip_grad_norm_, not in"
    " the optimizer; or use one that treats every parameter by itself, as AdamW; or solve for one worker (--only)"
)


def _updates(
    model: Sequence[tuple[str, nn.Parameter]], share: Collection[str], build: Build
) -> dict[str, torch.Tensor]:
    """What some steps of the optimizer do to the stand-ins of one worker's parameters, by name."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    small = {name: _small(parameter, generator) for name, parameter in model}
    directions = {name: _random(each, generator).abs() + 0.1 for name, each in small.items()}
    held = {name: each for name, each in small.items() if name in share}
    before = {name: each.detach().clone() for name, each in held.items()}
    optimizer = build({name: each if name in held else _without_values(each) for name, each in small.items()}, held)
    for scale in _SCALES:
        shares = {name: 10 ** (2 * float(torch.rand((), generator=generator, device="cpu")) - 1) for name in small}
        for name, each in held.items():
            each.grad = directions[name] * scale * shares[name] if each.requires_grad else None
        optimizer.step()
    return {name: each.detach() - before[name] for name, each in held.items()}


def _small(parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    """A parameter with the same number of dimensions and the same attributes, in float64: updates may be tiny."""
    sizes = [min(each, _MOST) for each in parameter.shape]
    kind = torch.float64 if parameter.is_floating_point() else parameter.dtype
    return _like(parameter, _random(torch.empty(sizes, dtype=kind, device="cpu"), generator))


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    """As what another worker has is seen when the optimizer is built."""
    return _like(parameter, torch.empty_like(parameter, device="meta"))


def _like(parameter: nn.Parameter, tensor: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.dtype)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    largest = max((float(each.abs().max()) for each in (one, other) if each.numel()), default=0.0)
    if not math.isfinite(largest):
        return torch.equal(one.isfinite(), other.isfinite())
    return bool(((one - other).abs() <= _NOISE * largest).all())
