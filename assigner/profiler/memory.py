"""Bytes of a partition: what it keeps between forward and backward, and what it needs while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from assigner.machine.heap import return_free_pages
from assigner.runtime.recording.memory import MemoryGauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where the device has no memory; of a CPU torch says so with a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


def storage_bytes(tensors: Iterable[torch.Tensor], *, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the storages behind some tensors, each once, but for those of others."""
    found = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    for tensor in without:
        found.pop(_key(tensor), None)
    return sum(found.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def saved_bytes(forward: Callable[[], Iterable[torch.Tensor]], known: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that a forward, run once, keeps for its backward, without its outputs.

    Left out too is what is counted elsewhere: parameters, buffers and what the partition reads. Only the innermost
    saved-tensor hook sees a tensor, so what the model's own checkpointing saves inside a partition is not counted.
    """
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = list(forward())
    for tensor in (*known, *outputs):
        saved.pop(_key(tensor), None)
    return sum(saved.values())


def allocated_bytes(device: torch.device) -> int:
    """Bytes that tensors hold on a GPU; 0 on a CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def grown_bytes(run: Callable[[], object], device: torch.device) -> int:
    """How far what this process holds on a device rises while `run` runs; 0 where the system does not tell.

    On a CPU that is pages, with the heap's holes in them.
    """
    return_free_pages()  # they would be used again, unseen
    gauge = MemoryGauge(device)
    gauge.reset_peak()
    base = gauge.held()
    try:
        run()
        peak = gauge.peak()
    finally:
        gauge.close()
    return 0 if base is None or peak is None else max(0, peak - base)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """How far memory rises above its start while `run` runs, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise writes a log of its own to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        run()
    return _peak_of(recorded)


def _peak_of(recorded: Any) -> int:
    """The highest sum of allocations less frees in a profiler's record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    level = peak = 0
    for _, change in changes:
        level += change
        peak = max(peak, level)
    return peak
