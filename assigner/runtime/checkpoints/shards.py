"""Tensors in a folder, as safetensors shards with the index that Hugging Face reads.

Every rank writes a shard and beside it the list of what is in it; the lists become the index, in which other sections
may stand beside the map of the weights. What an index and its shards say of each other must agree when they are read:
a tensor too few or too many, or one with NaNs that it did not have when it was written, is damage, and so are files of
several saves, as a copy that was cut short leaves them: each has the number of its save.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from assigner.errors import FormatError, UsageError
from assigner.formats.document import shown
from assigner.runtime.checkpoints.swapping import flush

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LARGEST = 2**30  # bytes of JSON

DAMAGED = "the checkpoint is damaged: load another one"
SAVE = "save"
"""The key of a save's number, in each of its files."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file and have it on the disk."""
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    flush(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        FormatError: the file is missing, or holds something else.
    """
    try:
        if not path.is_file():
            raise FormatError(f"{path}: there is no such file", hint=DAMAGED)
        if path.stat().st_size > _LARGEST:
            raise FormatError(f"{path}: {path.stat().st_size} bytes are too many", hint=DAMAGED)
        found = json.loads(path.read_text(encoding="utf-8"))
    except FormatError:
        raise
    except RecursionError as error:
        raise FormatError(f"{path}: cannot be read: nested too deeply", hint=DAMAGED) from error
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {error}", hint=DAMAGED) from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: {shown(found)} is not allowed; expected an object", hint=DAMAGED)
    return found


def nan_count(tensor: torch.Tensor) -> int:
    """How many of a tensor's elements are NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or "float4" in str(tensor.dtype):  # which has none
        return 0
    wide = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()  # isnan knows no float8
    return int(wide.isnan().sum())


def write_shard(
    folder: Path, name: str, save: str, tensors: Mapping[str, torch.Tensor], more: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write a shard, and beside it the list of what it holds, for the index.

    Raises:
        OSError, SafetensorError: it cannot be written.
        UsageError: a tensor has a type that safetensors does not know.
    """
    if tensors:
        try:
            save_file(_apart(tensors), folder / f"{name}.safetensors", metadata={"format": "pt", SAVE: save})
        except KeyError as error:  # of its table of types
            key = next((key for key, each in tensors.items() if each.dtype in error.args), None)
            if key is None:
                raise
            raise UsageError(
                f"{key!r} is of type {tensors[key].dtype}, which safetensors has no name for: it is not saved",
                hint="keep two real tensors, or complex64",
            ) from error
        flush(folder / f"{name}.safetensors")
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    counts = {key: nan_count(tensor) for key, tensor in tensors.items()}
    nan = {key: count for key, count in counts.items() if count}
    listed = folder / f"{name}.json"
    listed.write_text(json.dumps({"sizes": sizes, "nan": nan, **more}), encoding="utf-8")
    if tensors:  # safetensors lets its owner alone read what it writes; the user's umask counts for all files
        (folder / f"{name}.safetensors").chmod(listed.stat().st_mode & 0o777)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors with memory of their own, as safetensors wants them."""
    made: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        each = tensor.contiguous().cpu()
        made[key] = each.clone() if each.untyped_storage().data_ptr() in seen else each
        seen.add(each.untyped_storage().data_ptr())
    return made


def write_index(folder: Path, kind: str, save: str) -> None:
    """Merge the ranks' lists of shards of a kind; what several hold (a shared parameter) is read from the first."""
    where: dict[str, str] = {}
    total = 0
    merged: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(f"{kind}-*.json")):
        listed = json.loads(path.read_text(encoding="utf-8"))
        for key, size in listed.pop("sizes").items():
            if where.setdefault(key, f"{path.stem}.safetensors") == f"{path.stem}.safetensors":
                total += size
        for section, entries in listed.items():
            merged[section] = {**entries, **merged.get(section, {})}
        path.unlink()
    write_json(index_of(folder, kind), {"metadata": {"total_size": total, SAVE: save}, "weight_map": where, **merged})


def index_of(folder: Path, kind: str) -> Path:
    """The path of the index over the shards of a kind: `model` or `optimizer`."""
    return folder / f"{kind}.safetensors.index.json"


@dataclass(frozen=True)
class Index:
    """An index that was read; what it lacks or has in another form than expected is a FormatError."""

    path: Path
    kind: str
    content: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, kind: str) -> Index:
        """The index of a folder over its shards of a kind."""
        path = index_of(folder, kind)
        return cls(path, kind, read_json(path))

    @property
    def save(self) -> Any:
        """The number of the save; None: it is one of old, or another program has written the file."""
        metadata = self.content.get("metadata")
        return metadata.get(SAVE) if isinstance(metadata, dict) else None

    def check_save(self, path: Path, number: Any) -> None:
        """Another file is of the same save, as far as both say of which they are.

        Raises:
            FormatError: it is of another one.
        """
        if None not in (number, self.save) and number != self.save:
            raise FormatError(f"{path} and {self.path.name} are of two saves", hint=DAMAGED)

    def section(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        """The entries of a section by name.

        Raises:
            FormatError: it is missing, or no object.
        """
        if optional and name not in self.content:
            return {}
        if name not in self.content:
            raise FormatError(f"{self.path}: {name} is missing", hint=DAMAGED)
        return self.object(name, self.content[name])

    def object(self, key: str, value: Any) -> dict[str, Any]:
        """A value of the index that must be an object; FormatError where it is none."""
        return value if isinstance(value, dict) else self.refuse(key, value, "an object")

    def refuse(self, key: str, value: Any, expected: str) -> Any:
        """Raise FormatError for a value that stands at a key."""
        raise FormatError(f"{self.path}: {key}: {shown(value)} is not allowed; expected {expected}", hint=DAMAGED)

    def tensors(self, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """Those tensors of the shards whose keys are wanted; the heads of all shards are checked.

        Raises:
            FormatError: a shard cannot be read, or it does not fit the index.
        """
        folder, places, nan = self.path.parent, self.section("weight_map"), self.section("nan", optional=True)
        proper = re.compile(rf"{self.kind}-\d{{5,9}}\.safetensors", re.ASCII)
        for key, place in places.items():
            if not isinstance(place, str) or not proper.fullmatch(place):
                self.refuse(f"weight_map: {shown(key)}", place, f'a shard such as "{self.kind}-00000.safetensors"')
        shards = {path.name for path in folder.iterdir() if proper.fullmatch(path.name)}
        found: dict[str, torch.Tensor] = {}
        for shard in sorted(shards.union(places.values())):
            found.update(self._read(folder / shard, places, wanted))
        for key, tensor in found.items():
            count, expected = nan_count(tensor), nan.get(key, 0)
            if count != expected:
                raise FormatError(
                    f"{folder / places[key]}: {shown(key)} holds {count} NaN; {shown(expected)} when it was saved",
                    hint=DAMAGED,
                )
        return found

    def _read(self, path: Path, places: Mapping[str, str], wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        if not path.is_file():
            raise FormatError(f"{path}: cannot be read: there is no such file", hint=DAMAGED)
        here = {key for key, place in places.items() if place == path.name}
        try:
            with safe_open(path, framework="pt") as tensors:
                self.check_save(path, (tensors.metadata() or {}).get(SAVE))
                held = set(tensors.keys())
                for key in sorted(here - held):
                    raise FormatError(f"{path}: {shown(key)} is missing; {self.path.name} places it here", hint=DAMAGED)
                for key in sorted(held - places.keys()):
                    raise FormatError(f"{path}: {shown(key)} is not in {self.path.name}", hint=DAMAGED)
                return {key: tensors.get_tensor(key) for key in sorted(here) if wanted(key)}
        except (OSError, SafetensorError, AttributeError, RuntimeError) as error:
            # torch may lack a type that safetensors knows; and it opens the file a second time, when it may be gone
            if isinstance(error, RuntimeError) and os.strerror(errno.ENOENT) not in str(error):
                raise
            raise FormatError(f"{path}: cannot be read: {error}", hint=DAMAGED) from error
