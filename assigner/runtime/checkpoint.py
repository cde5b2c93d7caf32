"""Checkpoints of a model that is nowhere whole: every rank writes its part, keyed by the model's own names.

The weights are safetensors shards with the index that Hugging Face reads; optimizer state lies beside them, keyed
`PARAMETER/STATE`, with the plain numbers among it and each parameter's settings (`lr`, ...) in its index. Nothing is
pickled, so a checkpoint can run no code. A folder is written under another name and takes its own when every rank has
written: under its name it is always complete. All of it is read and checked before anything is overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from safetensors import SafetensorError

from assigner.document import Range, decode, shown
from assigner.errors import FormatError, UsageError
from assigner.runtime.moments import OptimizerState
from assigner.runtime.plain import from_json, to_json
from assigner.runtime.shards import DAMAGED, Index, index_of, nan_count, read_json, write_index, write_json, write_shard
from assigner.runtime.swapping import flush, leftovers, part_of, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.marking import PartitionGraph
    from assigner.runtime.optimizer import PipelineOptimizer
    from assigner.runtime.share import Share

_FACTS = "training.json"  # written last
_OURS = re.compile(r"training\.json|(model|optimizer)(\.safetensors\.index\.json|-\d{5,9}\.(safetensors|json))")

_COUNT = Annotated[int, Range(0, 2**63 - 1)]
_SCALER = {
    "scale": Annotated[float, Range(5e-324, 3.5e38)],
    "growth_factor": Annotated[float, Range(1)],
    "backoff_factor": Annotated[float, Range(5e-324, 1)],
    "growth_interval": Annotated[int, Range(1)],
    "_growth_tracker": _COUNT,
}


@dataclass(frozen=True)
class Progress:
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
    def of(cls, facts: Mapping[str, Any], path: Path) -> Progress:
        """From JSON; checkpoints of old have only the counts.

        Raises:
            FormatError: something else stands there.
        """
        try:
            steps, batches = (decode(_COUNT, facts.get(key), key) for key in ("steps", "batches"))
            scaler = decode(dict[str, Any], facts.get("scaler", {}), "scaler")
            for key, kind in _SCALER.items() if scaler else ():
                decode(kind, scaler.get(key), f"scaler.{key}")
            return cls(steps, batches, {key: scaler[key] for key in _SCALER if scaler}, from_json(facts.get("state")))
        except FormatError as error:
            raise FormatError(f"{path}: {error.message}", hint=DAMAGED) from error


class Saving:
    """A checkpoint on its way to the disk: stages, each of which begins when all ranks have ended the one before.

    Args:
        folder: Where to.
        rank: This rank.
        graph: The model's partitions.
        share: Those of this rank.
        optimizer: Its optimizer.
        progress: Where training is.
        force: A checkpoint that is there is replaced.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        graph: PartitionGraph,
        share: Share,
        optimizer: PipelineOptimizer,
        progress: Progress,
        force: bool,
    ) -> None:
        self._named, self._folder = folder, Path(os.path.realpath(folder))  # of a link, what it points to
        self._rank, self._force = rank, force
        self._graph, self._share, self._optimizer, self._progress = graph, share, optimizer, progress
        self._part = part_of(self._folder)
        self._begun = False

    @property
    def stages(self) -> tuple[Callable[[], None], ...]:
        """Each raises UsageError where it cannot be done; then `abandon` is to be called."""
        return self._check, self._begin, self._write, self._complete

    def _check(self) -> None:
        """Refuse before anything is written: what stands there, what cannot be kept, and what is not worth it."""
        for name, parameter in self._share.parameters.items():
            if count := nan_count(parameter):
                raise UsageError(
                    f"{name!r} holds {count} NaN: it is not saved, and what stands at {self._named} stays",
                    hint="training has diverged: go on from an earlier checkpoint",
                )
        self._moments = OptimizerState.of(self._share.parameters, self._optimizer)
        if self._rank == 0:
            with _written(self._named):
                self._check_place(self._named)
            self._facts = self._made_facts()

    def _check_place(self, folder: Path) -> None:
        if folder.exists() and not self._force:
            raise UsageError(f"{folder} exists", hint="save to a new folder; save(folder, force=True) replaces it")
        if folder.exists() and not (folder / _FACTS).is_file():
            raise UsageError(f"{folder} is no checkpoint, and is not replaced", hint="save to a new folder")
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if not _OURS.fullmatch(path.name):
                raise UsageError(
                    f"{folder} holds {path.name!r}, which is no part of a checkpoint, and is not replaced",
                    hint="move that elsewhere, or save to a new folder",
                )

    def _made_facts(self) -> dict[str, Any]:
        try:
            facts = {"fingerprint": self._graph.fingerprint, **self._progress.facts()}
            json.dumps(facts, indent=1)
            return facts
        except (RecursionError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"state cannot be saved: {error}", hint="keep less in it: a few numbers, texts, lists and dicts"
            ) from error

    def _begin(self) -> None:
        """Rank 0 makes the empty folder that all write to."""
        if self._rank == 0:
            self._begun = True
            with _written(self._named):
                shutil.rmtree(self._part, ignore_errors=True)
                self._part.mkdir(parents=True)

    def _write(self) -> None:
        """Write this rank's part."""
        if not self._part.is_dir():
            raise UsageError(
                f"{self._part}: rank {self._rank} does not see it", hint="save to a file system that all hosts share"
            )
        unread = self._graph.deferred.materialise(self._graph.unread) if self._rank == 0 else {}
        shared = {name: first for name, first in self._graph.canonical.items() if name != first}
        moments = self._moments
        with _written(self._named):
            write_shard(self._part, f"model-{self._rank:05}", {**unread, **self._share.state()}, {"shared": shared})
            write_shard(self._part, f"optimizer-{self._rank:05}", moments.tensors, moments.sections())

    def _complete(self) -> None:
        """Rank 0 completes the folder and gives it its name."""
        if self._rank == 0:
            with _written(self._named):
                write_index(self._part, "model")
                write_index(self._part, "optimizer")
                flush(self._part)
                write_json(self._part / _FACTS, self._facts)
                put(self._folder, _FACTS)

    def abandon(self) -> None:
        """Make room again after a stage that could not be done."""
        if self._begun:
            shutil.rmtree(self._part, ignore_errors=True)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot write {folder}: {why}", hint="make room, or save to another place") from error


@dataclass(frozen=True)
class Checkpoint:
    """What one rank has read and checked.

    Args:
        mark: The same on all ranks that have read the same checkpoint, as far as its JSON says.
        progress: Where training was.
        state: This rank's tensors by the model's names.
        empty: Buffers that are None in the model.
        moments: The state of this rank's optimizer; None: it is not wanted.
    """

    mark: int
    progress: Progress
    state: Mapping[str, torch.Tensor]
    empty: Mapping[str, torch.Tensor]
    moments: OptimizerState | None

    @classmethod
    def read(
        cls,
        folder: Path,
        fingerprint: str,
        share: Share,
        optimizer: PipelineOptimizer | None,
    ) -> Checkpoint:
        """What this rank needs of a checkpoint, whatever plan wrote it; nothing is changed yet.

        Args:
            folder: The checkpoint.
            fingerprint: Of the model.
            share: What is to be filled; a buffer that is None, and was so when it was saved, stays so.
            optimizer: Of the share's parameters. None: nothing is trained.

        Raises:
            UsageError: there is no checkpoint.
            FormatError: it is broken, of another model, or lacks a tensor of this shape and type.
        """
        state, empty = share.state(), share.empty()
        with _reading(folder, _FACTS):
            path = folder / _FACTS
            facts = read_json(path)
            if facts.get("fingerprint") != fingerprint:
                raise FormatError(
                    f"{folder} was saved from another model", hint="load it with the workload that wrote it"
                )
            progress = Progress.of(facts, path)
            index = Index.read(folder, "model")
            found = index.tensors(lambda name: name in state or name in empty)
            _aliases(index)
            for name, tensor in state.items():
                _check_like(index.path, name, found.get(name), tensor)
            moments = None
            if optimizer is not None:
                moments = OptimizerState.read(folder, share.parameters, optimizer, of_old="shared" not in index.content)
            paths = (path, index.path, index_of(folder, "optimizer"))
            mark = zlib.crc32(b"".join(each.read_bytes() for each in paths if each.is_file()))
            kept = {name: found[name] for name in state}
            return cls(mark, progress, kept, {name: found[name] for name in empty if name in found}, moments)

    def put(self, share: Share, optimizer: PipelineOptimizer | None) -> None:
        """Fill what it was read for, in place; the optimizer's state and its settings (`lr`, ...) are replaced."""
        empty = share.empty()
        for name, tensor in share.state().items():
            tensor.detach().copy_(self.state[name])
        for name, tensor in self.empty.items():
            empty[name](tensor)
        if self.moments is not None and optimizer is not None:
            self.moments.put(share.parameters, optimizer)


def _check_like(path: Path, name: str, found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    if found is None:
        raise FormatError(f"{path}: {name!r} is missing", hint="was it saved from the same model?")
    for what, one, other in (
        ("shape", tuple(found.shape), tuple(wanted.shape)),
        ("type", str(found.dtype).removeprefix("torch."), str(wanted.dtype).removeprefix("torch.")),
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


@contextlib.contextmanager
def _reading(folder: Path, first: str) -> Iterator[None]:
    """The block reads one checkpoint, and says what else lies there if it cannot.

    Raises:
        UsageError: there is no file `first`, so no checkpoint.
        FormatError: the folder was replaced meanwhile.
    """
    try:
        found, left = (folder / first).exists(), leftovers(Path(os.path.realpath(folder)))
        told = " and ".join(f"{each}{' (whole)' if (each / _FACTS).is_file() else ''}" for each in left)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be read: {error.strerror}", hint="is this the path of a checkpoint?"
        ) from error
    hint = f"a save that was broken off left {told}: one that is whole can be renamed" if left else None
    if not found:
        raise UsageError(f"{folder} is no checkpoint: it has no {first}", hint=hint)
    before = _identity(folder)
    try:
        yield
    except (FormatError, OSError) as error:
        _check_same(folder, before)
        if isinstance(error, OSError):
            raise FormatError(f"{folder}: cannot be read: {error}", hint=hint or DAMAGED) from error
        if hint is not None:
            raise type(error)(error.message, hint=f"{error.hint}; {hint}" if error.hint else hint) from error
        raise
    _check_same(folder, before)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _check_same(folder: Path, before: tuple[int, int] | None) -> None:
    if _identity(folder) != before:
        raise FormatError(f"{folder} was replaced while it was read", hint="load it again")


def load_weights(folder: Path | str) -> dict[str, torch.Tensor]:
    """All weights and buffers of a checkpoint, in this process: what a plain model's `load_state_dict` takes.

        model.load_state_dict(assigner.load_weights("checkpoint"))

    A parameter that has several names in the model stands under each of them. Nothing is unpickled, and neither the
    plan nor the workload is needed.

    Args:
        folder: What `Pipeline.save` wrote, or the model's shards of it with their index.

    Returns:
        Tensors on the CPU by the model's own names, of the types that they were saved with.

    Raises:
        UsageError: there is no checkpoint.
        FormatError: it is broken; the message says which file, and where in it.
    """
    folder = Path(folder)
    with _reading(folder, index_of(folder, "model").name):
        index = Index.read(folder, "model")
        found = index.tensors(lambda _: True)
        return {**found, **{name: found[first] for name, first in _aliases(index).items()}}
