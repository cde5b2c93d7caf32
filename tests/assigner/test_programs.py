"""Programs by number of rows: the ones used last are kept."""

from __future__ import annotations

from workloads import graph_of, make_plan, skips

from assigner.runtime.batch.variants import Programs


def test_row_counts_without_end():
    """However many there were, some are kept; one that was dropped is built again, equal and with known routes."""
    known: list[object] = []

    class Knows:
        def know(self, routes: object) -> None:
            known.append(routes)

    graph = graph_of(skips())
    plan = make_plan(skips(), [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])
    programs = Programs(plan, graph, Knows())
    first, second = programs.training(1), programs.training(2)
    for rows in range(3, 34):
        assert programs.training(rows) is programs.training(rows)
        assert programs.training(1) is first
    again = programs.training(2)
    assert again is not second
    assert again == second
    assert len(programs._built) == 32
    assert known[-1] == known[1]
    assert len(known) == 34
