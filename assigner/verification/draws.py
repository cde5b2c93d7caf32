"""Random draws that can be compared: the same wherever they are made, and in whatever order.

A pipeline seeds the generator anew for each partition and micro-batch, a plain loop does not: their dropout masks
differ, and are meant to. For the comparison each random operation is given a generator that is seeded from what it is
(its name, the shapes that it reads) and from the step: both sides draw the same there.

Python's own generator and NumPy's cannot be reached so. Each side goes on from a state of its own, as each process of a
real run does, so that what depends on them shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from typing import TYPE_CHECKING, Any

import numpy.random  # noqa: F401 - loaded before the sides begin: each has a state of it
import torch
from torch.utils import _pytree as pytree

from assigner.machine.generators import GeneratorStates, kept_python
from assigner.model.deferred.mutation import Watching
from assigner.runtime.forward.randomness import kept_generators, seed_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn


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
    """What one side of the comparison draws from: a state of Python's and NumPy's generators that it goes on from.

    Args:
        seed: What it begins with.
    """

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

    def seeding(name: str) -> Callable[..., None]:
        return lambda *_: seed_python(zlib.crc32(name.encode()))

    for name in names:
        modules[name].register_forward_pre_hook(seeding(name))
