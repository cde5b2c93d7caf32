"""A partition's forward under `torch.compile`: one graph for each partition, with any number of rows.

The first other number of rows, as of a ragged last micro-batch, compiles once more, and from then on rows are a
variable. A recompute must draw what its first forward drew, though one of them runs without gradients and is another
compiled graph: so random operations stay those of eager torch, which draw from the generators that are seeded before
each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError

if TYPE_CHECKING:
    from assigner.model.marking import PartitionModule
    from assigner.model.workload import CompileOptions

Forward = Callable[..., Any]


def compiled(module: PartitionModule, name: str, options: CompileOptions) -> Forward | None:
    """What runs a partition's forward in its place, by `Workload.compile`; None: it is not compiled.

    Raises:
        UsageError: torch does not take the options, or (when the forward runs) cannot compile it.
    """
    if options is None or options is False:
        return None
    try:
        run = torch.compile(module.forward, **_arguments({} if options is True else options))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UsageError(f"Workload.compile: {_beginning(error)}", hint="see torch.compile") from error

    def forward(*arguments: Any) -> Any:
        try:
            return run(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UsageError(
                f"torch.compile of partition {name!r} failed: {_beginning(error)}",
                hint="compile=None runs it as it is; -v shows all that torch says of it",
            ) from error

    return forward


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `torch.compile` is given; inductor's own random numbers and CUDA graphs are off."""
    given = dict(options)
    if given.get("backend", "inductor") != "inductor":
        return given
    mode = given.pop("mode", None)
    inner = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(given.pop("options", None) or {})}
    if inner.get("triton.cudagraphs"):
        raise ValueError("CUDA graphs keep the outputs of one micro-batch only, and several are in flight")
    return {**given, "options": {**inner, "fallback_random": True, "triton.cudagraphs": False}}


def _beginning(error: BaseException) -> str:
    """Its first two lines, of which torch gives the first to the backend's name."""
    return " ".join(str(error).strip().splitlines()[:2])[:200] or type(error).__name__
