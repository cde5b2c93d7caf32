"""What --only names."""

import pytest

from assigner.errors import UsageError
from assigner.profiler.options import Selection

NAMES = ["embed", "blocks.0", "blocks.1", "head"]


def test_no_words_want_everything():
    """Without --only all is measured."""
    assert Selection().point(["embed"], 0)
    assert Selection().link(0, 1)


@pytest.mark.parametrize(
    ("word", "points", "links"),
    [
        ("compute", {("embed", 0), ("embed", 1), ("head", 0), ("head", 1)}, set()),
        ("links", set(), {(0, 1), (1, 0), (0, 2), (2, 1)}),
        ("worker:1", {("embed", 1), ("head", 1)}, {(0, 1), (1, 0), (2, 1)}),
        ("worker:1/cuda:0", {("embed", 1), ("head", 1)}, {(0, 1), (1, 0), (2, 1)}),
        ("worker:1-worker:0", set(), {(0, 1), (1, 0)}),
        ("worker:2/cpu-worker:0/cpu", set(), {(0, 2)}),
        ("e*", {("embed", 0), ("embed", 1)}, set()),
    ],
)
def test_a_word_wants_what_it_names(word, points, links):
    """Partitions, workers with their links, pairs both ways, all compute, all links."""
    chosen = Selection((word,))
    assert {(name, rank) for name in ("embed", "head") for rank in (0, 1) if chosen.point([name], rank)} == points
    ways = [(0, 1), (1, 0), (0, 2), (2, 1)]
    assert {way for way in ways if chosen.link(*way)} == links


@pytest.mark.parametrize(
    ("word", "sets"),
    [
        ("compute", set()),
        ("links", {(0, 1), (1, 2), (0, 1, 2)}),
        ("collectives", {(0, 1), (1, 2), (0, 1, 2)}),
        ("worker:2", {(1, 2), (0, 1, 2)}),
        ("worker:2-worker:1", {(1, 2)}),
        ("e*", set()),
    ],
)
def test_a_word_wants_the_collectives_of_what_it_names(word, sets):
    """Links bring theirs, a worker those that it takes part in, a pair its own; the sort alone can be named, too."""
    chosen = Selection((word,))
    assert {ranks for ranks in [(0, 1), (1, 2), (0, 1, 2)] if chosen.collective(ranks)} == sets
    assert chosen.pairs() == (((1, 2),) if "-" in word else ())
    assert Selection().collective((0, 1))
    assert not Selection(("collectives",)).link(0, 1)


def test_one_of_several_alike_stands_for_all():
    """blocks.1 is measured with its like, whatever that is called."""
    assert Selection(("blocks.1",)).point(["blocks.0", "blocks.1"], 0)


def test_words_add_up():
    """Two words want what either wants."""
    chosen = Selection(("head", "worker:0-worker:1"))
    assert chosen.point(["head"], 1)
    assert chosen.link(1, 0)
    assert not chosen.point(["embed"], 1)


@pytest.mark.parametrize(
    ("word", "message"),
    [("tail", "names no partition"), ("worker:2", "no worker:2"), ("worker:1-worker:1", "no link to itself"),
     ("worker:0-worker:7", "no worker:7")],
)  # fmt: skip
def test_a_word_that_names_nothing_is_refused(word, message):
    """A typing error does not end as a run that measures nothing."""
    with pytest.raises(UsageError, match=message):
        Selection((word,)).check(NAMES, 2)
    Selection(("compute", "links", "collectives", "blocks.*", "worker:1", "worker:0-worker:1")).check(NAMES, 2)
