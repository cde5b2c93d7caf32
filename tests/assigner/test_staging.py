"""What passes between a GPU and its host waits for no more than it must; seen from a host without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assigner.runtime.messages.staging import Staging, computed, copied_to

GPU = torch.device("cuda", 0)


class Stream:
    """A GPU's stream that notes what waits for what."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


class Event:
    def __init__(self, notes: list[str], **given: Any) -> None:
        self.notes, self.given = notes, given

    def record(self, stream: Stream) -> None:
        self.notes.append(f"event on {stream.name}, asleep: {self.given.get('blocking', False)}")


class Block:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.stream.notes.append(f"on {self.stream.name}")

    def __exit__(self, *_: object) -> None:
        self.stream.notes.append(f"off {self.stream.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A host that says that it has a GPU: its streams and events note what is asked of them."""
    found: list[str] = []
    names = iter(["out", "in"])
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(next(names), found))
    monkeypatch.setattr(torch.cuda, "Event", lambda **given: Event(found, **given))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("computing", found))
    monkeypatch.setattr(torch.cuda, "stream", Block)

    def unpinned(*size: Any, **given: Any) -> torch.Tensor:
        return empty(*size, **{**given, "pin_memory": False})

    monkeypatch.setattr(torch, "empty", unpinned)
    return found


def test_the_way_out_waits_for_the_computing_before_it(notes: list[str]) -> None:
    """And for nothing else; the thread that waits for the copy sleeps meanwhile."""
    made = torch.arange(3.0)
    copy, _ = Staging(GPU).to_host(made)
    assert torch.equal(copy, made)
    assert notes == ["out waits for computing", "on out", "event on out, asleep: True", "off out"]


def test_the_computing_waits_for_the_way_in_alone(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent in the meantime holds nothing up, and the allocator knows both streams of the tensor."""
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: notes.append(f"kept for {stream.name}"))
    Staging(GPU).to_device(torch.arange(3.0))
    assert notes == ["on in", "off in", "computing waits for in", "kept for computing"]


def test_what_is_computed_up_to_now(notes: list[str]) -> None:
    """An event of the stream that computes, for which a thread waits asleep."""
    computed(GPU)
    assert notes == ["event on computing, asleep: True"]


def test_a_batch_is_copied_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pinned memory to a GPU; where it stays on the CPU it stays itself."""
    asked: list[Any] = []
    tensor = torch.arange(3)
    assert copied_to(torch.device("cpu"), tensor) is tensor
    empty_like = torch.empty_like

    def pinned(like: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        asked.append("pinned" if pin_memory else "not pinned")
        return empty_like(like, device=device)

    monkeypatch.setattr(torch, "empty_like", pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *to, **given: asked.append((*to, given)) or self)
    for each in (tensor, torch.ones(1).expand(3)):  # of an expanded one all elements are written
        assert copied_to(GPU, each).tolist() == each.tolist()
    assert asked == ["pinned", (GPU, {"non_blocking": True})] * 2
