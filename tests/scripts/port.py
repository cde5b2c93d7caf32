"""A training script of a public repository, in words of our own and at toy size: as its author has it, and ported.

A module of this folder is one script:

    workload()                     the model with its loss and optimizer, as the ported script hands it over
    plain(log)                     the loop in plain PyTorch; gives the trained model
    ported(pipeline, folder, log)  the same loop; it saves to the folder when it is stopped, and goes on from there
    stopped(log)                   the plain loop, stopped and resumed, where that changes what it computes
    used(model)                    what is done with the weights afterwards in plain PyTorch, as numbers
    MICRO_BATCHES                  so many on two ranks; 1 where more of them are another computation
    STOP_AT                        the line of the log at which one rank is asked to stop
    WORKERS                        so many have partitions, where not all ranks may
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import signal
from typing import TYPE_CHECKING, Any

from kept import kept

from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from assigner import Workload
    from assigner.model.marking import PartitionGraph

NAMES = (
    "nano_gpt", "word_transformer", "word_lstm", "image_net", "digits", "autoencoder", "adversarial", "waves", "twins",
    "graph_attention", "fine_tuning", "segmentation",
)  # fmt: skip
"""The scripts, in the order of the table in docs/porting.md."""


def script(name: str) -> ModuleType:
    """A module of this folder."""
    return importlib.import_module(f"scripts.{name}")


@kept
def captured(name: str) -> tuple[Workload, PartitionGraph]:
    """A script's workload and the partitions of its model."""
    made = script(name).workload()
    return made, partition_graph(made)


class Log:
    """What a script prints, line by line.

    Args:
        stop_at: After so many lines this process gets SIGTERM, as from a scheduler or from Ctrl-C; 0: never.
    """

    def __init__(self, stop_at: int = 0) -> None:
        self.lines: list[dict[str, float]] = []
        self.stop_at = stop_at

    def __call__(self, **values: float) -> None:
        self.lines.append({name: float(value) for name, value in values.items()})
        if len(self.lines) == self.stop_at:
            signal.raise_signal(signal.SIGTERM)


def difference(lines: list[dict[str, float]], others: list[dict[str, float]]) -> float:
    """The largest one between two logs, relative above 1; infinite where they do not have the same lines."""
    if [list(line) for line in lines] != [list(line) for line in others]:
        return math.inf
    pairs = [(line[key], other[key]) for line, other in zip(lines, others, strict=True) for key in line]
    found = [abs(one - other) / max(1.0, abs(other)) for one, other in pairs]
    return math.inf if any(math.isnan(each) for each in found) else max(found)


def lines_of(function: Callable[..., Any]) -> list[str]:
    """The lines of a loop, without its name, empty lines and comments."""
    _, *body = inspect.getsource(function).splitlines()
    return [line.strip() for line in body if line.strip() and not line.strip().startswith("#")]


def changes(name: str) -> tuple[int, int, int]:
    """Lines of the plain loop, lines of the ported one, and how many of the plain one's are no longer there."""
    before, after = lines_of(script(name).plain), lines_of(script(name).ported)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return len(before), len(after), len(before) - sum(block.size for block in matcher.get_matching_blocks())
