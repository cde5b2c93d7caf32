"""A rank's share of a model: the partitions that a plan gives it, as modules with their weights under their names."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.errors import UsageError
from assigner.model.marking.leftovers import ReadElsewhere
from assigner.model.marking.marks import matches
from assigner.runtime.forward.attributes import changed_attributes, check_portable, check_rebuilt, put_attributes
from assigner.runtime.ranks.packedvalues import copy_of
from assigner.runtime.stages.updaters import updaters
from assigner.schedule.replication import is_exchanged, tie_holders

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph


class LocalPartitions:
    """What one rank holds under a plan. Nothing else of the model is built.

    Attributes:
        partitions: The names of its partitions, in the order in which it runs them.
        read_elsewhere: What code outside of them may read of these, as it was built.
        parameters: Its parameters, each once, by the first of its names in the model.
        updated: Those of them that this rank updates (see `updaters`).
        kept_updated: Those of them whose optimizer state it writes into checkpoints.
    """

    def __init__(
        self, graph: PartitionGraph, plan: Plan, worker: str | None, device: torch.device, unread: UnreadState
    ) -> None:
        stages = [stage for stage in plan.stages if worker in stage.workers]
        self.partitions = tuple(name for stage in stages for name in stage.partitions)
        self._kept = tuple(name for name in self.partitions if plan.holders[name][0] == worker)
        self.modules = graph.build(self.partitions, device)
        self.read_elsewhere = ReadElsewhere(self.modules)
        self.graph, self.plan, self.unread, self._device = graph, plan, unread, device
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        for name in self.partitions:
            known = graph.piece[name].parameters
            module = self.modules[name]
            self._parameters[name] = {graph.canonical[each]: module.get_parameter(each) for each in known}
        self.parameters = self._parameters_of(self.partitions)
        buffers = (self.buffers_of(name) for name in self.partitions)
        self._built = {name: weakref.ref(each) for held in buffers for name, each in held.items()}
        by = updaters(graph, plan)
        self.updated = {name: each for name, each in self.parameters.items() if worker in by[name]}
        self.kept_updated = {name: each for name, each in self.updated.items() if worker == by[name][0]}

    def buffers_of(self, partition: str) -> dict[str, torch.Tensor]:
        """The buffers of a partition of this rank, as they are now: forwards may assign others."""
        return {name: tensor for name, tensor in self._slots(partition).items() if tensor is not None}

    def held_by(self, partition: str) -> dict[str, torch.Tensor]:
        """All tensors of a partition of this rank, also the buffers that no checkpoint has."""
        return {**self._parameters[partition], **self.buffers_of(partition)}

    def held(self) -> dict[str, torch.Tensor]:
        """All tensors of its partitions, also the buffers that no checkpoint has."""
        return {name: each for partition in self.partitions for name, each in self.held_by(partition).items()}

    def built(self) -> dict[str, torch.Tensor]:
        """Its parameters and buffers by name, without what forwards have put in their places, which may be others'."""
        found = {name: buffer() for name, buffer in self._built.items()}
        return {**self.parameters, **{name: each for name, each in found.items() if each is not None}}

    def copies(self) -> dict[tuple[str, ...], dict[str, nn.Parameter]]:
        """This rank's copies of the parameters that other workers hold too, by all that do; ordered by name."""
        tied = {tie.parameter: tie_holders(self.plan, tie) for tie in self.graph.ties if is_exchanged(self.plan, tie)}
        found: dict[tuple[str, ...], dict[str, nn.Parameter]] = defaultdict(dict)
        for partition in self.partitions:
            for name, parameter in self._parameters[partition].items():
                workers = tied.get(name, self.plan.holders[partition])
                if len(workers) > 1:
                    found[workers][name] = parameter
        return {workers: dict(sorted(held.items())) for workers, held in found.items()}

    def held_elsewhere(self) -> dict[int, tuple[str, str]]:
        """This rank's tensors that others have too, by their ids: their names and who has them, in words, and a hint.

        Others are other workers, and with several micro-batches this one's other stages, which come when a later
        micro-batch may have been in the first.
        """
        memory = {name: each.untyped_storage()._cdata for name, each in self.graph.deferred.tensors().items()}
        workers, stages = defaultdict[int, set[str]](set), defaultdict[int, set[int]](set)
        for piece in self.graph.pieces:
            for name in piece.state:
                workers[memory[name]].update(self.plan.holders[piece.name])
                stages[memory[name]].add(self.plan.stage_of[piece.name])
        found = dict[int, tuple[str, str]]()
        together = "the partitions that share it (assigner.partition(..., colocate=LABEL))"
        for name, tensor in self.held().items():
            if len(workers[memory[name]]) > 1:
                found[id(tensor)] = (
                    f"{name}, which another worker holds too and would not see",
                    f"have {together} on one worker, in a stage without replicas (assigner solve --max-replicas 1)",
                )
            elif len(stages[memory[name]]) > 1 and self.plan.micro_batches > 1:
                found[id(tensor)] = (
                    f"{name}, which another stage of its worker has too and may find as a later micro-batch leaves it",
                    f"have {together} in one stage, or the batch in one micro-batch",
                )
        return found

    def attributes(self, partition: str) -> dict[str, Any]:
        """What forwards have changed on the modules of a partition of this rank beside its tensors, by name."""
        return changed_attributes(self.modules[partition], self.graph.deferred)

    def check_leaving(self, partitions: Iterable[str], *, gradients: bool = False) -> None:
        """Raise UsageError where an attribute or a gradient of this rank's partitions cannot go to another worker."""
        for partition in partitions:
            check_portable(self.attributes(partition))
            for name, parameter in self._parameters[partition].items() if gradients else ():
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise UsageError(
                        f"the next step adds to the gradient of {name!r}, which is sparse and cannot leave its worker",
                        hint="pipeline.optimizer.zero_grad() before the move",
                    )

    def check_parameters(self) -> None:
        """Raise UsageError where forwards compute with other parameters than those that are trained and saved."""
        for partition in self.partitions:
            now = dict(self.modules[partition].named_parameters(remove_duplicate=False))
            for name in self.graph.piece[partition].parameters:
                if now.get(name) is not self.parameters[self.graph.canonical[name]]:
                    raise UsageError(
                        f"forward has put another parameter in the place of {name!r}, which is the one that is trained",
                        hint="change its values (`copy_`), and have forward decide which module it calls",
                    )
            known = {id(each) for each in self._parameters[partition].values()}
            for name, parameter in now.items():
                if id(parameter) not in known and name not in self.graph.canonical:
                    raise UsageError(
                        f"forward has registered the parameter {name!r}: no optimizer and no checkpoint has it",
                        hint="make it in the module's __init__; what is not trained is a buffer, which forwards may"
                        " register",
                    )

    def check_rebuilt(self) -> None:
        """Raise UsageError where forwards have changed what no partition that is built anew could get."""
        self.check_parameters()
        for partition in self.partitions:
            check_rebuilt(self.modules[partition], self.graph.piece[partition].called, self.graph.deferred)

    def check_hung(self) -> None:
        """Raise UsageError where the script has hung something on a parameter, which a move makes anew without that."""
        built = self.graph.deferred.tensors()
        for name, parameter in self.parameters.items():
            first = built[name]
            if list((parameter._backward_hooks or {}).values()) != list((first._backward_hooks or {}).values()):
                what = "registered or removed a hook on"
            elif changed := [
                key
                for key in {**first.__dict__, **parameter.__dict__}
                if first.__dict__.get(key, first) is not parameter.__dict__.get(key, first)
            ]:
                what = f"set the attribute {changed[0]!r} of"
            else:
                continue
            raise UsageError(
                f"the script has {what} {name!r}: under the new plan that is another tensor, without it",
                hint="take it back before the move, and do it again behind it; or do it in Workload.model",
            )

    def freeze(self, partition: str, names: Collection[str]) -> None:
        """Have these of a partition's parameters want no gradient, and the others want one."""
        for name, parameter in self._parameters[partition].items():
            if parameter.requires_grad == (name in names):
                parameter.requires_grad_(name not in names)

    def put(self, partition: str, tensors: Mapping[str, torch.Tensor], attributes: Mapping[str, Any]) -> None:
        """Give a partition of this rank what `held_by` and `attributes` gave elsewhere.

        Buffers may have other shapes by now.
        """
        put_attributes(self.modules[partition], attributes, self._device)
        held = self.held_by(partition)
        for name in self._slots(partition).keys() - tensors.keys():
            self._put(partition, name, None, None)
        for name, tensor in tensors.items():
            self._put(partition, name, held.get(name), tensor)

    def _put(self, partition: str, name: str, now: torch.Tensor | None, tensor: torch.Tensor | None) -> None:
        """Have a tensor of a partition, which is `now`, be like this one: in its place where that has its shape."""
        if now is not None and tensor is not None and (now.shape, now.dtype) == (tensor.shape, tensor.dtype):
            now.detach().copy_(tensor)
        else:
            made = None if tensor is None else tensor.detach().to(self._device, copy=True)
            set_buffer(self.modules[partition], name, made)

    @contextlib.contextmanager
    def keeping(self, patterns: Sequence[str]) -> Iterator[None]:
        """Have the buffers whose names match one of these patterns be after the block what they were before."""
        before = {
            (partition, name): None if tensor is None else tensor.detach().clone()
            for partition in self.partitions
            for name, tensor in self._slots(partition).items()
            if any(matches(pattern, name) for pattern in patterns)
        }
        try:
            yield
        finally:
            for (partition, name), kept in before.items():
                self._put(partition, name, self._slots(partition).get(name), kept)

    def _slots(self, partition: str) -> dict[str, torch.Tensor | None]:
        """Names of all buffers of a partition, also of those that are None."""
        constants = self.graph.piece[partition].constants
        return {
            f"{path}.{name}" if path else name: tensor
            for path, module in self.modules[partition].named_modules(remove_duplicate=False)
            for name, tensor in module._buffers.items()
            if path or name not in constants
        }

    def places(self, saved: Collection[str] = ()) -> dict[str, Callable[[torch.Tensor], object]]:
        """What puts a loaded tensor in its place here, by its name: of all that have one, and of those saved that may.

        That may be a buffer that is None now, or one that is none yet.
        """
        found: dict[str, Callable[[torch.Tensor], object]] = {
            name: functools.partial(self.unread.put, name) for name in self.unread.names
        }
        for partition in self.partitions:
            slots = self._slots(partition)
            names = [name for name, each in slots.items() if each is None and self._is_persistent(partition, name)]
            names += [name for name in saved if name not in slots and self.graph.takes_buffer(name, [partition])]
            found.update({name: functools.partial(self._put, partition, name, None) for name in names})
        found.update({name: tensor.detach().copy_ for name, tensor in self.state().items()})
        return found

    def _is_persistent(self, partition: str, name: str) -> bool:
        """As the modules say now; a buffer that the forward reads itself lies in a module of the pipeline's own."""
        if name in self.graph.canonical:
            return name in self.graph.persistent
        path, _, leaf = name.rpartition(".")
        return leaf not in self.modules[partition].get_submodule(path)._non_persistent_buffers_set

    def state(self, *, kept: bool = False) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's own names; a shared parameter by its first name.

        Args:
            kept: Only those of the partitions whose first worker this rank is: it writes them into checkpoints.
        """
        partitions = self._kept if kept else self.partitions
        buffers = {
            name: tensor
            for partition in partitions
            for name, tensor in self.buffers_of(partition).items()
            if self._is_persistent(partition, name)
        }
        return {**self._parameters_of(partitions), **buffers}

    def parameters_of(self, partition: str) -> dict[str, nn.Parameter]:
        """The parameters of a partition of this rank, by the model's own names."""
        return self._parameters[partition]

    def _parameters_of(self, partitions: Sequence[str]) -> dict[str, nn.Parameter]:
        return {name: each for partition in partitions for name, each in self._parameters[partition].items()}

    def extra_state(self, *, kept: bool = False) -> dict[str, Any]:
        """What `get_extra_state` of this rank's modules says, by the modules' names; `kept`: as in `state`."""
        return {
            path: module.get_extra_state()
            for path, module in self._named_modules(self._kept if kept else self.partitions)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Give this rank's modules what theirs said elsewhere; others are left out."""
        for path, module in self._named_modules(self.partitions):
            if path in values:
                module.set_extra_state(values[path])

    def _named_modules(self, partitions: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
        for partition in partitions:
            yield from self.modules[partition].named_modules(remove_duplicate=False)


class UnreadState:
    """Tensors of the model that no partition holds: they stay as they were built, or as they were loaded.

    Args:
        rank: This rank; rank 0 gives and saves them, the others have them for evaluations that read them.
    """

    def __init__(self, graph: PartitionGraph, rank: int) -> None:
        self.names, self._gives = graph.unread, rank == 0
        self._loaded: dict[str, torch.Tensor] = {}
        self._deferred, self._lent = graph.deferred, dict[str, torch.Tensor]()

    def state(self) -> dict[str, torch.Tensor]:
        """Their values, on the CPU; on another rank than 0 none."""
        return self._values(self.names if self._gives else ())

    def _values(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        made = self._deferred.materialise(name for name in names if name not in self._loaded)
        return {**made, **{name: self._loaded[name] for name in names if name in self._loaded}}

    def lend(self, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Some of them on a device, for evaluations to read; what is loaded later comes there, too."""
        values = self._values([name for name in names if name not in self._lent])
        self._lent.update({name: tensor.detach().to(device, copy=True) for name, tensor in values.items()})
        return {name: self._lent[name] for name in names}

    def put(self, name: str, value: torch.Tensor) -> None:
        """Take over one that was loaded."""
        self._loaded[name] = copy_of(value).to(self._deferred.tensors()[name].dtype)
        if name in self._lent:
            self._lent[name].copy_(value)


def set_buffer(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Have a module's buffer, by its name with dots, be this tensor."""
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._buffers[leaf] = tensor
