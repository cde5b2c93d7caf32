"""A model's forward on a few rows with values, one partition's weights in memory at a time.

For partitions whose forward needs values (see `observation`). Every process of a run does this by itself, and must
learn the same: the batches are `Workload.batch`'s, cut or repeated to the shapes that are asked for, the weights are
those that the builder gives, and the generators are seeded.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner.errors import AssignerError, MarkingError
from assigner.formatting import size as in_bytes
from assigner.machine.cgroup import free_memory
from assigner.machine.generators import kept_python
from assigner.model.deferred import DeferredModel, slot_of
from assigner.model.deferred.memento import Memento, placed
from assigner.model.deferred.modes import switch_modes
from assigner.model.marking.casting import casting
from assigner.model.marking.changedarguments import Arguments, fill, once, plain_leaves, split
from assigner.model.marking.exportable import made_by_eval
from assigner.model.marking.fakeforward import own_tensors
from assigner.model.marking.interception import masks_as_captured
from assigner.model.marking.isolation import check_sent
from assigner.model.marking.modules import failed_at, listed_parameters, modules_inside
from assigner.model.marking.observation import LearntCall, Observation
from assigner.model.marking.opaque import OpaqueCalls, on_own, replaced
from assigner.model.marking.rows import in_groups
from assigner.model.singleprocess import as_single_process
from assigner.model.workload import call_arguments
from assigner.usercode import user_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_ROWS = (4, 8, 12)
_SHARE = 4  # of the free memory: what all weights together may take, with as much for making them


Maker = Callable[[int], Any]
"""Makes a batch's inputs with values for a number of rows, as `Workload.batch` does."""


def example_inputs(maker: Maker, leaves: Sequence[Any], carriers: Sequence[int | None]) -> Iterator[list[Any]]:
    """Flattened inputs with values, of several numbers of rows, where any of them carries rows.

    Args:
        maker: Has the values.
        leaves: The inputs whose types and other sizes they have.
        carriers: In which dimension each of them carries rows; None: in none.
    """
    for rows in _ROWS:
        source = _source(maker, rows)
        if len(source) != len(leaves):
            source = [None] * len(leaves)
        generator = torch.Generator().manual_seed(rows)
        found = [
            _like(leaf, example, carrier, rows, generator)
            for leaf, example, carrier in zip(leaves, source, carriers, strict=True)
        ]
        yield _within(found, source, carriers)


def _source(maker: Maker, rows: int) -> list[Any]:
    for each in (rows, _ROWS[0]):
        with contextlib.suppress(AssignerError):
            return pytree.tree_leaves(call_arguments(maker(each)))
    return []


def _like(leaf: Any, source: Any, carrier: int | None, rows: int, generator: torch.Generator) -> Any:
    """A leaf with the values of another one, or drawn ones, and so many rows in the dimension that carries them."""
    if not torch.is_tensor(leaf):
        return leaf
    sizes = [*leaf.shape]
    if carrier is not None:
        sizes[carrier] = rows
    if not torch.is_tensor(source) or source.dtype != leaf.dtype or source.dim() != len(sizes) or not source.numel():
        if leaf.is_floating_point():
            return torch.randn(sizes, generator=generator, device="cpu").to(leaf.dtype)
        return torch.zeros(sizes, dtype=leaf.dtype, device="cpu")
    for dim, size in enumerate(sizes):
        if source.size(dim) != size:
            source = source.index_select(dim, torch.arange(size, device="cpu") % source.size(dim))
    return source.detach().clone()


def _within(found: Sequence[Any], source: Sequence[Any], carriers: Sequence[int | None]) -> list[Any]:
    """Leaves of `_like`, whose whole numbers still tell a length of, or a place in, what was made shorter for them."""
    shorter = [
        {
            (before.size(dim), leaf.size(dim))
            for dim in range(leaf.dim())
            if dim != carrier and before.size(dim) > leaf.size(dim)
        }
        if torch.is_tensor(leaf) and torch.is_tensor(before) and before.dim() == leaf.dim()
        else set()
        for leaf, before, carrier in zip(found, source, carriers, strict=True)
    ]
    every: set[tuple[int, int]] = set().union(*shorter)
    made = list(found)
    for n, leaf in enumerate(found):
        if not torch.is_tensor(leaf) or leaf.dtype not in _WHOLE or not leaf.numel():
            continue
        most = int(leaf.max())
        others = [pair for pair in every - shorter[n] if pair[0] >= most]
        ends = [after - (most < before) for before, after in others]
        if ends:  # of whichever of these it tells
            made[n] = leaf.clamp(max=max(0, min(ends)))
    return made


_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


class RealCalls(OpaqueCalls):
    """Runs the opaque modules of a model on tensors with values, and takes down what they do.

    The model's forward is called in the block of `replaced`; `holding` gives a module its weights while a block runs.

    Attributes:
        seen: The calls of each module so far, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        autocast: str | None,
        holding: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        super().__init__(model, names, autocast)
        self.holding = holding
        self.seen: dict[str, list[Observation]] = {}

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As it runs; of what is no module nothing is taken down."""
        if not name:
            return forward(*args, **kwargs)
        label = repr(name)
        arguments, tensors, _ = split(once(args, kwargs))
        check_sent(label, "is given", plain_leaves(arguments))
        given = [_alone(each) for each in tensors]
        with self.holding(name):
            effects, made, *_ = contextvars.copy_context().run(
                self.examine, name, label, partial(on_own, forward, arguments, tensor=given), given, None
            )
        check_sent(label, "returns", plain_leaves(effects.results))
        strange = next((each for each in made if type(each) not in _DENSE or each.layout is not torch.strided), None)
        if strange is not None:
            raise MarkingError(
                f"{label} returns a {type(strange).__name__} of layout {strange.layout}",
                hint="return a plain, dense tensor",
            )
        looks = (torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta") for each in made)
        observed = Observation(tuple(each.shape for each in given), tuple(looks), effects)
        self.seen.setdefault(name, []).append(observed)
        return Arguments(args, kwargs).take(fill(effects.results, tensor=[_alone(each) for each in made]))


_DENSE = (torch.Tensor, nn.Parameter)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that wants a gradient as this one does and may be written to, with nothing behind it."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def learn(
    deferred: DeferredModel,
    names: Sequence[str],
    batches: Iterator[Sequence[Any]],
    structure: pytree.TreeSpec,
    *,
    wanted: Mapping[str, Exception | None],
    autocast: str | None,
    training: bool,
) -> dict[str, list[LearntCall]]:
    """Run a model's forward on tensors with values, and learn what its opaque modules give.

    Args:
        deferred: The model, in the mode that counts; left as it was.
        names: Its opaque modules.
        batches: Flattened inputs.
        structure: Of the model's (args, kwargs).
        wanted: The modules that must be learnt, and why each could not go without values.
        autocast: The type that autocast computes in.
        training: It runs with gradients.

    Returns:
        The calls of each module, as far as all of the batches came.

    Raises:
        MarkingError: a wanted module does not run on these either, is too large for this host, or what it returns
            depends on the batch in another way than by sizes.
    """
    runs: list[Mapping[str, list[Observation]]] = []
    weights = _Weights(deferred, names, training=training)
    for batch in batches:
        calls = RealCalls(deferred.model, names, autocast, weights.holding)
        args, kwargs = pytree.tree_unflatten(list(batch), structure)
        failure: Exception | None = None
        masks: list[bool] = []
        try:
            with (
                _as_it_was(deferred.model), weights.around(), replaced(calls, torch.empty((), device="cpu")),
                as_single_process(), masks_as_captured() as masks, torch.set_grad_enabled(training),
                casting(autocast, "cpu"),
            ):  # fmt: skip
                calls.begin()
                deferred.model(*args, **kwargs)
                calls.check_ended()
        except MarkingError:
            raise
        except Exception as error:  # noqa: BLE001 - it counts where a wanted module was not reached
            failure = error
        for name, why in wanted.items():
            if name not in calls.seen:
                raise _failed(name, why, failure, masks=bool(masks))
        runs.append(calls.seen)
    return {
        name: [
            LearntCall(repr(name), observed)
            for observed in zip(*(run.get(name, ()) for run in runs), strict=False)
        ]
        for name in names
    }  # fmt: skip


def _failed(name: str, why: Exception | None, failure: Exception | None, *, masks: bool) -> MarkingError:
    """Why a module can neither be followed nor run; where one line fails, as of wrong inputs, what values say of it."""
    rows = f"the forward of {name!r} takes the number of rows for a plain number"
    one = failure if why is not None and failure is not None and user_line(failure) == user_line(why) else why
    first = rows if one is None else f"the forward of {name!r} cannot be traced {_reason(one)}"
    fails = failure is not None and (why is None or user_line(failure) != user_line(why))
    second = f"; on a few rows with values it fails {_reason(failure)}" if failure is not None and fails else ""
    asked = "does the model take such inputs? If so, " if failure is not None and not fails else ""
    return MarkingError(
        f"{first}{second}",
        hint=f"{asked}write it with tensor operations, or see to it that it runs on the CPU with batches of 4, 8 and 12"
        f" rows of such inputs{_MASKED if masks else ''}{in_groups(first + second)}",
    )


_MASKED = (
    ". In a capture transformers gives its layers a mask of (rows, 1, queries, keys) also where nothing is masked: with"
    " an attention_mask of four dimensions in the inputs they get that one"
)


def _reason(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{failed_at(error)}: {said[0][:200] if said else type(error).__name__}"


class _Weights:
    """The weights of a model's opaque modules: all of them where they are small, else one module's at a time."""

    def __init__(self, deferred: DeferredModel, names: Sequence[str], *, training: bool) -> None:
        self.deferred = deferred
        self._listed = listed_parameters(deferred.model)
        self._by_eval = {} if training else made_by_eval(deferred.model)
        self._own = {name: list(own_tensors(modules_inside(deferred.model, name))) for name in names}
        self._known = deferred.tensors()
        self._kept: dict[str, torch.Tensor] = {}
        if 2 * _bytes(self._known.values()) * _SHARE <= free_memory():
            self._kept = deferred.materialise(self._known)

    def around(self) -> contextlib.AbstractContextManager[None]:
        """The tensors that are in no opaque module are in their places while the block runs."""
        inner = {each for own in self._own.values() for each in own}
        return self._placed([each for each in self._known if each not in inner], "the code between the partitions")

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """A module's tensors are in their places while the block runs."""
        with self._placed(self._own[name], repr(name)):
            if not any(place.startswith(f"{name}.") for place in self._by_eval):
                yield
                return
            inside = modules_inside(self.deferred.model, name)
            with Memento(inside).put_back():
                switch_modes((each for _, each in inside), {})  # they make it anew, of values
                yield

    @contextlib.contextmanager
    def _placed(self, names: Sequence[str], what: str) -> Iterator[None]:
        if self._kept:  # each forward starts from the same values
            made = {id(each): each for each in (self._kept[name] for name in names)}
            copies = {key: _copy(each) for key, each in made.items()}
            tensors = {name: copies[id(self._kept[name])] for name in names}
        else:
            needed = 2 * _bytes(self._known[name] for name in names)
            if needed > free_memory():
                raise MarkingError(
                    f"{what} must run once to find out what it returns: that takes {in_bytes(needed)} of memory,"
                    f" and {in_bytes(free_memory())} are free",
                    hint="write the forward with tensor operations alone: then nothing has to run; or mark smaller"
                    " modules",
                )
            tensors = self.deferred.materialise(names)
        with placed((*slot_of(self.deferred.model, name), tensors[name]) for name in names):
            if listed := {id(self._listed[name]): tensors[name] for name in names if name in self._listed}:
                Memento(self.deferred.model.named_modules()).exchange(listed)
            yield


def _bytes(tensors: Any) -> int:
    return sum({id(each): each.nbytes for each in tensors}.values())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().clone()
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


@contextlib.contextmanager
def kept_draws() -> Iterator[None]:
    """Leave the generators that code shares as they were: Python's, NumPy's, and torch's of the CPU and this GPU."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with kept_python(), torch.random.fork_rng(devices=devices):
        yield


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """What the block leaves in Python and in generators is taken back; torch's are seeded in it."""
    values = Memento(model.named_modules(), parameters=True, top="whole")
    with values.put_back(), kept_draws():
        torch.default_generator.manual_seed(0)  # torch.manual_seed would reach those of GPUs too
        yield
        for change in values.changes():
            if isinstance(change.holder, torch.Tensor):
                raise MarkingError(
                    f"the forward of {type(model).__name__} changes {change.name} in place, which nobody can put back",
                    hint="keep it in a buffer of a module",
                )
