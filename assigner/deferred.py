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
from assigner.replay import Call, Replay, View
from assigner.usercode import user_code, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_META = torch.device("meta")


def _is_meta(tensor: torch.Tensor) -> bool:
    """What it is, whatever `_LooksReal` says of it."""
    with torch._C.DisableTorchFunction():
        return tensor.device == _META


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class _Given:
    """A call that gives tensors which were worked out already."""

    tensors: tuple[torch.Tensor, ...]

    def __call__(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.tensors]


class _LoadedError(AssignerError):
    """The builder changes or converts a tensor that it has loaded."""


class _NoValueError(AssignerError):
    """The builder asked for a value that depends on a random draw."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every call on the meta device, and keeps it.

    Draws on the meta device leave the generator alone, so a change of its state between two draws is the builder's
    own seeding; the state is then kept with the draw.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive: a freed one's number is given again
        self.meta: set[int] = set()  # of them, those that the builder itself has put on the meta device
        self.state = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # torch's own meta functions look at devices: they see the true ones
            return self.record(func, args, kwargs or {})

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call; what it asks for on a device it gets on the meta device."""
        if func is torch.ops.aten._local_scalar_dense.default and _is_meta(args[0]):
            return self.real(args[0]).item()
        _check_loaded(func, args)
        on_meta = {name: _META if isinstance(word, torch.device) else word for name, word in kwargs.items()}
        if any(word.name == "device" for word in func._schema.arguments):
            on_meta["device"] = _META
        try:
            result = func(*self.on_meta(args), **self.on_meta(on_meta))
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            return self.from_values(func, args, kwargs)  # nonzero, equal: shapes do not tell what comes out
        without_memory = self.wants_meta(args, kwargs)
        if without_memory and func._schema.is_mutable:
            return result  # values that are nowhere; whoever makes a tensor like this one wants its shape alone
        if without_memory:
            self.meta.update(_storage(each) for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor))
        is_random = torch.Tag.nondeterministic_seeded in func.tags and not without_memory
        self.keep(func, args, kwargs, result, writes=func._schema.is_mutable, is_random=is_random)
        return result

    def wants_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The builder itself asks for the meta device, by name or by a tensor that it has there: nothing is drawn."""
        if kwargs.get("device") is not None:
            return bool(kwargs["device"] == _META)
        return any(self.is_meant(each) for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor))

    def is_meant(self, tensor: torch.Tensor) -> bool:
        """True if the builder itself has put a tensor on the meta device; torch.tensor does so unseen by a mode."""
        storage = _storage(tensor)
        return _is_meta(tensor) and (storage in self.meta or storage not in self.storages)

    @staticmethod
    def on_meta(tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor if _is_meta(tensor) else tensor.to(_META), tree)

    def views(self, tree: Any) -> Any:
        def view(tensor: torch.Tensor) -> torch.Tensor | View:
            if not _is_meta(tensor):
                return tensor
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage
            return View.of(tensor)

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
        self.calls.append(Call(func, seen_args, seen_kwargs, made, writes, is_random, state))

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that the builder asks for, worked out from the calls so far; no draw may be among them."""
        view = View.of(tensor)
        replay = Replay(self.calls, {view.storage})
        if any(call.is_random for call in replay.needed_calls()):
            raise _NoValueError("the value of a random tensor")
        with _disable_current_modes():
            return replay.run(None)[view.storage].look(view)

    def from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call on real values; tensors that it makes are constants from then on."""

        def real(tree: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, lambda each: self.real(each) if _is_meta(each) else each, tree)

        mine, words = real(args), real(kwargs)
        with _disable_current_modes():
            found = func(*mine, **words)
        result = self.on_meta(found)
        given = _Given(tuple(each for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)))
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.keep(given, (), {}, made, writes=False, is_random=False)
        return result

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


def _check_loaded(func: Any, args: tuple[Any, ...]) -> None:
    """Tensors with memory (loaded weights) stay what they are: a change would be made to a copy, and be lost.

    Raises:
        _LoadedError: one is written to, or is a parameter that is converted, which would part it from its ties.
    """
    converts = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
    writes = func._schema.is_mutable and isinstance(args[0], torch.Tensor)
    if (converts or writes) and not _is_meta(args[0]):
        raise _LoadedError("converts" if converts else "changes")


class _LooksReal(TorchFunctionMode):
    """Says of tensors on the meta device that they are on the CPU.

    torch.nn.init and transformers give values to no others. Where the builder itself has asked for the meta device the
    truth is told.

    What hands a tensor's values to Python gets them from the recorder.
    """

    _IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]
    _READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__)

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (self._IS_META, self._DEVICE) and not self.recorder.is_meant(args[0]):
            return False if func == self._IS_META else torch.device("cpu") if _is_meta(args[0]) else func(*args)
        if func in self._READERS and _is_meta(args[0]):
            args = (self.recorder.real(args[0]), *args[1:])
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class DeferredModel:
    """A model as its builder makes it, on the meta device.

    Args:
        builder: Makes the model.
        seed: What the generator is seeded with before the builder runs.

    Attributes:
        model: The module tree; its parameters and buffers are meta tensors.

    Raises:
        UsageError: the builder looks at random values, which do not exist yet, changes tensors that it has loaded, or
            makes no module.
    """

    def __init__(self, builder: Callable[[], nn.Module], *, seed: int) -> None:
        self.seed = seed
        kept = torch.get_rng_state()
        try:
            torch.manual_seed(seed)
            with (
                user_code("Workload.model"), _Recorder() as recorder, recorder.rejection_sampling(),
                _LooksReal(recorder),
            ):  # fmt: skip
                self.model = builder()
        except _NoValueError as error:
            raise UsageError(
                f"the model's builder reads a random tensor's value at {user_line(error)}; there are none yet",
                hint="compute that number with plain Python (math, random) instead of tensors",
            ) from error
        except _LoadedError as error:
            raise UsageError(
                f"the model's builder {error} a loaded tensor at {user_line(error)}",
                hint="load a state_dict before, in the function that makes the workload; the builder makes the model,"
                " converts it, and ends with model.load_state_dict(state)",
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
        memory = Replay(self._calls, storages).run(self.seed)
        made: dict[int, torch.Tensor] = {}
        for tensor in wanted.values():
            if id(tensor) not in made:
                view = View.of(tensor)
                value = memory[view.storage].look(view) if _is_meta(tensor) else tensor.detach().clone()
                value = value.to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        return {name: made[id(tensor)] for name, tensor in wanted.items()}
