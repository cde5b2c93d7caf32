"""Marks in code, by patterns and by default, and every way to get them wrong."""

from __future__ import annotations

import pytest
from torch import nn

from assigner import partition
from assigner.errors import MarkingError
from assigner.model.marking import Mark, find_marks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(3, 3)


def test_marks_in_code():
    """partition() gives the module itself, and the mark carries name, pin and label."""
    model = Model()
    head = model.head
    assert partition(head, name="top", pin="worker:1/cpu", colocate="tied") is head
    partition(model.embed)
    assert find_marks(model) == {"embed": Mark(), "head": Mark("top", "worker:1/cpu", "tied")}
    assert list(model.state_dict()) == list(Model().state_dict())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.*.0", ["blocks.0.0", "blocks.1.0", "blocks.2.0"]),
        ("blocks.?", ["blocks.0", "blocks.1", "blocks.2"]),
        ("**.1.0", ["blocks.1.0"]),
        ("head", ["head"]),
        ("*", ["embed", "blocks", "head"]),
    ],
)
def test_patterns(pattern, names):
    """A star stands for anything but a dot, two for anything."""
    assert list(find_marks(Model(), [pattern])) == names


def test_patterns_add_to_the_marks_in_code():
    """What the code says of a module stays when a pattern matches it too; the order is the model's."""
    model = Model()
    partition(model.head, pin="a100")
    assert find_marks(model, ["head", "blocks.*"])["head"] == Mark(pin="a100")
    assert list(find_marks(model, ["head", "blocks.*"])) == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_children_of_a_sequential():
    """With no mark at all, an nn.Sequential's children are the partitions."""
    assert list(find_marks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)))) == ["0", "1", "2"]


def test_nothing_marked():
    """A model that is no nn.Sequential needs a mark."""
    with pytest.raises(MarkingError, match="no partition is marked in Model") as caught:
        find_marks(Model())
    assert "assigner.partition" in caught.value.hint
    assert caught.value.hint.endswith("--mark 'blocks.*'")
    with pytest.raises(MarkingError) as caught:
        find_marks(nn.TransformerEncoderLayer(4, 1))
    assert caught.value.hint.endswith("--mark 'self_attn'")


def test_a_pattern_without_a_match():
    """The error offers names that are close."""
    with pytest.raises(MarkingError, match=r"mark 'block\.0' matches no submodule") as caught:
        find_marks(Model(), ["block.0"])
    assert "blocks.0" in caught.value.hint


def test_one_mark_inside_another():
    """A partition is never split."""
    with pytest.raises(MarkingError, match=r"'blocks\.1\.0' is marked and lies inside 'blocks\.1'"):
        find_marks(Model(), ["blocks.*", "blocks.1.0"])


def test_a_partition_that_is_compiled_by_itself():
    """Its calls are not seen: what to do instead is said."""
    model = Model()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(MarkingError, match=r"'blocks\.1' is marked, and compiled by its own compile\(\)") as raised:
        find_marks(model, ["blocks.*"])
    assert "Workload(compile=True)" in str(raised.value.hint)


def test_two_partitions_of_one_name():
    """Names are unique, also against the model's own."""
    model = Model()
    partition(model.embed, name="head")
    partition(model.head)
    with pytest.raises(MarkingError, match="two partitions are named 'head'"):
        find_marks(model)


def test_partition_of_something_else():
    """Only modules can be marked."""
    with pytest.raises(MarkingError, match="was given int"):
        partition(3)
