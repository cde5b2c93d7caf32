"""A checkpoint that is written by all ranks: each its part, and rank 0 what is of all.

A folder is written under another name and takes its own when every rank has written: under its name it is always
complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from assigner.errors import UsageError
from assigner.files import room_hint
from assigner.machine.heap import return_free_pages
from assigner.runtime.checkpoints.checkpoint import check_places, check_saved, extra_part, packed_state
from assigner.runtime.checkpoints.optimizerstate import OptimizerState
from assigner.runtime.checkpoints.shards import SAVE, nan_count, write_index, write_json, write_shard
from assigner.runtime.checkpoints.swapping import FACTS, SavingLock, flush, leftovers, part_of, put_in_place, remove
from assigner.runtime.checkpoints.wholestate import extra_key
from assigner.runtime.ranks.packedvalues import PackedValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from assigner.runtime.batch.recurrence import CarriedState
    from assigner.runtime.checkpoints.checkpoint import TrainingProgress
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.stages.localpartitions import LocalPartitions
    from assigner.runtime.update.rankoptimizer import RankOptimizer

_OURS = re.compile(r"training\.json|(model|optimizer|carried)(\.safetensors\.index\.json|-\d{5,9}\.(safetensors|json))")


class Saving:
    """A checkpoint on its way to the disk, in stages: each begins when all ranks have ended the one before.

    Args:
        carried: The state that goes from batch to batch, which is gathered.
    """

    def __init__(
        self,
        folder: Path | str,
        share: LocalPartitions,
        optimizer: RankOptimizer,
        member: Membership,
        *,
        carried: CarriedState,
        progress: TrainingProgress,
        force: bool,
    ) -> None:
        self._at, self._force = f"saving to {folder}", force
        self._named, self._folder = Path(folder), Path(os.path.realpath(folder))  # of a link, what it points to
        self._graph, self._share, self._optimizer = share.graph, share, optimizer
        self._member, self._rank = member, member.rank
        self._carried, self._progress = carried, progress
        self._lock: SavingLock | None = None

    def run(self) -> None:
        """Write it; all ranks call this together. One that is refused makes room again: another run may save there."""
        with self._member.guarded(self._at):
            self._number = self._member.text_from(0, secrets.token_hex(4))
        self._part = part_of(self._folder, self._number)
        try:
            for stage in (self._check, self._begin, self._write, self._complete):
                self._member.agree(self._at, stage)
        except UsageError:
            if self._lock is not None:
                remove(self._part, self._number)
            raise
        finally:
            if self._lock is not None:
                self._lock.close()

    def _check(self) -> None:
        """Refuse before anything is written: what stands there, what cannot be kept, and what is not worth it."""
        return_free_pages()  # copies come on top of what the heap keeps for the next step
        for name, tensor in self._share.state(kept=True).items():
            if isinstance(tensor, torch.nn.Parameter) and (count := nan_count(tensor)):
                raise UsageError(
                    f"{name!r} holds {count} NaN: it is not saved, and what stands at {self._named} stays",
                    hint="training has diverged: go on from an earlier checkpoint",
                )
        self._share.check_parameters()
        check_places(self._share.state(kept=True), self._graph, UsageError, "what is saved could not be loaded")
        self._optimizer.memory.check_saved(is_spread=self._optimizer.is_spread)
        self._moments = OptimizerState.of(self._share.kept_updated, self._optimizer)
        extra = self._share.extra_state(kept=True)
        self._extra = {path: PackedValue.of(each, extra_key(path)) for path, each in extra.items()}
        self._state = self._carried.joined()
        check_saved(self._state, self._graph, self._carried.places)
        if self._rank == 0:
            with _written(self._named):
                self._check_place(self._named)
            self._facts = self._made_facts()

    def _check_place(self, folder: Path) -> None:
        if folder.exists() and not self._force:
            raise UsageError(f"{folder} exists", hint="save to a new folder; save(folder, force=True) replaces it")
        if folder.exists() and not (folder / FACTS).is_file():
            raise UsageError(f"{folder} is no checkpoint, and is not replaced", hint="save to a new folder")
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if not _OURS.fullmatch(path.name):
                raise UsageError(
                    f"{folder} holds {path.name!r}, which is no part of a checkpoint, and is not replaced",
                    hint="move that elsewhere, or save to a new folder",
                )

    def _made_facts(self) -> dict[str, Any]:
        try:
            facts = {"fingerprint": self._graph.fingerprint, SAVE: self._number, **self._progress.facts()}
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
            with _written(self._named):
                self._part.parent.mkdir(parents=True, exist_ok=True)
                self._lock = SavingLock(self._folder)
                self._check_place(self._named)  # whoever had the lock may have saved there
                self._remove_leftovers()
                self._part.mkdir()

    def _write(self) -> None:
        if not self._part.is_dir():
            raise UsageError(
                f"{self._part}: rank {self._rank} does not see it", hint="save to a file system that all hosts share"
            )
        known, persistent = self._graph.canonical, self._graph.persistent
        shared = {name: first for name, first in known.items() if name != first and name in persistent}
        extra = {extra_part(path, n): each for path, one in self._extra.items() for n, each in enumerate(one.tensors)}
        sections: dict[str, Mapping[str, Any]] = {
            "shared": shared,
            "extra": {path: each.text for path, each in self._extra.items()},
            "plain": self._graph.plain_names,
        }
        tensors = {**self._share.unread.state(), **self._share.state(kept=True), **extra}
        moments = self._moments
        with _written(self._named):
            shards: dict[str, tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]] = {
                "model": (tensors, sections), "optimizer": (moments.dense, moments.sections())
            }  # fmt: skip
            if self._state is not None:
                shards["carried"] = packed_state(self._state, self._rank)
            for kind, (held, told) in shards.items():
                write_shard(self._part, f"{kind}-{self._rank:05}", self._number, held, told)

    def _complete(self) -> None:
        if self._rank == 0:
            with _written(self._named):
                for kind in ("model", "optimizer", *(("carried",) if self._state is not None else ())):
                    write_index(self._part, kind, self._number)
                flush(self._part)
                write_json(self._part / FACTS, self._facts)
                put_in_place(self._part, self._folder)
                self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Those of others too where none of them can be at work; what is whole stays while nothing has the name."""
        for path in leftovers(self._folder):
            is_ours = (self._lock is not None and self._lock.is_held) or self._number in path.name
            if is_ours and (self._folder.exists() or not (path / FACTS).is_file()):
                remove(path, self._number)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot write {folder}: {why}", hint=room_hint(error, "save to another place")) from error
