"""Measures a machine's `ReferenceTimes`, in about half a second, without a trace in the process's heap."""

from __future__ import annotations

import mmap
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from assigner.machine.reference import ReferenceTimes

if TYPE_CHECKING:
    from collections.abc import Callable

_COMPUTE_S, _MEMORY_S, _MESSAGE_S = 0.2, 0.1, 0.1  # two periods of a usual CPU quota; one
_WIDTHS = {"cpu": 192, "cuda": 2048}
_COPIED_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
_AT_ONCE = 1 << 22  # of a CPU's: 16 MiB with what is written fill half a usual cache, and took 0.22 to 0.55 ms
_MESSAGE_BYTES, _PIECE_BYTES = 1 << 20, 1 << 15  # a piece fits into a socket's buffer, so that one thread is enough


def measure_reference(device: torch.device) -> ReferenceTimes:
    """Do the three pieces of work for a while each; ranks that share a host do it at the same time."""
    with torch.no_grad():
        return ReferenceTimes(_compute_s(device), _memory_s(device), _message_s())


def _mean_s(run: Callable[[], object], device: torch.device, limit_s: float) -> float:
    """Seconds of a run: the mean over a while, after one that is not counted."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    run()
    wait(device)
    begin, runs = time.perf_counter(), 0
    while time.perf_counter() - begin < limit_s:
        run()
        wait(device)
        runs += 1
    return (time.perf_counter() - begin) / runs


def _compute_s(device: torch.device) -> float:
    width = _WIDTHS[device.type]
    left = torch.full((width, width), 0.5, dtype=torch.float32, device=device)
    out = torch.empty_like(left)
    return _mean_s(lambda: torch.mm(left, left, out=out), device, _COMPUTE_S)


def _memory_s(device: torch.device) -> float:
    size = _COPIED_BYTES[device.type]
    if device.type == "cuda":
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        return _mean_s(partial(target.copy_, source), device, _MEMORY_S)
    # pages of its own: a block of the C library's heap would change how that serves what comes after
    with mmap.mmap(-1, _AT_ONCE) as one, mmap.mmap(-1, _AT_ONCE) as other:
        source, target = (torch.frombuffer(each, dtype=torch.uint8) for each in (one, other))
        source.fill_(1)
        seconds = _mean_s(partial(target.copy_, source), device, _MEMORY_S)
        del source, target  # a mapping that is looked at cannot be closed
    return seconds * size / _AT_ONCE


def _message_s() -> float:
    piece, taken = bytes(_PIECE_BYTES), bytearray(_PIECE_BYTES)
    near, far = socket.socketpair()

    def send() -> None:
        for _ in range(_MESSAGE_BYTES // _PIECE_BYTES):
            near.sendall(piece)
            there = 0
            while there < _PIECE_BYTES:
                there += far.recv_into(memoryview(taken)[there:])

    with near, far:
        return _mean_s(send, torch.device("cpu"), _MESSAGE_S)
