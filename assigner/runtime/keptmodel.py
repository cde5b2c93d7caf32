"""The model that the builder has made, beside the partitions, which are copies of its modules.

the script changes it       no partition would see that: refused, unless the partitions have been given it, too
a step moves partitions     the builder's tensors stay behind: the script may read them no more
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from assigner.errors import UsageError
from assigner.model.deferred.memento import Memento, placed
from assigner.model.deferred.mutation import is_lent, storage_of
from assigner.model.deferred.originals import (
    is_outdated,
    keep_left,
    keep_originals,
    note_moved,
    note_trained,
    plain_class,
)
from assigner.model.marking.leftovers import left_by_module
from assigner.model.marking.owncopies import copied_values
from assigner.runtime.forward.heldtensors import has_values_of
from assigner.runtime.outsidevalues import reached_by

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from assigner.model.marking import PartitionGraph
    from assigner.runtime.forward.state import WrittenTensors
    from assigner.runtime.ranks.membership import Membership

_REQUIRES, _SHAPE = operator.attrgetter("requires_grad"), operator.attrgetter("shape")
_MOST_SAMPLED = 1024  # elements: up to some ten microseconds for a tensor


class _TensorFacts:
    """What the script can change of a tensor without raising `_version`: flags, shape, strides, address.

    Args:
        tensors: They; what is kept of them has memory of theirs, so that its address goes to no other.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._kept = [each.detach() for each in self._tensors]
        self._strided = [each for each in self._tensors if each.layout is torch.strided]
        self._real = [each for each in self._strided if plain_class(each) in (torch.Tensor, nn.Parameter)]
        self._real = [each for each in self._real if each.numel() and not each.is_meta]
        real = set(map(id, self._real))
        self._others = [each for each in self._tensors if id(each) not in real]
        self._then = self._now()

    def _now(self) -> list[Any]:
        """All at once: a call for each of a few hundred tensors takes a third of a millisecond at each step."""
        return [
            *map(_REQUIRES, self._tensors), *map(_SHAPE, self._tensors), *map(torch.Tensor.stride, self._strided),
            *map(torch.Tensor.data_ptr, self._real), *map(storage_of, self._others),
        ]  # fmt: skip

    def are_as_then(self) -> bool:
        """Nothing of it has changed."""
        return self._now() == self._then


class _Sample:
    """Some of a tensor's values, which change without torch's count where NumPy or `.data` writes to its memory.

    Args:
        name: Of the tensor, for people; empty: it can be loaded.
        tensor: With values on the CPU.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.is_whole = tensor.numel() <= _MOST_SAMPLED
        most = max(1, int(_MOST_SAMPLED ** (1 / max(1, tensor.dim()))))
        steps = (slice(None, None, 1 if self.is_whole else -(-size // most)) for size in tensor.shape)
        self._shown = tensor.detach()[tuple(steps)]
        self.take()

    @classmethod
    def taken(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[_Sample]:
        """Of those that have values where they cost nothing to look at, by name."""
        plain = ((name, each) for name, each in tensors if plain_class(each) in (torch.Tensor, nn.Parameter))
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return [
                cls(name, each) for name, each in plain if each.device.type == "cpu" and each.layout is torch.strided
            ]

    def take(self) -> None:
        """What is there now is as it should be."""
        self._values = self._shown.clone()

    def holds(self) -> bool:
        """Whether the values are those that were taken."""
        return torch.equal(self._shown, self._values) or has_values_of(self._shown, self._values)


class KeptModel:
    """The model as its builder has made it: refuses what the script changes there, of which partitions have copies.

    It holds the same objects and functions as the partitions on this rank; its modules are no partition's, and nothing
    but the script changes them, wherever it holds them: in a list, a cache, or by their parameters alone. Numbers and
    texts count, as they are when this is made, and all that modules hold.

    Args:
        device: This rank's; code between partitions has copies of tensors where that is not the CPU.

    Attributes:
        is_outdated: The partitions have been built of a model that another pipeline has trained, which has the values
            of its builder all the same; False: they have been loaded since.
    """

    def __init__(self, graph: PartitionGraph, device: torch.device) -> None:
        model, tensors = graph.deferred.model, graph.deferred.tensors()
        self.is_outdated = is_outdated(model)
        modules = dict(model.named_modules())
        self._kept = dict[bool, Memento]()
        self._classes = [(name or type(each).__name__, each, each.__class__) for name, each in modules.items()]
        self._flags = [(module, dict[bool, bool]()) for module in modules.values()]
        for training in (True, False):
            with graph.deferred.mode(training=training):
                found = copied_values(modules, graph.deferred.outside, graph.deferred.vocabulary)
                self._kept[training] = Memento.of(found, graph.deferred.vocabulary)
                for module, flags in self._flags:
                    flags[training] = module.training
        self._facts = _TensorFacts(self._kept[True].tensors)
        self._replaced = [(each, each._version) for each in graph.deferred.replaced]
        first = graph.canonical
        self._loaded = {id(each): first.get(name, name) for name, each in tensors.items() if name in graph.persistent}
        memory = {storage_of(tensors[name]) for name in graph.persistent}
        copied = [*tensors.items(), *_tensors_beside(graph, device)]
        copied = [(name, each) for name, each in reversed(copied) if storage_of(each) not in memory]
        self._copied = {id(each): (f"{name}, a tensor of a module", each) for name, each in copied}
        lent = [("", each) for each in tensors.values() if id(each) in self._loaded and is_lent(each)]
        lent += (("the array that is the memory of a tensor of a module", each) for each in graph.deferred.lent)
        self._samples = _Sample.taken([*self._copied.values(), *lent])

    def check(self, state: Callable[[], Mapping[str, torch.Tensor]], *, training: bool) -> None:
        """Refuse what the script has changed on modules that it holds beside the pipeline, which has copies of them.

        Args:
            state: Gives this rank's parameters and buffers by name. What the script has loaded of them counts as no
                change: with `model.load_state_dict(pipeline.full_state_dict())` it evaluates its own model.
            training: False: they may also be as after `eval()`, each for itself.
        """
        if self.is_outdated:
            raise UsageError(
                "another pipeline has trained the model that the builder gives, which has the weights all the same that"
                " it was built with: this one would begin with these",
                hint="load them: pipeline.load_state_dict(state) or pipeline.load(folder), or before this pipeline"
                " model.load_state_dict(earlier.full_state_dict()); to begin anew, have the builder make a new model",
            )
        if self._is_as_kept(training=True):
            return
        if self._are_loaded(state()) and self._is_as_kept(training=True):
            return
        if not training:
            for mode in (True, False):
                with self._flagged(training=mode):
                    if self._is_as_kept(training=mode):
                        return
        raise self._refused()

    def _refused(self) -> UsageError:
        """The error for what has changed, as far as that has a name."""
        changes = [each.name for each in self._kept[True].changes()]
        changes += [f"the class of {name}" for name, each, kind in self._classes if each.__class__ is not kind]
        if changes:
            first = f"{changes[0]}, of a module"
            hint = (
                "to evaluate, use pipeline.evaluate or pipeline.forward, or call a copy of the model (copy.deepcopy);"
                " what the script sets is done in the builder, or before a new pipeline; a forward sees what changes in"
                " an object that the script holds, as a dict at the top of the model's file"
            )
            if changes[0].endswith(".training"):
                hint = "call train() before the next step, or evaluate with pipeline.evaluate"
        elif names := self._changed_tensors():
            first = names[0]
            hint = (
                "have forward read it by a name at the top of its file, or from an object that the builder is given, as"
                " a dict; or make a new pipeline after the change"
            )
        else:
            first = "a weight, a buffer or a tensor of a module"
            hint = "change weights by pipeline.named_parameters(), and buffers by pipeline.load_state_dict"
        return UsageError(
            f"the script has changed {first} that the builder has made, since the pipeline was made: the partitions are"
            " copies, which would not see it",
            hint=hint,
        )

    def _are_loaded(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether all tensors that are another than before have the values of this rank's; they are kept as they are.

        Those of other ranks alone are theirs to compare. What nobody can load has the values that it had, as after a
        capture, which puts them back; or no partition has a copy of it.
        """
        kept = self._kept[True]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            moved = kept.moved()
            for each in moved:
                own = state.get(self._loaded.get(id(each), ""))
                if own is not None and not has_values_of(each, own):
                    return False
                if id(each) in self._copied and not any(one.is_whole and one.holds() for one in self._samples_of(each)):
                    return False
            for each in moved:
                for one in self._samples_of(each):
                    one.take()
        for memento in self._kept.values() if moved else ():
            memento.accept(moved)
        return bool(moved)

    def _changed_tensors(self) -> list[str]:
        """The names of those that nobody can load, and of which partitions have copies as they were."""
        moved = (self._copied[id(each)][0] for each in self._kept[True].moved() if id(each) in self._copied)
        with torch._C.DisableTorchFunctionSubclass():
            return [*moved, *(each.name for each in self._samples if each.name and not each.holds())]

    def _samples_of(self, tensor: torch.Tensor) -> Iterator[_Sample]:
        return (each for each in self._samples if each.tensor is tensor)

    def _is_as_kept(self, *, training: bool) -> bool:
        then = self._kept[training]
        with torch._C.DisableTorchFunctionSubclass():
            if not then.is_settled():
                return False
            is_same = self._facts.are_as_then() and all(each.__class__ is kind for _, each, kind in self._classes)
            is_same = is_same and all(each.holds() for each in self._samples)
            return is_same and all(each._version == version for each, version in self._replaced)

    def _flagged(self, *, training: bool) -> contextlib.AbstractContextManager[None]:
        """Each module that is in one of the two modes is in this one while the block runs."""
        known = [(module.__dict__, flags) for module, flags in self._flags if module.training in flags.values()]
        return placed((space, "training", flags[training]) for space, flags in known)


def _tensors_beside(graph: PartitionGraph, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """What partitions have copies of beside parameters and buffers, by name.

    On the CPU code between partitions reads the tensors themselves.
    """
    modules = dict(graph.deferred.model.named_modules())
    if device.type == "cpu":
        every = {name: each for reached in reached_by(graph).values() for name, each in reached.items()}
        called = {name: each for name, each in every.items() if isinstance(each, nn.Module)}
        modules = {path: part for name, each in called.items() for path, part in each.named_modules(prefix=name)}
    for place, each in copied_values(modules, graph.deferred.outside, graph.deferred.vocabulary):
        if isinstance(each, torch.Tensor):
            yield str(place), each


class MovedTensors:
    """What steps move of the partitions beside trained weights: the builder's tensors have not that, and are kept back.

    What trains, and what BatchNorm moves, the script may read no more from the start; nor what is `read`, as by its
    loss, and lies in the memory of these.
    """

    def __init__(self, graph: PartitionGraph, read: Iterable[torch.Tensor] = ()) -> None:
        self._model, tensors = graph.deferred.model, graph.deferred.tensors()
        paths = [name for name, each in self._model.named_modules() if isinstance(each, _NormBase)]
        norms = (f"{path}." if path else "" for path in paths)
        moving = {f"{path}{name}" for path in norms for name in ("running_mean", "running_var", "num_batches_tracked")}
        self._built = {name: each for name, each in tensors.items() if not each.requires_grad}
        self._moved = set(moving)  # looked at no more: on a GPU a comparison waits for it
        self._untold = [name for name in self._built if name not in moving]
        self._has_values = not all(each.is_meta for each in tensors.values())
        # of the partitions' tensors that are not trained, when they were looked at last
        self._versions: dict[str, tuple[torch.Tensor, int | None]] = {}
        keep_originals(tensors, moving, read)
        keep_left(self._model, left_by_module(self._model, graph.left))

    def note_trained(self) -> None:
        """An update has been applied to the partitions' weights."""
        note_trained(self._model)

    def note_held(self, held: Mapping[str, torch.Tensor], written: WrittenTensors | tuple[()] = ()) -> list[str]:
        """Look at what this rank holds now.

        Args:
            held: Its parameters and buffers by name.
            written: Those that forwards write, as they may through `.data`, which torch counts as no change.

        Returns:
            The names of those, beside trained weights, that are no more as when this was called last, nor as built.
        """
        before, untrained = self._versions, {name: each for name, each in held.items() if not each.requires_grad}
        self._versions = {
            name: (each, None if each.is_inference() else each._version) for name, each in untrained.items()
        }
        moved = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for name, (tensor, version) in self._versions.items():
                known, last = before.get(name, (tensor, version))
                has_moved = known is not tensor or last != version or tensor in written
                if has_moved and name not in self._moved and not self._is_as_built(name, tensor):
                    moved.append(name)
        return moved

    def _is_as_built(self, name: str, tensor: torch.Tensor) -> bool:
        built = self._built.get(name)
        return built is not None and has_values_of(built, tensor)

    def note_moved(self, held: Mapping[str, torch.Tensor], written: WrittenTensors, member: Membership) -> None:
        """What a step has moved the script may no more read of the builder's; every rank calls this behind each.

        In the first step all ranks tell each other: mostly forwards move the same ones from then on.
        """
        moved, untold, self._untold = self.note_held(held, written), self._untold, []
        if untold:
            mine = [float(name in moved) for name in untold]
            told = member.numbers_of_all(mine)
            moved += [name for flags in told for name, flag in zip(untold, flags, strict=True) if flag]
        self._moved.update(moved)
        for name in moved if self._has_values else ():
            note_moved(self._model, name)
