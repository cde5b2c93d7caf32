"""The integer programs: where each item lies, and the largest load.

Sets      items i, u, v; devices d = 0 .. D - 1, their classes given; flows f from item u to the items v in T(f)
Variables L: the largest load, in units of about a thousandth of it
          line    y[i,d] = 1: item i lies on one of the devices 0 .. d (a staircase), y[i,D-1] = 1;
                  x[i,d] = y[i,d] - y[i,d-1]
          free    x[i,d] = 1: item i lies on device d
          out[f,d], in[f,d]: flow f leaves device d, comes into it
          w[j,d]: the share of node j that runs on device d by its second option

    minimise  L
    line      y[i,d-1] <= y[i,d];  y[v,d] <= y[u,d] where v may not lie before u: stages are convex, in the order of d
    free      sum over d of x[i,d] = 1;  like devices may come in the order of their heaviest items, so the k-th
              heaviest item is on one of the first k of a class
    moves     out[f,d] >= x[u,d] - x[v,d],  in[f,d] >= x[v,d] - x[u,d]  for v in T(f)
              relayed along a line:  out[f,d] = in[f,d+1] >= y[u,d] - y[v,d]
    load      sum over i of t[i,d] x[i,d] + sum over j of extra[j] w[j,d] (+ sum over f of cost[f] (out + in)) <= L;
              relayed: compute, sum of cost * out and sum of cost * in each <= L
    memory    sum of size[i,d] x[i,d] - saved[j,d] w[j,d] <= room

w is continuous: what is proven is a lower bound for every placement, and what it finds is evaluated.

Source of the model with x and contiguity variables: Tarnawski et al., NeurIPS 2020. The staircase is proven in a
fraction of its time.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pulp

from assigner.solver.ilp.linear import LinearModel, Terms, add
from load.items import memory_binds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from load.items import Items


class PlacementModel(LinearModel):
    """One of the two programs.

    Args:
        items: The problem's items.
        classes: The class of each device, in the line's order where there is a line.
        cutoff: Only placements below it are of interest; inf: all.
        unit: What the model's times are counted in.
    """

    def __init__(self, items: Items, classes: Sequence[int], *, cutoff: float, unit: float) -> None:
        super().__init__("load", unit=unit)
        self.items, self.classes = items, list(classes)
        most = None if math.isinf(cutoff) else cutoff / unit
        self._load = self.problem.add_variable("L", 0, most)
        self._y: list[list[pulp.LpVariable]] = []
        self._flow_variables: dict[tuple[str, int, int], pulp.LpVariable] = {}
        self._x = self._line() if items.problem.contiguous else self._free()
        for d in range(len(classes)):
            self._device(d)
        self.problem.setObjective(pulp.LpAffineExpression({self._load: 1.0}))

    def placement(self) -> list[list[int]]:
        """Per device the items of the solution found."""
        placed: list[list[int]] = [[] for _ in self.classes]
        for i, row in enumerate(self._x):
            values = [sum(factor * (v.varValue or 0.0) for v, factor in terms.items()) for terms in row]
            placed[max(range(len(values)), key=values.__getitem__)].append(i)
        return placed

    def _variable(self, name: str, *, whole: bool = False, most: float = 1.0) -> pulp.LpVariable:
        return self.problem.add_variable(name, 0, most, pulp.LpInteger if whole else pulp.LpContinuous)

    def _line(self) -> list[list[Terms]]:
        last = len(self.classes) - 1
        for i in range(self.items.count):
            row = [self._variable(f"y_{i}_{d}", whole=True) for d in range(last + 1)]
            row[last].lowBound = 1.0
            self._y.append(row)
            for lower, upper in itertools.pairwise(row):
                self.above({upper: 1.0}, {lower: 1.0})
            for u in sorted(self.items.before[i]):
                for d in range(last):
                    self.above({self._y[u][d]: 1.0}, {row[d]: 1.0})
        return [[{row[0]: 1.0}, *({b: 1.0, a: -1.0} for a, b in itertools.pairwise(row))] for row in self._y]

    def _free(self) -> list[list[Terms]]:
        problem = self.items.problem
        work = [
            sum(problem.nodes[n].options[0].seconds[self.classes[0]] for n in group) for group in self.items.members
        ]
        x: dict[int, list[pulp.LpVariable]] = {}
        for heavier, i in enumerate(sorted(range(self.items.count), key=lambda i: -work[i])):
            x[i] = [self._variable(f"x_{i}_{d}", whole=True) for d in range(len(self.classes))]
            self.add_row(dict.fromkeys(x[i], 1.0), pulp.LpConstraintEQ, 1.0)
            for d, variable in enumerate(x[i]):
                if self.classes[:d].count(self.classes[d]) > heavier:
                    variable.upBound = 0.0
        return [[{variable: 1.0} for variable in x[i]] for i in range(self.items.count)]

    def _device(self, d: int) -> None:
        """The load and memory rows of device d."""
        problem, c = self.items.problem, self.classes[d]
        device, rule = problem.devices[c], problem.transfer.rule
        limited = memory_binds(problem) and math.isfinite(device.memory)
        compute, size = self._compute(d), self._size(d) if limited else {}
        if limited:
            self._second(d, compute, size)
        there: Terms = {}
        back: Terms = {}
        for f, flow in enumerate(self.items.flows) if device.pays else ():
            _put(there, self._leaving(f, d), flow.cost / self.unit)
            _put(back, self._coming(f, d), flow.cost / self.unit)
        servers = [compute, there, back]
        for terms in [add(*((1.0, each) for each in servers))] if rule == "added" else servers:
            self.above({self._load: 1.0}, terms)
        if limited:
            self.add_row(size, pulp.LpConstraintLE, 1.0)

    def _compute(self, d: int) -> Terms:
        """Time by first options; where that is impossible x[i,d] = 0."""
        problem, c = self.items.problem, self.classes[d]
        terms = []
        for i, members in enumerate(self.items.members):
            seconds = sum(problem.nodes[node].options[0].seconds[c] for node in members)
            if math.isinf(seconds):
                self.above({}, self._x[i][d])
            else:
                terms.append((seconds / self.unit, self._x[i][d]))
        return add(*terms)

    def _depth(self, d: int) -> int:
        return self.items.problem.in_flight(len(self.classes) - d)

    def _size(self, d: int) -> Terms:
        """Bytes by first options, as a share of the room."""
        problem, depth = self.items.problem, self._depth(d)
        room = problem.devices[self.classes[d]].memory
        sizes = []
        for members, x in zip(self.items.members, self._x, strict=True):
            options = [problem.nodes[node].options[0] for node in members]
            sizes.append((sum(depth * o.stored + o.fixed for o in options) / room, x[d]))
        return add(*sizes)

    def _second(self, d: int, compute: Terms, size: Terms) -> None:
        """Adds to `compute`, and takes from `size`, what second options change."""
        problem, c, depth = self.items.problem, self.classes[d], self._depth(d)
        for i, members in enumerate(self.items.members):
            for node in members:
                first, *second = problem.nodes[node].options
                for other in second:
                    saved = depth * (first.stored - other.stored) + first.fixed - other.fixed
                    added = other.seconds[c] - first.seconds[c]
                    if saved > 0 and math.isfinite(added):
                        w = self._variable(f"w_{node}_{d}")
                        self.above(self._x[i][d], {w: 1.0})
                        _put(compute, w, max(0.0, added) / self.unit)
                        _put(size, w, -saved / problem.devices[c].memory)

    def _leaving(self, f: int, d: int) -> pulp.LpVariable | None:
        flow = self.items.flows[f]
        if self.items.problem.transfer.rule != "relayed":
            return self._moved("out", f, d, [(self._x[flow.source][d], self._x[v][d]) for v in flow.targets])
        if d == len(self.classes) - 1:
            return None
        return self._moved("out", f, d, [({self._y[flow.source][d]: 1.0}, {self._y[v][d]: 1.0}) for v in flow.targets])

    def _coming(self, f: int, d: int) -> pulp.LpVariable | None:
        flow = self.items.flows[f]
        if self.items.problem.transfer.rule != "relayed":
            return self._moved("in", f, d, [(self._x[v][d], self._x[flow.source][d]) for v in flow.targets])
        return self._leaving(f, d - 1) if d else None

    def _moved(self, name: str, f: int, d: int, pairs: Iterable[tuple[Terms, Terms]]) -> pulp.LpVariable:
        """The variable that is at least here - there for each pair."""
        if (name, f, d) not in self._flow_variables:
            variable = self._flow_variables[name, f, d] = self._variable(f"{name}_{f}_{d}")
            for here, there in pairs:
                self.above(add((1.0, {variable: 1.0}), (1.0, there)), here)
        return self._flow_variables[name, f, d]


def _put(terms: Terms, variable: pulp.LpVariable | None, factor: float) -> None:
    if variable is not None:
        terms[variable] = terms.get(variable, 0.0) + factor
