"""A model without memory, and any part of it with its true initial values.

`DeferredModel` runs the user's builder on the meta device and records what the builder does to its tensors.
`materialise` replays just what the wanted tensors depend on. Random draws are replayed for every tensor, into scratch
memory where the tensor is not wanted: the generator then passes through the same states as in a plain

    torch.manual_seed(seed); model = builder()

and each part gets, to the last bit, the values that it has there. At no time does more than the wanted part and one
scratch tensor exist. Tensors are followed by their storage, so views, `.data =` and module.to() need no special care.

Source of the idea: deferred initialisation by record and replay, as in torchdistx (2022).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from assigner.errors import AssignerError, UsageError
from assigner.usercode import user_code, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_META = torch.device("meta")


def _is_meta(tensor: torch.Tensor) -> bool:
    """Not by `tensor.is_meta`, of which `_LooksReal` gives another account."""
    return tensor.device == _META


@dataclass(frozen=True)
class _View:
    """A meta tensor as it was when a call saw it: which storage, and how it looks at it."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        storage = tensor.untyped_storage()._cdata
        return cls(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class _Call:
    """One recorded operation; meta tensors among its arguments and results are views."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    writes: bool
    is_random: bool
    random_state: torch.Tensor | None

    def reads(self) -> set[int]:
        return {leaf.storage for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _View)}

    def makes(self) -> set[int]:
        return {leaf.storage for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, _View)}


class _NoValueError(AssignerError):
    """The builder asked for a value that depends on a random draw."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every call on the meta device, and keeps it.

    Draws on the meta device leave the generator alone, so a change of its state between two draws is the builder's
    own seeding; the state is then kept with the draw.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive: a freed one's number is given again
        self.state = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _is_meta(args[0]):
            return self.value(args[0])
        on_meta = {name: _META if isinstance(word, torch.device) else word for name, word in kwargs.items()}
        if any(word.name == "device" for word in func._schema.arguments):
            on_meta["device"] = _META
        result = func(*self.on_meta(args), **self.on_meta(on_meta))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.keep(func, args, kwargs, result, writes=func._schema.is_mutable, is_random=is_random)
        return result

    @staticmethod
    def on_meta(tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor if _is_meta(tensor) else tensor.to(_META), tree)

    def views(self, tree: Any) -> Any:
        def view(tensor: torch.Tensor) -> torch.Tensor | _View:
            if not _is_meta(tensor):
                return tensor
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage
            return _View.of(tensor)

        return pytree.tree_map_only(torch.Tensor, view, tree)

    def keep(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, writes: bool, is_random: bool
    ) -> None:
        """Record one call, and the generator's state where the builder has set it."""
        state = None
        if is_random:
            with _disable_current_modes():
                now = torch.get_rng_state()
                if not torch.equal(now, self.state):
                    self.state = state = now
        seen_args, seen_kwargs, made = self.views((args, kwargs, result))
        self.calls.append(_Call(func, seen_args, seen_kwargs, made, writes, is_random, state))

    def value(self, tensor: torch.Tensor) -> Any:
        """A number that the builder asks for, worked out from the calls so far; no draw may be among them."""
        view = _View.of(tensor)
        replay = _Replay(self.calls, {view.storage})
        if any(call.is_random for call in replay.needed_calls()):
            raise _NoValueError("the value of a random tensor")
        with _disable_current_modes():
            return replay.run(None)[view.storage].look(view).item()

    @contextlib.contextmanager
    def rejection_sampling(self) -> Iterator[None]:
        """Record a truncated normal as one call: it draws until its values are in range, and there are none yet."""
        sampler = nn.init._no_grad_trunc_normal_

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not _is_meta(tensor):
                return sampler(tensor, *args, **kwargs)
            self.keep(sampler, (tensor, *args), kwargs, tensor, writes=True, is_random=True)
            return tensor

        with mock.patch.object(nn.init, "_no_grad_trunc_normal_", record):
            yield


class _LooksReal(TorchFunctionMode):
    """Says of every tensor that it is not on the meta device: torch.nn.init leaves some of those as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


class DeferredModel:
    """A model as its builder makes it, on the meta device.

    Args:
        builder: Makes the model.
        seed: What the generator is seeded with before the builder runs.

    Attributes:
        model: The module tree; its parameters and buffers are meta tensors.

    Raises:
        UsageError: the builder looks at random values, which do not exist yet, or makes no module.
    """

    def __init__(self, builder: Callable[[], nn.Module], *, seed: int) -> None:
        self.seed = seed
        kept = torch.get_rng_state()
        try:
            torch.manual_seed(seed)
            with user_code("Workload.model"), _Recorder() as recorder, recorder.rejection_sampling(), _LooksReal():
                self.model = builder()
        except _NoValueError as error:
            raise UsageError(
                f"the model's builder reads a random tensor's value at {user_line(error)}; there are none yet",
                hint="compute that number with plain Python (math, random) instead of tensors",
            ) from error
        finally:
            torch.set_rng_state(kept)
        if not isinstance(self.model, nn.Module):
            raise UsageError(f"Workload.model gave {type(self.model).__name__}", hint="it must return an nn.Module")
        self._calls, self._storages = recorder.calls, recorder.storages

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by name; names that share one tensor all stand here."""
        found: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        found.update(self.model.named_buffers(remove_duplicate=False))
        return found

    @contextlib.contextmanager
    def mode(self, *, training: bool) -> Iterator[None]:
        """The model in the mode that it was built in (training), or after its own `eval()`, while the block runs."""
        flags = self.flags(training=training)
        before = {module: module.training for module in self.model.modules()}
        for name, module in self.model.named_modules():
            module.training = flags[name]
        try:
            yield
        finally:
            for module, flag in before.items():
                module.training = flag

    def flags(self, *, training: bool) -> dict[str, bool]:
        """Each submodule's `training`, by name: as it was built, or after the model's own `eval()`."""
        before = {module: module.training for module in self.model.modules()}
        try:
            if not training:
                self.model.eval()
            return {name: module.training for name, module in self.model.named_modules()}
        finally:
            for module, flag in before.items():
                module.training = flag

    def materialise(self, names: Iterable[str], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The named parameters and buffers with their initial values.

        Args:
            names: Names in the model; two names of one tensor give one tensor.
            device: Where the tensors go; they are made on the CPU, so that every device starts from the same values.

        Returns:
            name -> tensor; parameters are `nn.Parameter` and keep `requires_grad`. A tensor that was there before the
            builder ran is copied: it is the user's own.
        """
        known = self.tensors()
        wanted = {name: known[name] for name in names}
        storages = {tensor.untyped_storage()._cdata for tensor in wanted.values() if _is_meta(tensor)}
        memory = _Replay(self._calls, storages).run(self.seed)
        made: dict[int, torch.Tensor] = {}
        for tensor in wanted.values():
            if id(tensor) not in made:
                view = _View.of(tensor)
                value = memory[view.storage].look(view) if _is_meta(tensor) else tensor.detach().clone()
                value = value.to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        return {name: made[id(tensor)] for name, tensor in wanted.items()}


@dataclass(frozen=True)
class _Memory:
    """Real memory behind a recorded storage."""

    storage: torch.UntypedStorage

    def look(self, view: _View) -> torch.Tensor:
        return torch.empty(0, dtype=view.dtype).set_(self.storage, view.offset, view.size, view.stride)


class _Replay:
    """Runs the recorded calls that the wanted storages depend on, and every random draw."""

    def __init__(self, calls: list[_Call], wanted: set[int]) -> None:
        self.calls = calls
        self.wanted = wanted
        self.needed = self._needed()
        self.end = max((n + 1 for n, needed in enumerate(self.needed) if needed), default=0)
        self.last_use = {
            storage: n for n, call in enumerate(calls) if self.needed[n] for storage in call.reads() | call.makes()
        }
        self.memory: dict[int, _Memory] = {}

    def _needed(self) -> list[bool]:
        """Backwards from the end: a call is needed if a needed storage is among what it makes or writes."""
        alive, needed = set(self.wanted), []
        for call in reversed(self.calls):
            touched = call.makes() | (call.reads() if call.writes else set())
            needed.append(bool(touched & alive))
            if needed[-1]:
                alive |= call.reads()
        return needed[::-1]

    def needed_calls(self) -> list[_Call]:
        """The calls that the wanted storages depend on."""
        return [call for call, needed in zip(self.calls, self.needed, strict=True) if needed]

    def run(self, seed: int | None) -> dict[int, _Memory]:
        """The wanted storages' memory. With a seed every draw is replayed; None: no draw is among the needed calls."""
        kept = torch.get_rng_state()
        try:
            if seed is not None:
                torch.manual_seed(seed)
            with torch.no_grad():
                for position, call in enumerate(self.calls[: self.end]):
                    if call.random_state is not None:
                        torch.set_rng_state(call.random_state)
                    if self.needed[position]:
                        self._call(call, self._real)
                        self._free(call, position)
                    elif call.is_random and seed is not None:
                        self._call(call, _scratch)
        finally:
            torch.set_rng_state(kept)
        return self.memory

    def _call(self, call: _Call, real: Callable[[Any], Any]) -> None:
        """Run one call on real tensors; what it makes is remembered, unless it ran on scratch memory."""
        kwargs = {
            name: torch.device("cpu") if isinstance(word, torch.device) else word for name, word in call.kwargs.items()
        }
        result = call.function(*real(call.args), **real(kwargs))
        if real is _scratch:
            return
        for view, value in zip(pytree.tree_leaves(call.result), pytree.tree_leaves(result), strict=True):
            if isinstance(view, _View) and view.storage not in self.memory:
                same = value.stride() == view.stride and value.storage_offset() == view.offset
                kept = value if same else torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(value)
                self.memory[view.storage] = _Memory(kept.untyped_storage())

    def _free(self, call: _Call, position: int) -> None:
        for storage in call.reads() | call.makes():
            if self.last_use[storage] == position and storage not in self.wanted:
                self.memory.pop(storage, None)

    def _real(self, tree: Any) -> Any:
        return pytree.tree_map_only(_View, lambda view: self.memory[view.storage].look(view), tree)


def _scratch(tree: Any) -> Any:
    """Memory of the same shape and strides: a draw takes as much from the generator as the true one."""
    return pytree.tree_map_only(_View, lambda view: torch.empty_strided(view.size, view.stride, dtype=view.dtype), tree)
