"""Checkpoints of a model that is nowhere whole: every rank writes its part, keyed by the model's own names.

The weights are safetensors shards with the index that Hugging Face reads; optimizer state lies beside them, keyed
`PARAMETER/STATE`. Nothing is pickled, so a checkpoint can run no code. A folder is written under another name and
renamed when every rank has written: it is complete or absent.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from assigner.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_INDEX = "model.safetensors.index.json"
_OPTIMIZER = "optimizer.safetensors.index.json"
_FACTS = "training.json"


def save_checkpoint(
    folder: Path,
    rank: int,
    *,
    state: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
) -> None:
    """Write this rank's part; rank 0 completes the folder when all have written theirs.

    Args:
        folder: Where; it must not exist.
        rank: This rank.
        state: This rank's tensors by the model's names.
        parameters: Its parameters by name.
        optimizer: Its optimizer.
        facts: Plain values that are kept with it.

    Raises:
        UsageError: the folder exists, or the ranks do not share its file system.
    """
    aside = folder.with_name(f".{folder.name}.part")
    if rank == 0:
        if folder.exists():
            raise UsageError(f"{folder} exists", hint="save to a new folder, or remove it")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _barrier()
    if not aside.is_dir():
        raise UsageError(f"{aside}: rank {rank} does not see it", hint="save to a file system that all hosts share")
    _write(aside, f"model-{rank:05}", {name: tensor.detach() for name, tensor in state.items()})
    moments = _optimizer_tensors(parameters, optimizer)
    _write(aside, f"optimizer-{rank:05}", moments)
    _barrier()
    if rank == 0:
        _write_index(aside, _INDEX, "model-*.json")
        _write_index(aside, _OPTIMIZER, "optimizer-*.json")
        (aside / _FACTS).write_text(json.dumps(dict(facts), indent=1))
        aside.rename(folder)
    _barrier()


def load_checkpoint(
    folder: Path,
    *,
    state: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Read into this rank's tensors, in place, whatever plan wrote the checkpoint.

    Args:
        folder: The checkpoint.
        state: The tensors to fill, by the model's names.
        parameters: The parameters among them.
        optimizer: Their optimizer; its state is replaced.

    Returns:
        The facts that were saved with it.

    Raises:
        UsageError: there is no checkpoint.
        FormatError: it is broken, or lacks a tensor or has it in another shape.
    """
    facts = _read_json(folder / _FACTS)
    found = _read(folder, _INDEX, set(state))
    for name, tensor in state.items():
        if name not in found:
            raise FormatError(f"{folder} has no {name!r}", hint="was it saved from the same model?")
        if found[name].shape != tensor.shape:
            raise FormatError(
                f"{folder}: {name!r} has shape {tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
            )
        tensor.detach().copy_(found[name])
    if optimizer is not None:
        _load_optimizer(folder, parameters, optimizer)
    return facts


def read_weights(folder: Path | str) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint by name, in this process: for a plain model's `load_state_dict(..., strict=False)`.

    Raises:
        UsageError: there is no checkpoint.
        FormatError: it is broken.
    """
    return _read(Path(folder), _INDEX, None)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """A shard, and beside it the list of what it holds, for the index."""
    if tensors:
        save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    (folder / f"{name}.json").write_text(json.dumps(sizes))


def _write_index(folder: Path, name: str, lists: str) -> None:
    """Merge the ranks' lists; what several hold (a shared parameter) is read from the first."""
    where: dict[str, str] = {}
    total = 0
    for path in sorted(folder.glob(lists)):
        for key, size in json.loads(path.read_text()).items():
            if where.setdefault(key, f"{path.stem}.safetensors") == f"{path.stem}.safetensors":
                total += size
        path.unlink()
    (folder / name).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))


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


def _read(folder: Path, index: str, wanted: set[str] | None) -> dict[str, torch.Tensor]:
    places = _read_json(folder / index).get("weight_map", {})
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(set(places.values())):
        names = [key for key, place in places.items() if place == shard and (wanted is None or key in wanted)]
        if not names:
            continue
        try:
            with safe_open(folder / Path(shard).name, framework="pt") as tensors:
                found.update({name: tensors.get_tensor(name) for name in names})
        except (OSError, SafetensorError) as error:
            raise FormatError(f"{folder / shard}: cannot be read: {error}", hint="the checkpoint is damaged") from error
    return found


def _optimizer_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """State by `PARAMETER/STATE`; plain numbers become tensors of float64."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in state.items():
            if value is not None:
                is_tensor = isinstance(value, torch.Tensor)
                found[f"{name}/{key}"] = value.detach() if is_tensor else torch.tensor(value, dtype=torch.float64)
    return found


def _load_optimizer(folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    places = _read_json(folder / _OPTIMIZER).get("weight_map", {})
    wanted = {key for key in places if key.rpartition("/")[0] in parameters}
    for key, value in _read(folder, _OPTIMIZER, wanted).items():
        name, _, state = key.rpartition("/")
        parameter = parameters[name]
        on_device = value.to(parameter.device) if value.dim() else value
        optimizer.state[parameter][state] = on_device
