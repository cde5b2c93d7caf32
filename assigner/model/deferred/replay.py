"""What a builder did to its tensors, as a list of calls, and running again those that some of the tensors depend on.

Each draw starts at a state that the builder has set, or where an earlier draw has ended. Draws on the meta device leave
a generator alone, so after each of them the generator is given a state that no generator comes to by itself, its mark.
A generator that is found at a mark goes on where that draw has ended; this holds for a state that was kept and set
again, for forks, and for a generator that took over another's state. Any other state is a seed. What cannot be followed
so, or in another way, is a `BuilderError`.

Python's generator and NumPy's draw true values meanwhile. Of these it is noted where a builder's own seeds fall.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from assigner.errors import AssignerError, UsageError
from assigner.machine.generators import GeneratorStates
from assigner.model.deferred.memento import placed
from assigner.model.deferred.mutation import ElementPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHECK = torch.ops.aten._linalg_check_errors.default
# 64-bit words of a state amid the Mersenne Twister's own, which have 32 bits each. The seed, that torch.initial_seed()
# tells, lies outside.
_SIGN, _NUMBER = 300, 301
_MARKED = 0xA551_6E4D


@dataclass(frozen=True)
class View:
    """A meta tensor as it was when a call saw it: which storage, and how it looks at it."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that a tensor is."""
        storage = tensor.untyped_storage()._cdata
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def look(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """What it shows of true memory in that storage's place."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )

    def extent(self) -> int:
        """Bytes from the storage's start to the view's last element."""
        return ElementPlaces(self.offset, self.size, self.stride).end * self.dtype.itemsize if self.size.numel() else 0


@dataclass(frozen=True)
class Call:
    """One recorded operation; meta tensors among its arguments and results are views."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    writes: frozenset[int]  # storages
    source: torch.Tensor | int | None  # where a draw starts: a generator's state, or where the call of that number ends
    by_values: bool  # a draw takes as much from the generator as the values among its arguments say
    default: torch.dtype  # of numbers when the builder made the call

    def reads(self) -> set[int]:
        """The storages among the arguments."""
        return {leaf.storage for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, View)}

    def makes(self) -> set[int]:
        """The storages among the results."""
        return {leaf.storage for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, View)}

    def constants(self) -> set[int]:
        """The storages of the tensors with memory among the arguments: the user's own."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}


class Replay:
    """Runs the recorded calls that the wanted storages depend on (`needed`), and the draws that come before theirs.

    Those run on scratch memory (`drawn`), to bring their generator where the next draw starts.
    """

    def __init__(self, calls: list[Call], wanted: set[int]) -> None:
        self.calls = calls
        self.wanted = wanted
        self.needed, self.drawn = self._plan()
        self.last_use = {
            storage: n for n in sorted(self.needed) for storage in self.calls[n].reads() | self.calls[n].makes()
        }
        self.last_follower = {
            source: n for n in self.steps() if isinstance(source := self.calls[n].source, int)
        }  # of each draw, the last one that starts where it has ended
        self.memory: dict[int, torch.UntypedStorage] = {}
        self.ends: dict[int, torch.Tensor] = {}

    def _plan(self) -> tuple[set[int], set[int]]:
        """Backwards from the end: a call is needed if a needed storage is among what it makes or writes."""
        alive, followed = set(self.wanted), set()
        needed, drawn = set(), set()
        for n in reversed(range(len(self.calls))):
            call = self.calls[n]
            if (call.makes() | call.writes) & alive or (n in followed and call.by_values):
                needed.add(n)
                alive |= call.reads()
            elif n in followed:
                drawn.add(n)
            else:
                continue
            if isinstance(call.source, int):
                followed.add(call.source)
        return needed | self._checks(needed), drawn

    def _checks(self, needed: set[int]) -> set[int]:
        """The calls that only raise where an inverse or the like of the needed ones does not exist."""
        checks = [n for n, call in enumerate(self.calls) if call.function is _CHECK]
        made = {storage for n in needed for storage in self.calls[n].makes()} if checks else set()
        return {n for n in checks if self.calls[n].reads() <= made}

    def steps(self) -> list[int]:
        """The numbers of the calls that run, in order."""
        return sorted(self.needed | self.drawn)

    def draws(self) -> bool:
        """True if a draw is among the calls that run."""
        return any(self.calls[n].source is not None for n in self.steps())

    def run(self) -> dict[int, torch.UntypedStorage]:
        """The wanted storages' memory; the caller's generator and default type are left as they were."""
        kept, default = torch.get_rng_state(), torch.get_default_dtype()
        try:
            with torch.no_grad(), _disable_current_modes():  # whoever watches draws sees none of these
                for n in self.steps():
                    torch.set_default_dtype(self.calls[n].default)
                    with self._drawing(n):
                        self._call(n)
                    self._free(n)
        finally:
            torch.set_rng_state(kept)
            torch.set_default_dtype(default)
        return self.memory

    @contextlib.contextmanager
    def _drawing(self, n: int) -> Iterator[None]:
        """Bring the generator where a draw starts, and keep where it ends while another one goes on there."""
        source = self.calls[n].source
        if source is not None:
            torch.set_rng_state(self.ends[source] if isinstance(source, int) else source)
        yield
        if n in self.last_follower:
            self.ends[n] = torch.get_rng_state()
        if isinstance(source, int) and self.last_follower[source] == n:
            del self.ends[source]

    def _call(self, n: int) -> None:
        """Run one call on real tensors; what it makes is remembered, unless it runs on scratch memory."""
        call = self.calls[n]
        real: Callable[[Any], Any] = self._real if n in self.needed else _scratch
        kwargs = {
            name: torch.device("cpu") if isinstance(word, torch.device) else word for name, word in call.kwargs.items()
        }
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, real((call.args, kwargs)))  # torch.tensor's
        try:
            result = alike(call.function)(*args, **kwargs)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise UsageError(f"the model's builder: {error}") from error
        if n in self.drawn:
            return
        for view, value in zip(pytree.tree_leaves(call.result), pytree.tree_leaves(result), strict=True):
            if isinstance(view, View) and view.storage not in self.memory:
                if self.last_use[view.storage] > n or view.storage in self.wanted:
                    _check_size(call, view, value)
                self.memory[view.storage] = _remember(view, value, call.constants())

    def _free(self, n: int) -> None:
        if n in self.needed:
            for storage in self.calls[n].reads() | self.calls[n].makes():
                if self.last_use[storage] == n and storage not in self.wanted:
                    self.memory.pop(storage, None)

    def _real(self, tree: Any) -> Any:
        return pytree.tree_map_only(View, lambda view: view.look(self.memory[view.storage]), tree)


def alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recorded function, or one that gives what it gives to the same bits each time."""
    return _least_squares if function is torch.ops.aten.linalg_lstsq.default else function


def _least_squares(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    """The default way, gelsy, reads memory that torch has not set: ranks with copies would have unlike last bits."""
    if driver not in (None, "gelsy"):
        return tuple(torch.linalg.lstsq(a, b, rcond=rcond, driver=driver))
    found = torch.linalg.lstsq(a, b, rcond=rcond, driver="gelsd")
    none = found.residuals.new_empty(0)
    return found.solution, none, found.rank, none


def _check_size(call: Call, view: View, value: torch.Tensor) -> None:
    """Refuse what has turned out to be of another size than the builder was told."""
    if value.size() != view.size:
        raise UsageError(
            f"the model's builder: {call.function} gives {list(value.size())} for its values, and not"
            f" {list(view.size)} as for others",
            hint="work it out in the function that makes the workload, and have the builder copy it",
        )


def _remember(view: View, value: torch.Tensor, constants: set[int]) -> torch.UntypedStorage:
    """The memory of a value; never a constant's own, which the builder's later calls would change."""
    storage = value.untyped_storage()
    if value.stride() == view.stride and value.storage_offset() == view.offset:
        return storage.clone() if storage._cdata in constants else storage  # type: ignore[no-untyped-call]
    memory = torch.UntypedStorage(view.extent())  # type: ignore[no-untyped-call]
    view.look(memory).copy_(value)
    return memory


def _scratch(tree: Any) -> Any:
    """Memory of the same shape and strides: a draw takes as much from the generator as the true one."""
    return pytree.tree_map_only(
        View, lambda view: torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="cpu"), tree
    )


class BuilderError(AssignerError):
    """The builder does what cannot be replayed; the message is what, as in "the model's builder ... at LINE"."""


class Draws:
    """The marks that a builder's draws have left, and the generators that it draws from."""

    def __init__(self) -> None:
        self.marks: dict[bytes, int] = {}  # a state -> the number of the call whose end it stands for
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}  # each with its state before all draws

    def start(self, generator: torch.Generator, number: int) -> torch.Tensor | int:
        """Mark a generator as one from which call `number` has drawn.

        From where that call draws is returned: a generator's state, or the number of the call where it goes on.

        Raises:
            BuilderError: the generator is another device's.
        """
        if generator.device.type != "cpu":
            raise BuilderError(
                f"draws from a generator on {generator.device}",
                hint="give it a generator on the CPU: first values are made there, the same for every device",
            )
        with _disable_current_modes():
            state = generator.get_state()
            self.generators.setdefault(id(generator), (generator, state))
            mark = state.clone()
            words = mark.view(torch.int64)
            words[_SIGN], words[_NUMBER] = _MARKED, number
            generator.set_state(mark)
            source = self.marks.get(fingerprint(state.numpy()), state)
            self.marks[fingerprint(mark.numpy())] = number
        return source

    def restore(self) -> None:
        """Give every generator the state that it had before the builder drew from it."""
        for generator, state in self.generators.values():
            generator.set_state(state)


class SharedDraws:
    """The states that a builder draws from of the generators of Python and of NumPy that all code shares.

    before -> random.seed(42) -> draws -> random.seed(7)       42's alone: nobody has drawn from what was before
    """

    _SEEDING = ((random, "seed"), (random, "setstate"), (np.random, "seed"), (np.random, "set_state"))

    def __init__(self) -> None:
        self.python: list[Any] = []
        self.numpy: list[Any] = []
        self._start = GeneratorStates.now()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note those of the block. A function for seeding that was imported by its own name before is not seen."""
        with placed((module, name, self._setting(getattr(module, name))) for module, name in self._SEEDING):
            yield
            self._end()

    def _setting(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_anew(*args: Any, **words: Any) -> None:
            self._end()
            original(*args, **words)
            self._start = GeneratorStates.now()

        return set_anew

    def _end(self) -> None:
        start, now = self._start, GeneratorStates.now()
        if start.python != now.python:
            self.python.append(start.python)
        if start.numpy != now.numpy:
            self.numpy.append(start.numpy)


def fingerprint(array: np.ndarray[Any, Any]) -> bytes:
    """What tells an array's values from others."""
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()
