"""Programs by number of micro-batches: built once, with their routes known."""

from __future__ import annotations

from workloads import graph_of, make_plan, skips

from assigner.runtime.batch.variants import Variant


def test_a_program_is_built_once_for_each_number_of_micro_batches():
    """Whatever rows they have, and its routes are told to the transport when it is built."""
    known: list[object] = []

    class Knows:
        def know(self, routes: object) -> None:
            known.append(routes)

    graph = graph_of(skips())
    plan = make_plan(skips(), [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])
    variant = Variant(graph, plan, {}, Knows())
    first, forwards = variant.program(1, training=True), variant.program(1, training=False)
    assert variant.program(1, training=True) is first
    assert variant.program(1, training=False) is forwards
    assert known == [first.routes, forwards.routes]
    assert len(forwards.routes) < len(first.routes)
