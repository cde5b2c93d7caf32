"""What a builder sees of the meta device: nothing, unless it asked for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from assigner.model.deferred.recorder import CallRecorder, is_meta


class LooksReal(TorchFunctionMode):
    """Says of tensors on the meta device that they are on the CPU.

    torch.nn.init and transformers give values to no others. Where the builder itself has asked for the meta device the
    truth is told.

    What hands a tensor's values to Python gets them from the recorder. Python's lists that torch's C++ would make into
    tensors beside the recorder, on the meta device and so without their values, are made into tensors before.
    """

    _IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]
    _READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__)
    _INDEXERS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (self._IS_META, self._DEVICE) and not self.recorder.is_meant(args[0]):
            return False if func == self._IS_META else torch.device("cpu") if is_meta(args[0]) else func(*args)
        if func in self._READERS and is_meta(args[0]):
            args = (self.recorder.real(args[0]), *args[1:])
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func in self._INDEXERS and is_meta(args[0]):
            args = (args[0], _index(args[1]), *args[2:])
        if func is torch.Tensor.new_tensor and is_meta(args[0]) and not self.recorder.is_meant(args[0]):
            return _new_tensor(*args, **kwargs)
        asks = self.asks_meta((*args, *kwargs.values()))
        with self.recorder.within(asks_meta=asks, under_autocast=torch.is_autocast_enabled("cpu")):
            return func(*args, **kwargs)

    def asks_meta(self, words: tuple[Any, ...]) -> bool:
        """True if a call of the builder names the meta device, by itself, by a tensor there or by a block around it."""
        return torch.get_default_device().type == "meta" or any(
            self.recorder.is_meant(word)
            if isinstance(word, torch.Tensor)
            else isinstance(word, str | torch.device) and str(word).startswith("meta")
            for word in words
        )


def _index(index: Any) -> Any:
    """An index with its lists of numbers as tensors; torch is of two minds about lists in a list, which stay."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(each, device="cpu") if _holds_numbers(each) else each for each in index)
    if _holds_numbers(index) and all(isinstance(each, int) for each in index):
        return torch.tensor(index, device="cpu")
    return index


def _holds_numbers(index: Any) -> bool:
    return (
        isinstance(index, list | range)
        and len(index) > 0
        and all(isinstance(each, int) or _holds_numbers(each) for each in index)
    )


def _new_tensor(like: torch.Tensor, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """`like.new_tensor(data)`: its type, and the CPU, which is where it seems to be."""
    return torch.tensor(data, dtype=dtype or like.dtype, **{"device": "cpu", **options})
