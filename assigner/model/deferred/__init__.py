"""A model without memory, and any part of it with its true initial values.

`DeferredModel` runs the user's builder on the meta device and records what the builder does to its tensors.
`materialise` replays just what the wanted tensors depend on. The random draws before theirs are replayed too, into
scratch memory where the tensor is not wanted: the generator then passes through the same states as in a plain

    torch.manual_seed(seed); model = builder()

and each part gets, to the last bit, the values that it has there. At no time does more than the wanted part and one
scratch tensor exist. Tensors are followed by their storage, so views, `.data =` and module.to() need no special care.

    recorder, replay              what the builder did, and sees; running again what tensors need; where draws start
    modes                         what train() and eval() of the model's own do
    mutation                      which operations write
    likeness, outside             tensors with what the builder hung on them; objects that the script holds too
    originals                     the builder's own tensors, which are not those that are trained
    origins                       what the builder made it from, and what code of the user's own it runs, for ranks to
                                  compare
    reach, memento                what code can reach when it runs, by places with names; that as it is at one time, and
                                  something else in places for a while
    ownership                     what of it is the user's own, or was given by the user
    vocabulary, codenames         the names by which a forward can reach anything; those in one function's code
    contents, caches              what of it lies in C: generators, arrays; and in functions that keep what they make

Source of the idea: deferred initialisation by record and replay, as in torchdistx (2022).
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.deferred.likeness import check_hung, in_likeness
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.modes import settle_mode
from assigner.model.deferred.mutation import is_lent, is_view
from assigner.model.deferred.originals import unwatched
from assigner.model.deferred.origins import Origins, origins_of
from assigner.model.deferred.outside import objects_outside
from assigner.model.deferred.recorder import CallRecorder, LooksReal, is_meta
from assigner.model.deferred.replay import BuilderError, Replay, SharedDraws, View
from assigner.model.deferred.vocabulary import Vocabulary, vocabulary_of
from assigner.model.members import buffers, named_buffers, named_parameters
from assigner.usercode import user_code, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class DeferredModel:
    """A model as its builder makes it, on the meta device, with the generator seeded before.

    Attributes:
        model: The module tree; its parameters and buffers are meta tensors.
        outside: What its modules hold, by id, that is not the model's own (see `objects_outside`).
        replaced: The builder's tensors beside parameters and buffers, in whose places the model has those with values.
        for_gpus: Of these, the ones that the builder has made on a GPU: they belong where their modules are.
        lent: Tensors in the memory of arrays that the builder has its buffers, or such tensors, in.
        kept: Initial values by storage, of which all that is materialised is a copy: each part alone replays the draws
            of the whole model before its own. Those of all tensors come there with the first; None: none are kept.

    Raises:
        UsageError: the builder looks at random values, which do not exist yet, changes tensors that it has loaded, or
            makes no module, or one of TorchScript.
    """

    def __init__(self, builder: Callable[[], nn.Module], *, seed: int) -> None:
        before, recorder, self._draws = torch.get_rng_state(), CallRecorder(), SharedDraws()
        try:
            torch.default_generator.manual_seed(seed)  # builders draw from no other, and the script goes on with those
            with (
                user_code("Workload.model"), recorder.readable(), recorder, recorder.rejection_sampling(),
                LooksReal(recorder), unwatched(), self._draws.noted(),
            ):  # fmt: skip
                self.model = builder()
                settle_mode(self.model)
        except BuilderError as error:
            raise UsageError(f"the model's builder {error.message} at {user_line(error)}", hint=error.hint) from error
        finally:
            recorder.draws.restore()
            torch.set_rng_state(before)
        if not isinstance(self.model, nn.Module):
            raise UsageError(f"Workload.model gave {type(self.model).__name__}", hint="it must return an nn.Module")
        _check_scripted(self.model)
        _check_sizes(self.tensors())
        for name, tensor in self.tensors().items():
            recorder.keep_unseen(tensor, f"as {name}")
        check_hung(self.tensors())
        self._calls, self._storages = recorder.calls, recorder.storages
        self.kept: dict[int, torch.UntypedStorage] | None = None
        self._make_unregistered(recorder)
        self.outside = objects_outside(builder, self.model)

    def _make_unregistered(self, recorder: CallRecorder) -> None:
        """Tensors that are kept beside parameters and buffers, as a table in an attribute, have their values at once.

        They are parts of no partition: to a capture they are constants, as tensors are that were there before. Those
        that train, or share their memory with a registered one, stay as they are.
        """
        memento = Memento(self.model.named_modules(), top="whole")
        registered = {tensor.untyped_storage()._cdata for tensor in self.tensors().values() if is_meta(tensor)}
        made_again = (each for each in memento.tensors if is_meta(each) and not recorder.is_meant(each))
        kept = [each for each in made_again if not each.requires_grad]
        views = {id(each): (each, view) for each in kept if (view := View.of(each)).storage not in registered}
        memory = self.replayed({view.storage for _, view in views.values()})
        made = {key: in_likeness(each, view.look(memory[view.storage])) for key, (each, view) in views.items()}
        memento.exchange(made)
        self.replaced = [each for each, _ in views.values()]
        self._unregistered = [(made[key], view) for key, (_, view) in views.items()]
        self.for_gpus = [made[key] for key, (_, view) in views.items() if view.storage in recorder.on_gpus]
        registered = {each.untyped_storage()._cdata for each in buffers(self.model) if is_meta(each)}
        self.lent = self._lent(registered | {view.storage for _, view in views.values()})

    def _lent(self, storages: set[int]) -> list[torch.Tensor]:
        """Those in the memory of arrays with which these storages would share theirs, if they had values."""
        views = (call for call in self._calls if is_view(call.function) and not storages.isdisjoint(call.makes()))
        given = (leaf for call in views for leaf in pytree.tree_leaves(call.args))
        return [each for each in given if isinstance(each, torch.Tensor) and is_lent(each)]

    @functools.cached_property
    def origins(self) -> Origins:
        """From which seeds, states and numbers the builder made the model: unlike ones make unlike models."""
        return origins_of(self._calls, self.model, self.vocabulary, self._draws, self._unregistered)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by name; names that share one tensor all stand here."""
        found: dict[str, torch.Tensor] = dict(named_parameters(self.model, remove_duplicate=False))
        found.update(named_buffers(self.model, remove_duplicate=False))
        return found

    @contextlib.contextmanager
    def mode(self, *, training: bool) -> Iterator[None]:
        """The model in the mode that it was built in (training), or after its own `eval()`, while the block runs."""
        with Memento(self.model.named_modules()).put_back(), unwatched():
            if not training:
                with user_code("the model's eval()"), torch.no_grad():  # nobody trains what it makes
                    self.model.eval()
            yield

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The names by which its forward, and hooks on its parameters, can reach anything."""
        hooks = [hook for each in self.tensors().values() for hook in (each._backward_hooks or {}).values()]
        return vocabulary_of(self.model.modules(), others=hooks)

    def replayed(self, storages: set[int]) -> dict[int, torch.UntypedStorage]:
        """The memory behind some meta storages, with its initial values."""
        if self.kept is None:
            return Replay(self._calls, storages).run()
        if not self.kept:
            every = {tensor.untyped_storage()._cdata for tensor in self.tensors().values() if is_meta(tensor)}
            self.kept = Replay(self._calls, every).run()
        return {storage: self.kept[storage].clone() for storage in storages}  # type: ignore[no-untyped-call]

    def materialise(self, names: Iterable[str], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The named parameters and buffers with their initial values; two names of one tensor give one tensor.

        They are made on the CPU, so that every device starts from the same values, in the likeness of the builder's. A
        tensor that was there before the builder ran is copied: it is the user's own.
        """
        known = self.tensors()
        wanted = {name: known[name] for name in names}
        storages = {tensor.untyped_storage()._cdata for tensor in wanted.values() if is_meta(tensor)}
        memory = self.replayed(storages)
        made: dict[int, torch.Tensor] = {}
        for tensor in wanted.values():
            if id(tensor) not in made:
                view = View.of(tensor)
                value = view.look(memory[view.storage]) if is_meta(tensor) else tensor.detach().clone()
                made[id(tensor)] = in_likeness(tensor, value.to(device))
        return {name: made[id(tensor)] for name, tensor in wanted.items()}


def _check_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{name or 'the model'} is a scripted or traced module, which cannot be cut or copied to a worker",
                hint="give the module itself; Workload.compile compiles each partition",
            )


def _check_sizes(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise UsageError(
                f"{name!r} has no size before the model's first forward, as in an nn.LazyLinear: there is nothing to"
                " measure or to place yet",
                hint="give its module the size (nn.Linear(8, 4) for nn.LazyLinear(4)); or have the builder call the"
                " model once, as model(torch.zeros(1, 8)), before it returns it",
            )


def slot_of(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module holds a tensor: the parameters of the part that has it, or else its buffers, and the key there."""
    path, _, key = name.rpartition(".")
    holder = model.get_submodule(path)
    return (holder._parameters if key in holder._parameters else holder._buffers), key
