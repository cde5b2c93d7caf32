"""One rank of a run: every contender in turn, round by round, so that the machine's moods meet all alike.

    torchrun ... turns.py --entry ENTRY --micro-batches 8 --rounds 20 --steps 2 --out FILE

Before any timing, all must give the loss and the gradients of the un-pipelined model.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from chain import Chain, unpipelined
from contenders import Contender, available
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping

WARM_UP = 3
TOLERANCE = 1e-4  # of the largest gradient of a parameter; the sums of float32 differ in their order


@dataclass
class Figures:
    """What one contender took on one rank, a figure for every round.

    Args:
        step_s: A step.
        cpu_s: Processor time of this process in a step, all its threads.
    """

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def check(chain: Chain, contenders: Mapping[str, Contender]) -> None:
    """One step of each, without update.

    Raises:
        ValueError: a loss or a gradient is not that of the un-pipelined model.
    """
    loss, gradients = unpipelined(chain)
    for name, contender in contenders.items():
        found = contender.step(update=False)
        if found is not None and abs(found - loss) > TOLERANCE * abs(loss):
            raise ValueError(f"{name}: loss {found}, un-pipelined {loss}")
        for parameter, gradient in contender.gradients().items():
            expected = gradients[parameter]
            off = float((gradient - expected).abs().max())
            if not off <= TOLERANCE * float(expected.abs().max()):
                raise ValueError(f"{name}: the gradient of {parameter} is off by {off}")
        parts: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(parts, set(contender.gradients()))
        if set.union(*parts) != set(gradients):
            raise ValueError(f"{name}: no gradient of {min(set(gradients) ^ set.union(*parts))}")


def turn(contender: Contender, steps: int, figures: Figures) -> None:
    """Some steps of one contender."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender.step()
    end, cpu_end = time.perf_counter(), time.process_time()
    dist.barrier()
    figures.step_s.append((end - begin) / steps)
    figures.cpu_s.append((cpu_end - cpu) / steps)


def alternate(contenders: Mapping[str, Contender], *, rounds: int, steps: int, title: str) -> dict[str, Figures]:
    """All rounds, each in another order; the first ones do not count."""
    found = {name: Figures() for name in contenders}
    silent = dist.get_rank() > 0
    with Progress(console=Console(stderr=True), disable=silent, auto_refresh=False) as progress:
        bar = progress.add_task(title, total=rounds)
        for number in range(-WARM_UP, rounds):
            names = list(contenders)
            random.Random(number).shuffle(names)  # noqa: S311 (no secret)
            for name in names:
                turn(contenders[name], steps if number >= 0 else 1, found[name] if number >= 0 else Figures())
            if number >= 0:
                progress.update(bar, advance=1, refresh=True)
    return found


def gathered(found: Mapping[str, Figures]) -> dict[str, dict[str, list[list[float]]]]:
    """For every contender step and processor times, a list for each rank."""
    parts: list[Mapping[str, Figures]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, dict(found))
    return {
        name: {"step_s": [part[name].step_s for part in parts], "cpu_s": [part[name].cpu_s for part in parts]}
        for name in found
    }


def main() -> None:
    """Check, alternate, and write the figures of all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entry", required=True)
    parser.add_argument("--title", required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-parallel", action="store_true", help="each rank has all of the model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chain = Chain(args.entry, args.micro_batches, dist.get_world_size())
    contenders = {name: make(chain) for name, make in available(data_parallel=args.data_parallel).items()}
    check(chain, contenders)
    figures = gathered(alternate(contenders, rounds=args.rounds, steps=args.steps, title=args.title))
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(figures))
    dist.barrier()
    for contender in contenders.values():
        if hasattr(contender, "pipeline"):
            contender.pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
