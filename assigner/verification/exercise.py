"""What both sides of the comparison are given: the same small batches, cut as a run cuts them, and comparable draws.

A pipeline seeds the generator anew for each partition and micro-batch, a plain loop does not: their dropout masks
differ, and are meant to. For the comparison each random operation is given a generator that is seeded from what it is
(its name, the shapes that it reads) and from the step: both sides draw the same there.

Python's own generator and NumPy's cannot be reached so. Each side goes on from a state of its own, as each process of a
real run does, so that what depends on them shows.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import zlib
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy.random  # noqa: F401 - loaded before the sides begin: each has a state of it
import torch
from torch.utils import _pytree as pytree

from assigner.formats.fineness import micro_batch_count
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Stage
from assigner.machine.generators import GeneratorStates, kept_python
from assigner.model.deferred.mutation import Watching
from assigner.model.marking import PartitionGraph
from assigner.model.marking.writing import ONCE
from assigner.model.workload import Workload
from assigner.runtime.batch.microbatch import Cutting, MicroBatch, check_pair
from assigner.runtime.forward.randomness import kept_generators, seed_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from assigner.model.workload import Batch, Metric

STEPS = 2


@dataclass(frozen=True, eq=False)
class Exercise:
    """The steps that both sides make."""

    workload: Workload  # the model with its loss and optimizer; not compiled
    graph: PartitionGraph  # its partitions
    rows: int  # in a batch
    micro_batches: int  # of a batch

    @property
    def trains(self) -> bool:
        """Whether the model is trained, and not used for its outputs alone."""
        return self.workload.loss is not None and self.workload.optimizer is not None

    @property
    def epsilon(self) -> float:
        """The relative step between neighbouring numbers of the type that autocast computes in; 0: no autocast."""
        autocast = self.workload.autocast
        return torch.finfo(getattr(torch, autocast)).eps if autocast else 0.0

    @cached_property
    def _cutting(self) -> Cutting:
        return Cutting(self.workload)

    @cached_property
    def _batches(self) -> list[Batch]:
        made = [self.workload.make_batch(self.rows, self.workload.seed + step) for step in range(STEPS)]
        for batch in made:
            check_pair(batch)
        return made

    def batch(self, step: int) -> Batch:
        """A copy of a step's batch that shares nothing with other copies; tensors that stand twice in it stay one."""
        return copy.deepcopy(self._batches[step])

    def own_loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """The loss for one side: a module or an object may remember what it was called with. None: there is none."""
        return copy.deepcopy(self.workload.loss)

    def own_metrics(self) -> dict[str, Metric]:
        """The metrics for one side, likewise."""
        return copy.deepcopy(dict(self.workload.metrics or {}))

    def cut(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a copy of a step's batch."""
        batch = self.batch(step)
        count = micro_batch_count(
            self._cutting.row_count(batch[0]), self.micro_batches, self._size, self.workload.fineness
        )
        return self._cutting.split(batch, count)

    @property
    def _size(self) -> int:
        return -(-self.rows // self.micro_batches)

    def stored_once(self) -> list[str]:
        """Names of what the forward stores into once a step, in whatever graph was captured until now."""
        graphs = (self.graph, *self.graph.recuts[True], *self.graph.recuts[False])
        nodes = (node for graph in graphs for piece in graph.pieces for node in piece.graph.nodes)
        return sorted({str(node.all_input_nodes[0].target) for node in nodes if node.target in ONCE})

    def whole(self) -> Exercise:
        """The same with one micro-batch."""
        return replace(self, micro_batches=1)

    def exact(self) -> Exercise:
        """The same without autocast."""
        return replace(self, workload=replace(self.workload, autocast=None))

    def plan(self, *, recomputes: bool) -> Plan:
        """A plan that gives each partition a worker of its own.

        All micro-batches are in flight everywhere, and backwards come in the order of the plain side, whose sums have
        the same bits then: a loop's, or that of autograd where one loss is over the batch.

        Args:
            recomputes: Every partition rematerialises, but those whose mark says "never".
        """
        stages = tuple(
            Stage(
                f"worker:{n}/cpu",
                (piece.name,),
                (piece.name,) if recomputes and piece.mark.rematerialise != "never" else (),
                in_flight=self.micro_batches,
            )
            for n, piece in enumerate(self.graph.pieces)
        )  # fmt: skip
        return Plan(
            workload=WorkloadReference(self.workload.name or "check", batch_size=self.rows),
            schedule="gpipe" if self.workload.loss_over == "batch" else "1f1b",
            micro_batches=self.micro_batches,
            micro_batch_size=self._size,
            stages=stages,
        )


class ComparableDraws(Watching):  # type: ignore[no-untyped-call]
    """Seeds torch's default generator before each operation that draws from it.

    Args:
        step: Draws of another step are others.
        drops: False: masks keep everything, so that what is dropped is the same for every number of rows.

    Attributes:
        types: Of all tensors that anything made.
    """

    def __init__(self, step: int, *, drops: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._drops = step, drops
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.bernoulli_.float and not self._drops:  # on a CPU every dropout of torch's draws so
            return args[0].fill_(1)
        if torch.Tag.nondeterministic_seeded in func.tags:
            leaves = pytree.tree_leaves((args, kwargs))
            if not any(isinstance(leaf, torch.Generator) for leaf in leaves):
                shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves]
                text = f"{self._step}/{func}/{shapes}".encode()
                seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
                torch.default_generator.manual_seed(seed)
        made = func(*args, **kwargs)
        self.types.update(each.dtype for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor))
        return made


class SideGenerators:
    """What one side of the comparison draws from: a state of Python's and NumPy's generators that it goes on from."""

    def __init__(self, seed: int) -> None:
        with kept_python():
            seed_python(seed)
            self._states = GeneratorStates.now()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """These states while the block runs, on the CPU; behind it all generators, torch's too, are as before."""
        with kept_python():
            self._states.put_back()
            try:
                with kept_generators(torch.device("cpu")):
                    yield
            finally:
                self._states = GeneratorStates.now()


def seed_modules(modules: Mapping[str, nn.Module], names: Iterable[str]) -> None:
    """Have each of the named modules begin its forwards with generators that are seeded by its name."""

    def seed(name: str, *_: object) -> None:
        seed_python(zlib.crc32(name.encode()))

    for name in names:
        modules[name].register_forward_pre_hook(partial(seed, name))
