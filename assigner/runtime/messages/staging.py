"""Tensors between a GPU and the wire, through pinned host memory.

Copies run on streams of their own, one for each way, beside the computing: the way out starts when the computing that
made the tensor is done, and computing that comes later waits for the way in alone. torch keeps pinned memory that is
free for later copies, once the copies that it was used for are through.
"""

from __future__ import annotations

import torch


class Staging:
    """Copies of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A contiguous tensor's copy in pinned memory, and the event after which it is there."""
        copy = self.buffer(tuple(tensor.shape), tensor.dtype)
        copied = _event()
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            copy.copy_(tensor, non_blocking=True)
            copied.record(self._out)
        if tensor.is_cuda:
            tensor.record_stream(self._out)
        return copy, copied

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory for a tensor to arrive in."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def to_device(self, arrived: torch.Tensor) -> torch.Tensor:
        """What has arrived, on the GPU; computing that starts after this call waits for it."""
        with torch.cuda.stream(self._in):
            tensor = arrived.to(self.device, non_blocking=True)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._in)
        tensor.record_stream(computing)
        return tensor

    def attend(self) -> None:
        """Called in a thread of the transport: what it waits for there must not hold up the computing."""
        torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]


def computed(device: torch.device) -> torch.cuda.Event:
    """The event after which this thread's stream of a GPU is through with what it has got so far."""
    event = _event()
    event.record(torch.cuda.current_stream(device))
    return event


def _event() -> torch.cuda.Event:
    """One that a thread waits for asleep: the usual ones take a core meanwhile."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on a device. A GPU gets it through pinned memory: the host does not wait until it is there."""
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor.to(device)
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)  # an expanded one gets memory for each element
    return pinned.copy_(tensor).to(device, non_blocking=True)
