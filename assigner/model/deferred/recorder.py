"""Runs a builder's calls on the meta device, and keeps them for the replay."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from assigner.errors import UsageError
from assigner.model.deferred.draws import BuilderError, Draws
from assigner.model.deferred.mutation import written_tensors
from assigner.model.deferred.replay import Call, Replay, View
from assigner.usercode import running_line

if TYPE_CHECKING:
    from collections.abc import Iterator

META = torch.device("meta")
_LOADED_HINT = (
    "load a state_dict before, in the function that makes the workload; the builder makes the model, converts it, and"
    " ends with model.load_state_dict(state)"
)


def is_meta(tensor: torch.Tensor) -> bool:
    """What it is, whatever `LooksReal` says of it."""
    with torch._C.DisableTorchFunction():
        return tensor.device == META


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _KnownTensors:
    """A call that gives tensors which were worked out already."""

    tensors: tuple[torch.Tensor, ...]

    def __call__(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.tensors]


@dataclass(frozen=True)
class _Unseen:
    """A call that stands for one which torch has kept to itself: the tensor came without its values."""

    where: str

    def __call__(self) -> torch.Tensor:
        raise UsageError(
            f"the values of a tensor that the model's builder uses {self.where} are not known: it was made on the meta"
            " device, unseen",
            hint="make it with torch.tensor(...) and no device; index with such a tensor, not with lists in a list",
        )


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every call on the meta device, and keeps it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive: a freed one's number is given again
        self.meta: set[int] = set()  # of them, those that the builder itself has put on the meta device
        self.draws = Draws()
        self.asks_meta, self.under_autocast = True, False  # the builder's call that runs: torch's C++ makes many of one

    @contextlib.contextmanager
    def within(self, *, asks_meta: bool, under_autocast: bool) -> Iterator[None]:
        """The block is one call of the builder: whether that names the meta device, and is under autocast."""
        before = self.asks_meta, self.under_autocast
        self.asks_meta, self.under_autocast = asks_meta, under_autocast
        try:
            yield
        finally:
            self.asks_meta, self.under_autocast = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # torch's own meta functions look at devices: they see the true ones
            return self.record(func, args, kwargs or {})

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call; what it asks for on a device it gets on the meta device."""
        if func is torch.ops.aten._local_scalar_dense.default and is_meta(args[0]):
            return self.real(args[0]).item()
        written = written_tensors(func, args, kwargs)
        _check_loaded(func, args, written)
        if self.under_autocast:
            _check_autocast(func)
        self.keep_unseen((args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        on_meta = {name: META if isinstance(word, torch.device) else word for name, word in kwargs.items()}
        if any(word.name == "device" for word in func._schema.arguments):
            on_meta["device"] = META
        try:
            result = func(*self.on_meta(args), **self.on_meta(on_meta))
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            if not is_random:
                return self.from_values(func, args, kwargs)  # nonzero, equal: shapes do not tell what comes out
            result = self.on_meta(_on_ones(func, args, kwargs))
        without_memory = any(map(self.is_meant, written)) if written else self.wants_meta(args, kwargs)
        if without_memory and written:
            return result  # values that are nowhere; whoever makes a tensor like this one wants its shape alone
        if without_memory:
            self.meta.update(map(_storage, _tensors(result)))
        self.keep(func, args, kwargs, result, written=written, is_random=is_random and not without_memory)
        return result

    def wants_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The builder itself asks for the meta device, by name or by a tensor that it has there: nothing is drawn.

        Where it does not, a call on the meta device is torch's own, beside a tensor that lies there.
        """
        device = kwargs.get("device")
        if device is not None and (device != META or self.asks_meta):
            return bool(device == META)
        return any(self.is_meant(each) for each in _tensors(args))

    def is_meant(self, tensor: torch.Tensor) -> bool:
        """True if the builder itself has put a tensor on the meta device; torch.tensor does so unseen by a mode."""
        return is_meta(tensor) and (_storage(tensor) in self.meta or _storage(tensor) not in self.storages)

    @staticmethod
    def on_meta(tree: Any) -> Any:
        """The same with every tensor on the meta device."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor if is_meta(tensor) else tensor.to(META), tree)

    def views(self, tree: Any) -> Any:
        """The same with a view for each meta tensor; generators are the replay's matter."""

        def view(tensor: torch.Tensor) -> torch.Tensor | View:
            if not is_meta(tensor):
                return tensor
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage
            return View.of(tensor)

        tree = pytree.tree_map_only(torch.Tensor, view, tree)
        return pytree.tree_map_only(torch.Generator, lambda _: None, tree)

    def keep(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        written: list[torch.Tensor],
        is_random: bool,
    ) -> None:
        """Record one call, and where it draws from."""
        source, by_values = None, False
        if is_random:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
            source = self.draws.start(given[0] if given else torch.default_generator, len(self.calls))
            shape_alone = getattr(func, "__name__", "").partition(".")[0].endswith("_like")
            by_values = not shape_alone and len(_tensors((args, kwargs))) > len(written)
        seen_args, seen_kwargs, made = self.views((args, kwargs, result))
        writes = frozenset(_storage(each) for each in written if is_meta(each))
        default = torch.get_default_dtype()
        self.calls.append(Call(func, seen_args, seen_kwargs, made, writes, source, by_values, default))

    def keep_unseen(self, tree: Any, where: str | None = None) -> None:
        """Record the making of tensors that torch's C++ has made without a call: there are no values of them."""
        for tensor in _tensors(tree):
            if is_meta(tensor) and _storage(tensor) not in self.storages:
                self.meta.add(_storage(tensor))
                self.keep(_Unseen(where or f"at {running_line()}"), (), {}, tensor, written=[], is_random=False)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that the builder asks for, worked out from the calls so far; no draw may be among them."""
        self.keep_unseen(tensor)
        view = View.of(tensor)
        replay = Replay(self.calls, {view.storage})
        if replay.draws():
            raise BuilderError(
                "reads a random tensor's value",
                hint="there are none before a part is made; compute a number with plain Python (math, random) instead"
                " of tensors. parametrizations.orthogonal reads the whole weight: it reads none with"
                " orthogonal_map='cayley' (or 'matrix_exp') and use_trivialization=False",
            )
        with _disable_current_modes():
            return replay.run()[view.storage].look(view)

    def from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call on real values; tensors that it makes are constants from then on."""

        def real(tree: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, lambda each: self.real(each) if is_meta(each) else each, tree)

        mine, words = real(args), real(kwargs)
        with _disable_current_modes():
            found = func(*mine, **words)
        result = self.on_meta(found)
        self.keep(_KnownTensors(tuple(_tensors(found))), (), {}, _tensors(result), written=[], is_random=False)
        return result

    @contextlib.contextmanager
    def rejection_sampling(self) -> Iterator[None]:
        """Record a truncated normal as one call: it draws until its values are in range, and there are none yet."""
        sampler = nn.init._no_grad_trunc_normal_

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not is_meta(tensor):
                return sampler(tensor, *args, **kwargs)
            if not self.is_meant(tensor):
                self.keep(sampler, (tensor, *args), kwargs, tensor, written=[tensor], is_random=True)
            return tensor

        with mock.patch.object(nn.init, "_no_grad_trunc_normal_", record):
            yield


def _check_loaded(func: Any, args: tuple[Any, ...], written: list[torch.Tensor]) -> None:
    """Tensors with memory (loaded weights) stay what they are: a change would be made to a copy, and be lost.

    Raises:
        BuilderError: one is written to, or is a parameter that is converted, which would part it from its ties.
    """
    if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter) and not is_meta(args[0]):
        raise BuilderError("converts a loaded tensor", hint=_LOADED_HINT)
    if any(not is_meta(each) for each in written):
        raise BuilderError("changes a loaded tensor", hint=_LOADED_HINT)


def _check_autocast(func: Any) -> None:
    """Autocast chooses types by the device of the tensors, and would leave those on the meta device alone.

    Raises:
        BuilderError: the call is one whose types it chooses.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU"):
        raise BuilderError(
            f"calls {func.name().removeprefix('aten::')} under torch.autocast",
            hint="leave autocast to the forward pass; in the builder, convert with .to(dtype)",
        )


def _on_ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a draw that torch cannot run on the meta device gives, in shape and type."""
    words = dict(zip((word.name for word in func._schema.arguments), args, strict=False)) | kwargs
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        ones = pytree.tree_map_only(
            torch.Tensor, lambda each: torch.ones(each.shape, dtype=each.dtype, device="cpu"), words
        )
        return func(**pytree.tree_map_only(torch.Generator, lambda _: None, ones))
