"""Tensors between a GPU and the wire, through pinned host memory.

Copies run on streams of their own, one for each way, beside the computing: the way out starts when the computing that
made the tensor is done, and computing that comes later waits for the way in alone. torch keeps pinned memory that is
free for later copies, once the copies that it was used for are through.
"""

from __future__ import annotations

import torch


class Staging:
    """Copies of one GPU.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A contiguous tensor's copy in pinned memory, and the event after which it is there."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            copy.copy_(tensor, non_blocking=True)
            copied.record(self._out)
        if tensor.is_cuda:
            tensor.record_stream(self._out)
        return copy, copied

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory for a tensor to arrive in."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

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
