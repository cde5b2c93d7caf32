"""Checkpoints of a model that is nowhere whole: every rank writes its part, keyed by the model's own names.

The weights are safetensors shards with the index that Hugging Face reads; optimizer state lies beside them, keyed
`PARAMETER/STATE`, with the plain numbers among it and each parameter's settings (`lr`, ...) in its index. Nothing is
pickled, so a checkpoint can run no code. A folder is written under another name and renamed when every rank has
written: it is complete or absent. All of it is read and checked before anything is overwritten.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from assigner.errors import FormatError, UsageError
from assigner.runtime.plain import SINGLE, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from assigner.runtime.optimizer import PipelineOptimizer

_INDEX = "model.safetensors.index.json"
_OPTIMIZER = "optimizer.safetensors.index.json"
_FACTS = "training.json"


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
        counts, scaler = [facts.get(key) for key in ("steps", "batches")], facts.get("scaler", {})
        numbers = [*counts, *(scaler.values() if isinstance(scaler, dict) else [None])]
        if not all(isinstance(each, int | float) for each in numbers) or not all(isinstance(n, int) for n in counts):
            raise FormatError(f"{path}: expected whole numbers and a scaler's state", hint="the checkpoint is damaged")
        return cls(facts["steps"], facts["batches"], scaler, from_json(facts.get("state")))


def check_save(folder: Path, progress: Progress, rank: int, *, force: bool) -> None:
    """Refuse what rank 0 cannot write; the other ranks have nothing to check.

    Raises:
        UsageError: the folder exists and is not to be replaced, or is no checkpoint; or the script's state holds a
            value that is not plain.
    """
    if rank == 0:
        if folder.exists() and not force:
            raise UsageError(f"{folder} exists", hint="save to a new folder; save(folder, force=True) replaces it")
        if folder.exists() and not (folder / _FACTS).is_file():
            raise UsageError(f"{folder} is no checkpoint, and is not replaced", hint="save to a new folder")
        progress.facts()


def save_checkpoint(
    folder: Path,
    rank: int,
    *,
    state: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: PipelineOptimizer,
    facts: Mapping[str, Any],
    meet: Callable[[], None],
) -> None:
    """Write this rank's part; rank 0 completes the folder when all have written theirs.

    Args:
        folder: Where; a checkpoint that is there is replaced.
        rank: This rank.
        state: This rank's tensors by the model's names.
        parameters: Its parameters by name.
        optimizer: Its optimizer.
        facts: What JSON can carry is kept with it: `fingerprint` (of the model), and `Progress`.
        meet: Waits for all ranks.

    Raises:
        UsageError: the ranks do not share its file system.
    """
    aside = _made_aside(folder, rank, meet)
    moments = OptimizerState.of(parameters, optimizer)
    _write(aside, f"model-{rank:05}", {name: tensor.detach() for name, tensor in state.items()}, {})
    _write(aside, f"optimizer-{rank:05}", moments.tensors, {"plain": moments.plain, "settings": moments.settings})
    meet()
    if rank == 0:
        _write_index(aside, _INDEX, "model-*.json")
        _write_index(aside, _OPTIMIZER, "optimizer-*.json")
        (aside / _FACTS).write_text(json.dumps(dict(facts), indent=1))
        _put(aside, folder)
    meet()


def _put(aside: Path, folder: Path) -> None:
    """The new checkpoint in its place; one that was there goes when the new one stands."""
    if not folder.exists():
        aside.rename(folder)
        return
    before = folder.with_name(f".{folder.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    folder.rename(before)
    aside.rename(folder)
    shutil.rmtree(before)


def _made_aside(folder: Path, rank: int, meet: Callable[[], None]) -> Path:
    """The empty folder, beside the one to be, that rank 0 has made for all."""
    aside = folder.with_name(f".{folder.name}.part")
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    meet()
    if not aside.is_dir():
        raise UsageError(f"{aside}: rank {rank} does not see it", hint="save to a file system that all hosts share")
    return aside


def load_checkpoint(
    folder: Path,
    fingerprint: str,
    *,
    state: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: PipelineOptimizer | None,
    empty: Mapping[str, Callable[[torch.Tensor], None]] | None = None,
) -> Progress:
    """Read into this rank's tensors, in place, whatever plan wrote the checkpoint.

    Args:
        folder: The checkpoint.
        fingerprint: Of the model.
        state: The tensors to fill, by the model's names.
        parameters: Those of its parameters that are trained.
        optimizer: Their optimizer; its state and its settings (`lr`, ...) are replaced. None: nothing is trained.
        empty: What sets a buffer that is None yet, by its name; one that was None then too stays so.

    Returns:
        Where training was.

    Raises:
        UsageError: there is no checkpoint.
        FormatError: it is broken, of another model, or lacks a tensor of this shape; then nothing was changed.
    """
    facts = _read_json(folder / _FACTS)
    if facts.get("fingerprint") != fingerprint:
        raise FormatError(f"{folder} was saved from another model", hint="load it with the workload that wrote it")
    progress = Progress.of(facts, folder / _FACTS)
    found = _read_state(folder, state)
    moments = None if optimizer is None else OptimizerState.read(folder, parameters)
    for name, tensor in state.items():
        tensor.detach().copy_(found[name])
    for name, tensor in _read(folder, _INDEX, (empty or {}).__contains__).items():
        (empty or {})[name](tensor)
    if optimizer is not None and moments is not None:
        moments.put(parameters, optimizer)
    return progress


def _read_state(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor for each of these, of its shape."""
    found = _read(folder, _INDEX, state.__contains__)
    for name, tensor in state.items():
        if name not in found:
            raise FormatError(f"{folder} has no {name!r}", hint="was it saved from the same model?")
        if found[name].shape != tensor.shape:
            raise FormatError(
                f"{folder}: {name!r} has shape {tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
            )
    return found


def read_weights(folder: Path | str) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint by name, in this process: for a plain model's `load_state_dict(..., strict=False)`.

    Raises:
        UsageError: there is no checkpoint.
        FormatError: it is broken.
    """
    return _read(Path(folder), _INDEX, lambda _: True)


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state by the model's names.

    Args:
        tensors: `PARAMETER/STATE` -> tensor.
        plain: `PARAMETER/STATE` -> number, where the optimizer keeps no tensor.
        settings: parameter -> the plain settings of its group (`lr`, `betas`, ...).
    """

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]
    settings: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], optimizer: PipelineOptimizer) -> OptimizerState:
        """What an optimizer holds for these parameters.

        Raises:
            UsageError: a value that is neither a tensor nor plain.
        """
        made = cls({}, {}, {})
        group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    made.tensors[f"{name}/{key}"] = value.detach()
                elif isinstance(value, SINGLE):
                    made.plain[f"{name}/{key}"] = value
                else:
                    raise UsageError(f"the optimizer's state {key!r} of {name!r} is a {type(value).__name__}")
            made.settings[name] = _settings(group_of.get(id(parameter), {}))
        return made

    @classmethod
    def read(cls, folder: Path, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
        """The state of these parameters in a checkpoint."""
        index = _read_json(folder / _OPTIMIZER)

        def mine(key: str) -> bool:
            return key.rpartition("/")[0] in parameters

        plain, settings = _entries(index, "plain", folder), _entries(index, "settings", folder)
        return cls(_read(folder, _OPTIMIZER, mine), {key: plain[key] for key in filter(mine, plain)}, settings)

    def put(self, parameters: Mapping[str, nn.Parameter], optimizer: PipelineOptimizer) -> None:
        """Replace an optimizer's state; a group gets the settings of its first parameter, on whatever rank that is."""
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, optimizer.names, strict=True):
            kept = next((self.settings[name] for name in names if name in self.settings), {})
            for key, value in kept.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value
        self.add(parameters, optimizer)  # its place depends on the settings

    def add(self, parameters: Mapping[str, nn.Parameter], optimizer: PipelineOptimizer) -> None:
        """Give an optimizer this state of its parameters; the settings of its groups stay.

        Tensors go to their parameter's device as in torch's own `Optimizer.load_state_dict`: the count of steps is read
        by Python, and stays where it is, unless the group is fused or capturable.
        """
        group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for key, value in {**self.tensors, **self.plain}.items():
            name, _, state = key.rpartition("/")
            parameter, group = parameters[name], group_of.get(id(parameters[name]), {})
            goes = state != "step" or group.get("fused") or group.get("capturable")
            on_device = isinstance(value, torch.Tensor) and goes
            optimizer.state[parameter][state] = value.to(parameter.device) if on_device else value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain settings of a parameter group; a learning rate that is a tensor as its number."""
    found = {}
    for key, value in group.items():
        number = value.item() if isinstance(value, torch.Tensor) and not value.dim() else value
        parts = number if isinstance(number, tuple) else (number,)
        if all(isinstance(part, SINGLE) for part in parts):
            found[key] = number
    return found


def _write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], more: Mapping[str, Any]) -> None:
    """A shard, and beside it the list of what it holds, for the index."""
    if tensors:
        save_file(_apart(tensors), folder / f"{name}.safetensors")
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    (folder / f"{name}.json").write_text(json.dumps({"sizes": sizes, **more}))


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors with memory of their own, as safetensors wants them."""
    made: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        each = tensor.contiguous().cpu()
        made[key] = each.clone() if each.untyped_storage().data_ptr() in seen else each
        seen.add(each.untyped_storage().data_ptr())
    return made


def _write_index(folder: Path, name: str, lists: str) -> None:
    """Merge the ranks' lists; what several hold (a shared parameter) is read from the first."""
    where: dict[str, str] = {}
    total = 0
    merged: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(lists)):
        listed = json.loads(path.read_text())
        for key, size in listed.pop("sizes").items():
            if where.setdefault(key, f"{path.stem}.safetensors") == f"{path.stem}.safetensors":
                total += size
        for section, entries in listed.items():
            merged[section] = {**entries, **merged.get(section, {})}
        path.unlink()
    index = {"metadata": {"total_size": total}, "weight_map": where, **merged}
    (folder / name).write_text(json.dumps(index, indent=1))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(f"{path.parent} is no checkpoint: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected an object")
    return found


def _entries(index: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    found = index.get(name)
    if not isinstance(found, dict):
        raise FormatError(f"{folder}: {name} is missing from an index", hint="the checkpoint is damaged")
    return found


def _read(folder: Path, index: str, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    places = _entries(_read_json(folder / index), "weight_map", folder)
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(set(places.values())):
        names = [key for key, place in places.items() if place == shard and wanted(key)]
        if not names:
            continue
        try:
            with safe_open(folder / Path(shard).name, framework="pt") as tensors:
                found.update({name: tensors.get_tensor(name) for name in names})
        except (OSError, SafetensorError) as error:
            raise FormatError(f"{folder / shard}: cannot be read: {error}", hint="the checkpoint is damaged") from error
    return found
