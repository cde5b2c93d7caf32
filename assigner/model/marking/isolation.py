"""What a partition may share with the rest of the model while a forward is captured: nothing that nobody sends.

A marked module may run in another process. There it has its own weights and its own Python state as the builder made
them, and what it is given as arguments. Whatever else its forward reads, or leaves for others, is refused.
"""

from __future__ import annotations

import contextvars
import enum
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.deferred.contents import memory_of
from assigner.model.deferred.memento import ABSENT, Memento, StateChange
from assigner.model.deferred.mutation import storage_of
from assigner.model.marking.collecting import collector_variable, hooks_of
from assigner.model.marking.fakeforward import own_tensors
from assigner.model.marking.modules import modules_inside, modules_outside

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence

    from assigner.model.marking.fakeforward import Named

_PLAIN = (
    bool, int, float, complex, str, bytes, slice, range, set, frozenset, enum.Enum, np.generic, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_COMPILERS = ("TORCHINDUCTOR_", "TRITON_")  # keep their folders in the environment once they have run


class CrossingError(MarkingError):
    """What a call is given or returns cannot be sent.

    Attributes:
        module: The module that is called, by its name in the model; empty: it is no module.
    """

    def __init__(self, message: str, *, hint: str | None = None, module: str = "") -> None:
        super().__init__(message, hint=hint)
        self.module = module


class Isolation:
    """Checks the opaque modules of a model against what they were when its forward began.

    Args:
        model: The model.
        names: The modules.
        made_anew: What stands for tensors in attributes that they make anew wherever they run.

    Attributes:
        inside: The modules in each, with it, by its name.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], made_anew: Collection[torch.Tensor] = ()) -> None:
        self.model, self.names, self._made_anew = model, list(names), {id(each): each for each in made_anew}
        self.inside = {name: modules_inside(model, name) for name in self.names}
        self._owners: dict[int, set[str]] = {}
        self._tensors: dict[str, dict[str, tuple[int, bool]]] = {}
        self._around = Surroundings()
        self._values: dict[str, Memento] = {}
        self._hooks: dict[str, dict[str, list[Any]]] = {}

    def begin(self) -> None:
        """The model's forward begins: what the modules are made of now is what they must be made of when called."""
        self._tensors = {name: self._tensors_of(name) for name in self.names}
        self._around = Surroundings()
        self._values = {name: self.values_of(self.inside[name]) for name in self.names}
        self._hooks = {name: hooks_of(self.inside[name]) for name in self.names}
        around = self.values_of(modules_outside(self.model, self.names))
        self._owners = {}
        for owner, values in {**self._values, "": around}.items():
            for number in values.holders():
                self._owners.setdefault(number, set()).add(owner)

    def _tensors_of(self, name: str) -> dict[str, tuple[int, bool]]:
        """A module's parameters and buffers by name: which each is, and whether it wants a gradient."""
        return {key: (id(each), each.requires_grad) for key, each in own_tensors(self.inside[name]).items()}

    def values_of(self, modules: Named) -> Memento:
        """What some modules of the model, and the files of their classes, hold in Python now."""
        return Memento(modules, beside=self.model.modules(), parameters=True, top="whole")

    def check_unchanged(self, name: str) -> None:
        """The module runs elsewhere with its own weights and its own state: nobody may have given it others.

        Raises:
            MarkingError: its tensors are not those that it had when the model's forward began.
            CrossingError: nor are its attributes, or the hooks on it.
        """
        before, now = self._tensors[name], self._tensors_of(name)
        if [each for each, _ in now.values()] != [each for each, _ in before.values()]:
            raise MarkingError(
                f"{name!r} is called with other weights than its own (functional_call, or weights that are set)",
                hint="mark a larger module that contains the call, or give the weights as an argument of its forward",
            )
        changes = self._values[name].changes()
        changed = [f"attribute {each.name}" for each in changes]
        fakes = [
            f"attribute {inner}.{key}"
            for inner, module in self.inside[name]
            for key, value in module.__dict__.items()
            if isinstance(value, FakeTensor) and id(value) not in self._made_anew
        ]
        changed += self._around.changes()
        hooks = hooks_of(self.inside[name])
        changed += [f"a hook on {each!r}" for each in hooks if hooks[each] != self._hooks[name].get(each)]
        changed += [f"requires_grad of {each!r}" for each in now if now[each] != before.get(each)]
        if changed or fakes:
            raise CrossingError(
                f"{(changed or fakes)[0]} is set from outside before {name!r} is called: the worker that runs"
                " it would not see that",
                hint=f"{_FILLED if changes and _is_filled(changes[0]) else ''}give the value as an argument of the"
                " module's forward, leave the module unmarked, or mark a larger one that contains both",
            )

    def check_own(self, label: str, inside: Named, read: set[int], known: Sequence[torch.Tensor]) -> None:
        """A partition has its own tensors and those that it is given.

        Raises:
            MarkingError: its forward reads another tensor of the model, by an object that it holds.
        """
        others = read - {storage_of(each) for each in known}
        strangers = [pair for pair in self.model.named_modules() if others and pair not in inside]
        for name, tensor in own_tensors(strangers).items():
            if storage_of(tensor) in others:
                raise MarkingError(
                    f"{label} reads {name.lstrip('.')!r}, which is not its own: the worker that runs it may lack it",
                    hint="give it as an argument of the module's forward, or register the same tensor on the module",
                )

    def check_shared(self, name: str, values: Memento, written: Container[int], around: Surroundings) -> None:
        """What a partition's forward leaves in an object that others can reach would stay on its worker.

        `values` and `around`, which is put back, are from before it; `written` are the storages that it has written.

        Raises:
            MarkingError: it changes such an object, a tensor at the top of a file, or its surroundings.
        """
        if not name:
            return
        others = around.left(training=self.model.training)
        around.put_back()
        if others:
            raise MarkingError(
                f"the forward of {name!r} sets {others[0]}: nobody can put that back when it runs again, and other"
                " workers would not see it",
                hint="keep it in a buffer or in an attribute of the module; or set it back before the forward ends",
            )
        for where, tensor in values.beyond():
            if storage_of(tensor) in written:
                raise MarkingError(
                    f"{name!r} changes {where} in place, which nobody can put back when its forward runs again",
                    hint="keep it in a buffer of the module (register_buffer)",
                )
        for change in values.changes():
            if change.is_beyond:
                raise MarkingError(
                    f"{name!r} changes {change.name}, which nobody can put back when its forward runs again",
                    hint="keep it in a buffer or in an attribute of the module",
                )
            if self._owners.get(id(memory_of(change.holder)), {name}) - {name}:
                raise MarkingError(
                    f"{name!r} changes {change.name}, which is shared with other parts of the model: they may run"
                    " on another worker, which would not see that",
                    hint=f"{_FILLED_BY_ALL if _is_filled(change) else ''}pass it through arguments and return values,"
                    " or mark a larger module that contains all of it",
                )


def check_sent(
    label: str, does: str, values: Iterable[Any], tensors: Sequence[torch.Tensor] = (), usual: Container[str] = ()
) -> None:
    """What is no tensor is a constant of the partition: an object would carry values that nobody sends.

    And a message carries a tensor's values, and nothing that hangs on it.

    Args:
        label: What has them, for people.
        does: It "is given" or "returns" them.
        values: Those that are neither tensors nor symbolic sizes.
        tensors: Fake ones.
        usual: Attributes that every fake tensor has.

    Raises:
        CrossingError: a value is neither a tensor nor a plain one, or somebody has set an attribute on a tensor.
    """
    for leaf in values:
        if not isinstance(leaf, _PLAIN):
            raise CrossingError(
                f"{label} {does} a {type(leaf).__name__}, which is neither a tensor nor a plain value",
                hint=_MODULES if isinstance(leaf, nn.Module) else _PLAINLY,
            )
    for tensor in tensors:
        hung = [name for name in getattr(tensor, "__dict__", ()) if name not in usual and "memo" not in name]
        if hung and not isinstance(tensor, nn.Parameter):
            raise CrossingError(
                f"{label} {does} a tensor with an attribute of its own, {hung[0]!r}: between workers it would be lost",
                hint="pass the attribute's value as an argument or a result of its own",
            )


_FILLED = (
    "a dict that keeps what was made may be functools.cache on the function that makes it, of which each worker has its"
    " own; or "
)


_FILLED_BY_ALL = "a dict that keeps what was made may be an attribute of each module that fills it; or "


def _is_filled(change: StateChange) -> bool:
    return change.before is ABSENT and isinstance(change.holder, dict) and change.name.endswith("]")


_PLAINLY = (
    "use tensors, numbers, text, None, or tuples, lists and dicts of them; a Hugging Face model makes no cache with"
    " use_cache=False in its config; or mark a larger module, from which it does not come out"
)
_MODULES = (
    "mark a larger module that contains the call: a module has weights, which belong to the partition that calls it"
)


def check_unpacked(label: str, does: str, tree: Any) -> None:
    """A packed sequence is cut by lengths that only its values tell, and its maker alone can build it again.

    Raises:
        CrossingError: there is one among what something "is given" or "returns".
    """
    found = pytree.tree_leaves(tree, is_leaf=lambda each: isinstance(each, PackedSequence))
    if any(isinstance(each, PackedSequence) for each in found):
        raise CrossingError(
            f"{label} {does} a PackedSequence, which cannot go from one partition to another",
            hint="hand on padded tensors with their lengths: a module that packs, calls the layer and pads again"
            " (pack_padded_sequence, pad_packed_sequence with total_length) can be marked in its place",
        )


class Surroundings:
    """What a forward can be told beside its arguments, as it is now.

    Context variables, the environment, torch's default type: each worker has its own, and a forward that runs again
    finds those that its first run has left.
    """

    def __init__(self) -> None:
        self._variables = dict(contextvars.copy_context().items())
        self._variables.pop(collector_variable(), None)
        self._environment = dict(os.environ)
        self._type = torch.get_default_dtype()
        self._records = torch.is_grad_enabled()

    def changes(self) -> list[str]:
        """The names of those that are another now, for people."""
        now = Surroundings()
        found = [
            f"the context variable {each.name!r}"
            for each in {**self._variables, **now._variables}
            if self._variables.get(each, ABSENT) is not now._variables.get(each, ABSENT)
        ]
        if self._environment != now._environment:
            names = [
                name
                for name in {**self._environment, **now._environment}
                if self._environment.get(name) != now._environment.get(name) and not name.startswith(_COMPILERS)
            ]
            found += [f"the environment variable {name!r}" for name in names]
        return found + (["torch's default type"] if self._type is not now._type else [])

    def left(self, *, training: bool) -> list[str]:
        """Likewise of one call: what calls it may suspend gradients, and a call gives them back as it found them.

        In an evaluation it may have them on behind it, as one that turns them off and on: nobody takes any there.
        """
        are_on = torch.is_grad_enabled()
        lost = self._records != are_on and (training or not are_on)
        return self.changes() + (["whether gradients are on"] if lost else [])

    def put_back(self) -> None:
        """Have them as they were; but for context variables, which are those of the context that a call runs in."""
        for name in {**self._environment, **os.environ}:
            if name not in self._environment:
                del os.environ[name]
            elif os.environ.get(name) != self._environment[name]:
                os.environ[name] = self._environment[name]
        torch.set_default_dtype(self._type)
        torch.set_grad_enabled(self._records)
