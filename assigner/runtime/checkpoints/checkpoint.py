"""Checkpoints of a model that is nowhere whole: every rank writes its part, keyed by the model's own names.

The weights are safetensors shards with the index that Hugging Face reads; optimizer state lies beside them, keyed
`PARAMETER/STATE`, with the plain numbers among it and each parameter's settings (`lr`, ...) in its index. Nothing is
pickled, so a checkpoint can run no code. All of it is read and checked before anything is overwritten.

State that goes from batch to batch are tensors of the whole batch, keyed `INPUT/NUMBER`, by the leaf's number in the
state. Their index has a section `dimensions`: in which dimension a tensor has its rows, or null; and the batch's rows
in a section `batch`. Any plan cuts them again.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from assigner.errors import FormatError, UsageError
from assigner.formats.document import Range, decode, shown
from assigner.model.plainvalues import dtype_name, from_json, to_json
from assigner.runtime.batch.recurrence import StateLeaf, StatePart, output_leaves
from assigner.runtime.checkpoints.optimizerstate import OptimizerState
from assigner.runtime.checkpoints.shards import DAMAGED, SAVE, Index, index_of, read_json
from assigner.runtime.checkpoints.swapping import FACTS, leftovers
from assigner.runtime.checkpoints.wholestate import extra_key
from assigner.runtime.ranks.packedvalues import PackedValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import StatePlace
    from assigner.runtime.stages.localpartitions import LocalPartitions
    from assigner.runtime.update.rankoptimizer import RankOptimizer

_PART = f".{_EXTRA_STATE_KEY_SUFFIX}"  # of a module's name: its extra state

_CARRIED = "load it with the workload that wrote it: its Workload.carried says which inputs carry state"
_COUNT = Annotated[int, Range(0, 2**63 - 1)]
_SCALER = {
    "scale": Annotated[float, Range(5e-324, 3.5e38)],
    "growth_factor": Annotated[float, Range(1)],
    "backoff_factor": Annotated[float, Range(5e-324, 1)],
    "growth_interval": Annotated[int, Range(1)],
    "_growth_tracker": _COUNT,
}


@dataclass(frozen=True)
class TrainingProgress:
    """Where training is, apart from weights and optimizer: the same on every rank.

    No generator's state is here: every random choice in training is seeded by the batch's number.

    Args:
        steps: Updates that were made.
        batches: Batches that were seen.
        scaler: The gradient scaler's state; empty: it is disabled.
        state: What the training script keeps: plain values.
    """

    steps: int
    batches: int
    scaler: dict[str, float]
    state: Any = None

    def facts(self) -> dict[str, Any]:
        """As JSON.

        Raises:
            UsageError: `state` holds a value that is not plain.
        """
        state = to_json(self.state, "state")
        return {"steps": self.steps, "batches": self.batches, "scaler": self.scaler, "state": state}

    @classmethod
    def of(cls, facts: Mapping[str, Any], path: Path) -> TrainingProgress:
        """From JSON; checkpoints of old have only the counts and the model's fingerprint.

        Raises:
            FormatError: something else stands there.
        """
        try:
            decode(str, facts.get("fingerprint"), "fingerprint")
            steps, batches = (decode(_COUNT, facts.get(key), key) for key in ("steps", "batches"))
            scaler = decode(dict[str, Any], facts.get("scaler", {}), "scaler")
            for key, kind in _SCALER.items() if scaler else ():
                decode(kind, scaler.get(key), f"scaler.{key}")
            return cls(steps, batches, {key: scaler[key] for key in _SCALER if scaler}, from_json(facts.get("state")))
        except FormatError as error:
            raise FormatError(f"{path}: {error.message}", hint=DAMAGED) from error


@dataclass(frozen=True)
class Checkpoint:
    """What one rank has read and checked.

    Args:
        mark: The same on all ranks that have read the same checkpoint, as far as its JSON says.
        tensors: Those that have a place on this rank, by the model's names.
        moments: The state of this rank's optimizer; None: it is not wanted.
        extra: What this rank's modules are to be given as their extra state.
        carried: The state that goes from batch to batch; None: there is none, or it is not wanted.
    """

    mark: int
    progress: TrainingProgress
    tensors: Mapping[str, torch.Tensor]
    moments: OptimizerState | None
    extra: Mapping[str, Any]
    carried: StatePart | None

    @classmethod
    def read(
        cls,
        folder: Path,
        share: LocalPartitions,
        optimizer: RankOptimizer | None,
        *,
        places: Mapping[StatePlace, StatePlace],
    ) -> Checkpoint:
        """What this rank needs of a checkpoint, whatever plan wrote it; nothing is changed yet.

        A buffer that is None, and was so when it was saved, stays so. Without an optimizer nothing is trained.

        Raises:
            UsageError: there is no checkpoint.
            FormatError: it is broken, of another model, or lacks a tensor of this shape and type.
        """
        state = share.state()
        with _reading(folder, FACTS):
            path = folder / FACTS
            facts = read_json(path)
            progress = TrainingProgress.of(facts, path)
            if facts["fingerprint"] != share.graph.fingerprint:
                raise FormatError(f"{folder} was saved from another model", hint=_hint_of_another(folder, share.graph))
            index = Index.read(folder, "model")
            extra, names = share.extra_state(), [name for name in index.section("weight_map") if _PART not in name]
            check_places(names, share.graph, FormatError, str(index.path))
            wanted = share.places(names).keys()
            found = index.tensors(lambda name: name in wanted or name.partition(_PART)[0] in extra)
            _aliases(index)
            for name, tensor in state.items():
                _check_like(index.path, name, found.get(name), tensor)
            moments = carried = None
            if optimizer is not None:
                carried = read_state(folder, share.graph, places)
                moments = OptimizerState.read(folder, share.updated, optimizer, of_old="shared" not in index.content)
            paths = (path, index.path, index_of(folder, "optimizer"), index_of(folder, "carried"))
            index.check_save(path, facts.get(SAVE))
            for kind in ("optimizer", "carried"):
                if index_of(folder, kind).is_file():
                    Index.read(folder, kind).check_save(path, facts.get(SAVE))
            mark = zlib.crc32(b"".join(each.read_bytes() for each in paths if each.is_file()))
            tensors = {name: tensor for name, tensor in found.items() if name in wanted}
            return cls(mark, progress, tensors, moments, _extra_states(index, found, extra), carried)

    def put(self, share: LocalPartitions, optimizer: RankOptimizer | None) -> None:
        """Fill what it was read for, in place; the optimizer's state and its settings (`lr`, ...) are replaced."""
        places = share.places(self.tensors)  # as they were read: `set_extra_state` may take one away
        share.set_extra_state(self.extra)
        places.update(share.places(self.tensors))
        for name, tensor in self.tensors.items():
            places[name](tensor)
        if self.moments is not None and optimizer is not None:
            self.moments.put(share.updated, optimizer)


def _hint_of_another(folder: Path, graph: PartitionGraph) -> str:
    """Where the tensors are those of the model, it may be another one by what is trained."""
    hint = "load it with the workload that wrote it"
    with contextlib.suppress(FormatError):
        names = {name for name in Index.read(folder, "model").section("weight_map") if _PART not in name}
        if names == {graph.canonical[name] for name in graph.persistent} & graph.persistent:
            return (
                f"{hint}; its weights have the names of this model's, so where another part is trained (requires_grad)"
                " take them alone: pipeline.load_state_dict(assigner.load_weights(folder))"
            )
    return hint


def check_places(names: Iterable[str], graph: PartitionGraph, kind: type[FormatError | UsageError], where: str) -> None:
    """The model has all of these tensors, or can be given them.

    Raises:
        FormatError, UsageError: as `kind` says, naming one that has no place.
    """
    for name in names:
        if name not in graph.persistent and not graph.takes_buffer(name, graph.piece):
            raise kind(
                f"{where}: {shown(name)} has no place in the model",
                hint="where a forward registers it, register it in the module's __init__ (None will do)",
            )


def _check_like(path: Path, name: str, found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    if found is None:
        raise FormatError(f"{path}: {name!r} is missing", hint="was it saved from the same model?")
    for what, one, other in (
        ("shape", tuple(found.shape), tuple(wanted.shape)),
        ("type", dtype_name(found.dtype), dtype_name(wanted.dtype)),
    ):
        if one != other:
            raise FormatError(
                f"{path}: {name!r} has {what} {one}, the model {other}",
                hint="load it with the workload that wrote it; assigner.load_weights gives the weights as they are",
            )


def _aliases(index: Index) -> dict[str, str]:
    """Further names of parameters -> the first one, under which they are saved; checkpoints of old have none."""
    places, found = index.section("weight_map"), index.section("shared", optional=True)
    for name, first in found.items():
        if name in places or not isinstance(first, str) or first not in places:
            index.refuse(f"shared: {shown(name)}", first, "the name of a tensor that is here")
    return found


def extra_part(path: str, number: int) -> str:
    """The key of a tensor of a module's extra state."""
    return f"{extra_key(path)}/{number}"


def _extra_states(index: Index, found: Mapping[str, torch.Tensor], wanted: Iterable[str]) -> dict[str, Any]:
    """What modules have said beside their tensors, by the modules' names; checkpoints of old have none."""
    told = index.section("extra", optional=True)
    made = {}
    for path in wanted if "extra" in index.content else ():
        try:
            text = told[path]
            made[path] = PackedValue(
                text, tuple(found[extra_part(path, n)] for n in range(len(json.loads(text)[1])))
            ).value
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            index.refuse(f"extra: {shown(path)}", told.get(path), f"what get_extra_state gave ({error!r})")
    return made


def check_saved(state: StatePart | None, graph: PartitionGraph, places: Mapping[StatePlace, StatePlace]) -> None:
    """A state is saved without its structure: it must be that of the model's output.

    Raises:
        UsageError: it has another one.
    """
    if state is not None and state.structures != {
        place: output_leaves(graph.output.structure, source)[1] for place, source in places.items()
    }:
        raise UsageError(
            "the carried state has another structure than with batches as Workload.batch makes them, and is not saved",
            hint="save after a batch like those, or after pipeline.reset_carried()",
        )


def packed_state(state: StatePart, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """What a rank writes: the tensors that it is the first to hold, and sections of the index."""
    mine = {key: leaf for key, leaf in _keyed(state) if leaf.holders and min(leaf.holders) == rank}
    tensors = {key: leaf.value for key, leaf in mine.items()}
    return tensors, {"dimensions": {key: leaf.dimension for key, leaf in mine.items()}, "batch": {"rows": state.rows}}


def _keyed(state: StatePart) -> Iterator[tuple[str, StateLeaf]]:
    for place in state.structures:
        for number, leaf in enumerate(each for each in state.leaves if each.place == place):
            yield f"{place}/{number}", leaf


def read_state(folder: Path, graph: PartitionGraph, places: Mapping[StatePlace, StatePlace]) -> StatePart | None:
    """The state of a checkpoint, with the values of all of it; None: there is none.

    Raises:
        FormatError: it is broken, or that of a workload which carries something else.
    """
    if not index_of(folder, "carried").is_file():
        return None
    index = Index.read(folder, "carried")
    dimensions, given = index.section("dimensions"), index.section("batch").get("rows")
    rows: int = given if type(given) is int and given > 0 else index.refuse("batch: rows", given, "a number of rows")
    found = index.tensors(lambda _: True)
    structures, leaves = {}, []
    for place, source in places.items():
        numbers, structures[place] = output_leaves(graph.output.structure, source)
        for n, number in enumerate(numbers):
            facts, key = graph.output.tensors[number], f"{place}/{n}"
            if facts is None:
                leaves.append(StateLeaf(place, graph.output.leaves[number], None, frozenset()))
            elif key in found:
                value = found.pop(key)
                dimension = _dimension(index, dimensions, key, tuple(value.shape), rows)
                leaves.append(StateLeaf(place, value, dimension, frozenset()))
            else:
                raise FormatError(f"{index.path}: {key!r} is missing", hint=_CARRIED)
    if found:
        raise FormatError(f"{index.path}: {min(found)!r} is no state of this workload", hint=_CARRIED)
    return StatePart(rows, structures, leaves)


def _dimension(index: Index, dimensions: Mapping[str, Any], key: str, shape: tuple[int, ...], rows: int) -> int | None:
    """In which dimension a tensor of this shape has its rows, as the index says; None: in none."""
    found = dimensions.get(key)
    if found is not None and (type(found) is not int or found < 0):
        index.refuse(f"dimensions: {key!r}", found, "a dimension or null")
    if found is not None and (found >= len(shape) or shape[found] != rows):
        raise FormatError(
            f"{index.path}: {key!r} has shape {shape}, without {rows} rows in dimension {found}", hint=DAMAGED
        )
    return found


@contextlib.contextmanager
def _reading(folder: Path, first: str) -> Iterator[None]:
    """The block reads one checkpoint, and says what else lies there if it cannot.

    Raises:
        UsageError: there is no file `first`, so no checkpoint.
        FormatError: the folder was replaced meanwhile.
    """
    try:
        found, left = (folder / first).exists(), leftovers(Path(os.path.realpath(folder)))
        told = " and ".join(f"{each}{' (whole)' if (each / FACTS).is_file() else ''}" for each in left)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be read: {error.strerror}", hint="is this the path of a checkpoint?"
        ) from error
    hint = f"a save that was broken off left {told}: one that is whole can be renamed" if left else None
    if not found:
        lacks = f"it has no {first}" if folder.exists() else "there is no such folder"
        raise UsageError(
            f"{folder} is no checkpoint: {lacks}", hint=hint or "name the folder that pipeline.save(folder) has written"
        )
    before = _identity(folder)
    failed: FormatError | OSError | None = None
    try:
        yield
    except (FormatError, OSError) as error:
        failed = error
    if _identity(folder) != before:
        raise FormatError(f"{folder} was replaced while it was read", hint="load it again") from failed
    if isinstance(failed, OSError):
        raise FormatError(f"{folder}: cannot be read: {failed}", hint=hint or DAMAGED) from failed
    if failed is not None and hint is not None:
        raise type(failed)(failed.message, hint=f"{failed.hint}; {hint}" if failed.hint else hint) from failed
    if failed is not None:
        raise failed


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def load_weights(folder: Path | str) -> dict[str, torch.Tensor]:
    """All weights and buffers of a checkpoint, in this process: what a plain model's `load_state_dict` takes.

        model.load_state_dict(assigner.load_weights("checkpoint"))

    A parameter that has several names in the model stands under each of them. Nothing is unpickled, and neither the
    plan nor the workload is needed.

    Args:
        folder: What `Pipeline.save` wrote, or the model's shards of it with their index.

    Returns:
        What the plain model's `state_dict()` would hold, by its own keys: tensors on the CPU, of the types that they
        were saved with, and modules' extra state.

    Raises:
        UsageError: there is no checkpoint; or the model's own `state_dict` makes values of its weights, which only the
            model can do (`Pipeline.full_state_dict`).
        FormatError: it is broken; the message says which file, and where in it.
    """
    folder = Path(folder)
    with _reading(folder, index_of(folder, "model").name):
        index = Index.read(folder, "model")
        found = index.tensors(lambda _: True)
        told, plain = index.section("extra", optional=True), index.section("plain", optional=True)
        extra = {extra_key(path): each for path, each in _extra_states(index, found, told).items()}
        held = {name: tensor for name, tensor in found.items() if name.rpartition("/")[0] not in extra}
        held.update({name: found[first] for name, first in _aliases(index).items()})
        for key, name in plain.items():
            if name is None:
                raise UsageError(
                    f"{folder}: the model's own state_dict makes {key!r}: a checkpoint has the weights alone",
                    hint="pipeline.load(folder), then pipeline.full_state_dict()",
                )
            if not isinstance(name, str) or name not in held:
                index.refuse(f"plain: {shown(key)}", name, "the name of a tensor that is here")
        return {**({key: held[name] for key, name in plain.items()} if plain else held), **extra}
