"""Runs a builder's calls on the meta device and keeps them for the replay; what the builder sees of that device.

It sees nothing of it, unless it asked for it.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from assigner.errors import AssignerError, UsageError
from assigner.model.deferred.memento import placed
from assigner.model.deferred.mutation import named_arguments, tensor_leaves, written_tensors
from assigner.model.deferred.replay import BuilderError, Call, Draws, Replay, View, alike, fingerprint
from assigner.usercode import running_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

META = torch.device("meta")
_DATA_PTR = torch.UntypedStorage.data_ptr
_NOWHERE, _PLACE_BITS = 1 << 62, 40
"""No process has memory there; and so far apart are the places of storages that have none."""
_LOADED_HINT = (
    "load a state_dict before, in the function that makes the workload; the builder makes the model, converts it, and"
    " ends with model.load_state_dict(state)"
)

_NONE_YET = (
    "there are none before a part is made. What is to follow from first weights, as a mask of the smallest, is done in"
    " the training script over pipeline.named_parameters(), or to a state_dict that was saved before and that the"
    " builder loads; numbers that the builder needs are for plain Python (math), alike on every rank"
)
_WITHOUT_FILE = (
    "there are none before a part is made: copy them within the builder by load_state_dict(other.state_dict()) or"
    " copy.deepcopy; or load what was saved before, in another program"
)

_COPY_FIRST = (
    "the tensor does not have it: write to a copy, array = tensor.numpy().copy(), and make the tensor of that by"
    " torch.from_numpy(array)"
)


def is_meta(held: torch.Tensor | torch.UntypedStorage) -> bool:
    """What it is, whatever `LooksReal` says of it."""
    with torch._C.DisableTorchFunction():
        return held.device == META


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A call that gives tensors which were worked out already."""
    return [each.clone() for each in tensors]


def _unseen(where: str) -> NoReturn:
    """A call that stands for one which torch has kept to itself: the tensor came without its values."""
    raise UsageError(
        f"the values of a tensor that the model's builder uses {where} are not known: it was made on the meta device,"
        " unseen",
        hint="make it with torch.tensor(...) and no device; index with such a tensor, not with lists in a list",
    )


SPARSE = (
    "register a dense buffer and take .to_sparse() of it in a marked module's forward; or keep one that was made before"
    " the builder runs as a plain attribute"
)
"""What to do instead of building one."""

_BY_VALUES = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
"""Of operations that give sizes, or tell Python something, by values."""
_OF_FULL_RANK = frozenset({torch.ops.aten.linalg_lstsq.default})
"""Operations with such a tag whose sizes hang on values only where a matrix has no full rank; a replay looks."""

_VALUES_ALONE = frozenset({
    torch.linalg.svdvals, torch.linalg.eigvals, torch.linalg.eigvalsh, torch.linalg.matrix_norm, torch.linalg.norm,
    torch.linalg.cond, torch.linalg.matrix_rank, torch.norm, torch.Tensor.norm,
})  # fmt: skip
"""Under a mode torch works vectors out beside such values, by another way: the last bits would be other ones."""

_ORTHOGONAL = (
    ". parametrizations.orthogonal reads the whole weight: it reads none with orthogonal_map='cayley' (or 'matrix_exp')"
    " and use_trivialization=False"
)


def _is_parametrizing() -> bool:
    """Whether one of torch's parametrizations is being made."""
    return any(frame.f_globals.get("__name__") == parametrizations.__name__ for frame, _ in traceback.walk_stack(None))


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every call on the meta device, and keeps it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive: a freed one's number is given again
        self.meta: set[int] = set()  # of them, those that the builder itself has put on the meta device
        self._shown: list[tuple[np.ndarray[Any, Any], bytes]] = []  # arrays of values, with what was in them
        self._places: dict[int, int] = {}  # of storages without memory, in the order in which they were asked for
        self.on_gpus: set[int] = set()  # and those that the builder itself has on one
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
            if written and not is_random:
                raise BuilderError(
                    f"has {func.name().removeprefix('aten::')} write its result into a tensor, which torch cannot do"
                    " without values",
                    hint="leave out=, and copy what it returns: tensor.copy_(result)",
                ) from error
            by_values = func not in _OF_FULL_RANK and not _BY_VALUES.isdisjoint(func.tags)
            if not is_random and (by_values or not self.is_drawn((args, kwargs))):
                return self.from_values(func, args, kwargs)  # nonzero, equal: shapes do not tell what comes out
            result = self.on_meta(_on_stand_ins(func, args, kwargs))
        without_memory = any(map(self.is_meant, written)) if written else self.wants_meta(args, kwargs)
        if without_memory and written:
            return result  # values that are nowhere; whoever makes a tensor like this one wants its shape alone
        if without_memory:
            self.meta.update(map(_storage, tensor_leaves(result)))
        if self.wants_gpu(args, kwargs):
            self.on_gpus.update(map(_storage, tensor_leaves(result)))
        self.keep(func, args, kwargs, result, written=written, is_random=is_random and not without_memory)
        return result

    def wants_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The builder itself asks for the meta device, by name or by a tensor that it has there: nothing is drawn.

        Where it does not, a call on the meta device is torch's own, beside a tensor that lies there.
        """
        device = kwargs.get("device")
        if device is not None and (device != META or self.asks_meta):
            return bool(device == META)
        return any(self.is_meant(each) for each in tensor_leaves(args))

    def wants_gpu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The builder asks for one, by name or by a tensor that it has there."""
        if (device := kwargs.get("device")) is not None:
            return bool(device.type == "cuda")
        return any(each.is_cuda or _storage(each) in self.on_gpus for each in tensor_leaves(args))

    def is_meant(self, tensor: torch.Tensor) -> bool:
        """True if the builder itself has put a tensor on the meta device; torch.tensor does so unseen by a mode."""
        return is_meta(tensor) and (_storage(tensor) in self.meta or _storage(tensor) not in self.storages)

    def place(self, storage: torch.UntypedStorage) -> int:
        """Where its memory lies; of one that has none, what no other has: who compares these finds what is tied."""
        if storage.device != META or storage._cdata in self.meta:
            return _DATA_PTR(storage)
        return _NOWHERE + (self._places.setdefault(storage._cdata, len(self._places)) << _PLACE_BITS)

    def show(self, values: Any) -> Any:
        """Values for Python; an array of them is NumPy's own, so that what is written to it changes no tensor."""
        if isinstance(values, np.ndarray):
            self._shown.append((values, fingerprint(values)))
        return values

    @staticmethod
    def on_meta(tree: Any) -> Any:
        """The same with every tensor on the meta device."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor if is_meta(tensor) else tensor.to(META), tree)

    def views(self, tree: Any) -> Any:
        """The same with a view for each meta tensor; generators are the replay's matter."""

        def view(tensor: torch.Tensor) -> torch.Tensor | View:
            if not is_meta(tensor):
                return tensor
            if tensor.layout is not torch.strided:
                raise BuilderError("makes a sparse tensor", hint=SPARSE)
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
            by_values = not shape_alone and len(tensor_leaves((args, kwargs))) > len(written)
        seen_args, seen_kwargs, made = self.views((args, kwargs, result))
        writes = frozenset(_storage(each) for each in written if is_meta(each))
        default = torch.get_default_dtype()
        self.calls.append(Call(func, seen_args, seen_kwargs, made, writes, source, by_values, default))

    def keep_unseen(self, tree: Any, where: str | None = None) -> None:
        """Record the making of tensors that torch's C++ has made without a call: there are no values of them."""
        for tensor in tensor_leaves(tree):
            if is_meta(tensor) and _storage(tensor) not in self.storages:
                self.meta.add(_storage(tensor))
                self.keep(_unseen, (where or f"at {running_line()}",), {}, tensor, written=[], is_random=False)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that the builder asks for, worked out from the calls so far; no draw may be among them."""
        replay, view = self.replay_of(tensor), View.of(tensor)
        if replay.draws():
            raise BuilderError(
                "reads a random tensor's value",
                hint=f"{_NONE_YET}{_ORTHOGONAL if _is_parametrizing() else ''}",
            )
        with _disable_current_modes():
            return view.look(replay.run()[view.storage])

    def replay_of(self, tensor: torch.Tensor) -> Replay:
        """What would run to give it its values."""
        self.keep_unseen(tensor)
        return Replay(self.calls, {_storage(tensor)})

    def is_drawn(self, tree: Any) -> bool:
        """True if a draw is among the calls by which some tensors come to their values."""
        return any(self.replay_of(each).draws() for each in tensor_leaves(tree) if is_meta(each))

    def from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call on real values; tensors that it makes are constants from then on."""

        def real(tree: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, lambda each: self.real(each) if is_meta(each) else each, tree)

        mine, words = real(args), real(kwargs)
        with _disable_current_modes():
            found = alike(func)(*mine, **words)
        result = self.on_meta(found)
        self.keep(_copies, (tensor_leaves(found),), {}, tensor_leaves(result), written=[], is_random=False)
        return result

    def as_one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record a function of Python's as one call, which the replay makes on the same tensors."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self.keep_unseen((args, kwargs))
            result = func(*self.on_meta(args), **self.on_meta(kwargs))
            self.keep(func, args, kwargs, result, written=[], is_random=False)
        return result

    def is_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if torch works a function of `_VALUES_ALONE` out without what a backward would need."""
        tensors = tensor_leaves((args, kwargs))
        if kwargs.get("out") is not None or self.under_autocast or any(map(self.is_meant, tensors)):
            return False
        return not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """What torch does with memory beside all calls: what is loaded has memory, and what has none is not saved.

        Raises:
            BuilderError: the builder saves tensors; or it or torch has met a `BuilderError` of this recorder's, and has
                raised an error of its own.
        """
        readers: list[tuple[Any, str]] = [(torch.UntypedStorage, name) for name in ("cpu", "tolist", "_write_file")]
        # these read memory by its address; which of them there is, a release says
        readers += [(safetensors.torch, name) for name in ("_to_ndarray", "_tobytes")]
        place = lambda storage: self.place(storage)  # noqa: E731, PLW0108 - a bound method is not bound again
        stand_ins = [
            *((owner, name, _with_values(getattr(owner, name))) for owner, name in readers if hasattr(owner, name)),
            (torch.UntypedStorage, "data_ptr", place),
            (torch._utils, "_rebuild_tensor", _loaded(torch._utils._rebuild_tensor)),
        ]
        with placed(stand_ins):
            with self._told():
                yield
            if any(fingerprint(array) != before for array, before in self._shown):
                raise BuilderError("writes to the array that tensor.numpy() has given it", hint=_COPY_FIRST)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """The builder, or torch, may have met a `BuilderError` of this recorder's and raised an error of its own."""
        try:
            yield
        except AssignerError:
            raise
        except Exception as error:
            if (met := _within(error)) is None:
                raise
            raise BuilderError(met.message, hint=met.hint).with_traceback(error.__traceback__) from error

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

        with placed([(nn.init, "_no_grad_trunc_normal_", record)]):
            yield


class LooksReal(TorchFunctionMode):
    """Says of tensors on the meta device that they are on the CPU.

    torch.nn.init and transformers give values to no others. Where the builder itself has asked for the meta device the
    truth is told.

    What hands a tensor's values to Python gets them from the recorder. Python's lists that torch's C++ would make into
    tensors beside the recorder, on the meta device and so without their values, are made into tensors before.
    """

    _IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]
    _TOLD = (_IS_META, _DEVICE, torch.Tensor.data_ptr)
    _READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__)
    _INDEXERS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._TOLD and not self.recorder.is_meant(args[0]):
            return self._told(func, args[0]) if is_meta(args[0]) else func(*args)
        if func in self._READERS and is_meta(args[0]):
            args = (self.recorder.real(args[0]), *args[1:])
            with _disable_current_modes():
                return self.recorder.show(func(*args, **kwargs))
        if _takes_memory(func, args):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func in self._INDEXERS and is_meta(args[0]):
            args = (args[0], _index(args[1]), *args[2:])
        if func is torch.Tensor.new_tensor and is_meta(args[0]) and not self.recorder.is_meant(args[0]):
            return _new_tensor(*args, **kwargs)
        asks = self.asks_meta((*args, *kwargs.values()))
        with self.recorder.within(asks_meta=asks, under_autocast=torch.is_autocast_enabled("cpu")):
            if func in _VALUES_ALONE and self.recorder.is_one(args, kwargs):
                return self.recorder.as_one(func, args, kwargs)
            return func(*args, **kwargs)

    def _told(self, func: Any, tensor: torch.Tensor) -> Any:
        if func is torch.Tensor.data_ptr:
            return self.recorder.place(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()
        return torch.device("cpu") if func == self._DEVICE else False

    def asks_meta(self, words: tuple[Any, ...]) -> bool:
        """True if a call of the builder names the meta device, by itself, by a tensor there or by a block around it."""
        return torch.get_default_device().type == "meta" or any(
            self.recorder.is_meant(word)
            if isinstance(word, torch.Tensor)
            else isinstance(word, str | torch.device) and str(word).startswith("meta")
            for word in words
        )


def _check_loaded(func: Any, args: tuple[Any, ...], written: list[torch.Tensor]) -> None:
    """Tensors with memory (loaded weights) stay what they are: a change would be made to a copy, and be lost.

    A parameter that is converted would be parted from its ties.
    """
    if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter) and not is_meta(args[0]):
        raise BuilderError("converts a loaded tensor", hint=_LOADED_HINT)
    if any(not is_meta(each) for each in written):
        raise BuilderError("changes a loaded tensor", hint=_LOADED_HINT)


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of what reads a storage, or a tensor for a file: some end the process where there is no memory."""

    @functools.wraps(original)
    def read(held: torch.UntypedStorage | torch.Tensor, *args: Any, **words: Any) -> Any:
        if is_meta(held):
            raise BuilderError("saves the values of tensors", hint=_WITHOUT_FILE)
        return original(held, *args, **words)

    return read


def _loaded(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """In the place of what gives a tensor to memory that was read from a file: it stays there."""

    def rebuild(storage: Any, *args: Any) -> torch.Tensor:
        if storage._untyped_storage.device.type == "meta":
            return original(storage, *args)
        with _disable_current_modes():
            return original(storage, *args)

    return rebuild


def _takes_memory(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether torch sets a tensor upon memory that is there, where a mode would have it on this device.

    A copy by `copy.deepcopy`, or a part of a file, as safetensors gives it to torch.asarray.
    """
    if func is torch.asarray:
        return bool(args) and isinstance(args[0], torch.UntypedStorage) and args[0].device != META
    return getattr(func, "__name__", "") == "__deepcopy__" and not is_meta(args[0])


def _within(error: BaseException) -> BuilderError | None:
    """The `BuilderError` that has led to another error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, BuilderError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _check_autocast(func: Any) -> None:
    """Autocast chooses types by the device of the tensors, and would leave those on the meta device alone."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU"):
        raise BuilderError(
            f"calls {func.name().removeprefix('aten::')} under torch.autocast",
            hint="leave autocast to the forward pass; in the builder, convert with .to(dtype)",
        )


def _on_stand_ins(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call that torch cannot run on the meta device gives, in shape and type: on numbers between 0 and 1."""
    numbers = torch.Generator().manual_seed(0)

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        return torch.rand(tensor.shape, generator=numbers, device="cpu").to(tensor.dtype)

    words = named_arguments(func, args, kwargs)
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        given = pytree.tree_map_only(torch.Tensor, stand_in, words)
        return func(**pytree.tree_map_only(torch.Generator, lambda _: None, given))


def _index(index: Any) -> Any:
    """An index with its lists of numbers as tensors; torch is of two minds about lists in a list, which stay."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(each, device="cpu") if _holds_numbers(each) else each for each in index)
    if _holds_numbers(index) and all(isinstance(each, int) for each in index):
        return torch.tensor(index, device="cpu")
    return index


def _holds_numbers(index: Any) -> bool:
    return (
        isinstance(index, list | range)
        and len(index) > 0
        and all(isinstance(each, int) or _holds_numbers(each) for each in index)
    )


def _new_tensor(like: torch.Tensor, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """`like.new_tensor(data)`: its type, and the CPU, which is where it seems to be."""
    return torch.tensor(data, dtype=dtype or like.dtype, **{"device": "cpu", **options})
