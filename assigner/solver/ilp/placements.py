"""A bound for every placement there is: who holds what, and nothing about order.

Sets      positions i; groups k of like workers with `count[k]` members; P: a path to the sink t, A (G): all positions
          that t depends on (that its gradient reaches)
Variables x[i, k] = 1: i is on a worker of k; r[i, k] <= x[i, k]: it is rematerialised there (0 to 1)
          there, back: seconds until the last forward of t is over, and from then on

    minimise  step
    cover     sum over k of x[i, k] = 1; partitions kept together have equal x
    load      count[k] step  >= sum over i of (M (f + b) + u) x + M f r
    turn      step >= there + back;  count[k] there >= sum over A of M f x;
              count[k] back >= sum over G of M b x + M f r
    path      step >= sum over P of (f + b) x + (M - 1) (f + b) x of one position i, for each i on P
    visited   one stage a worker only: every micro-batch runs through all that a worker holds of P in one go, so
              step >= sum over P of (f + b) x + (M - 1) (F + B), count[k] F >= sum over P of f x, the same for B
    memory    count[k] capacity >= sum over i of (state + M (activation + values read)) x - M activation r

Under 1F1B backwards start before the last forward and as little as one micro-batch is in flight. So there are no turns,
of a path only what lies in front of position i is added to its work, and memory is that of one micro-batch. The steady
state knows neither turns, paths nor updates.

With x whole it is the ILP; with x between 0 and 1 its relaxation. Messages, and what memory needs once (workspace, the
largest rematerialised activation), are left out, and a value with several readers counts for each of them in part: the
optimum is a lower bound. Source: the load bound of max-load placement (Tarnawski et al., NeurIPS 2020), with the turn.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pulp

from assigner.solver.ilp.linear import LinearModel, add
from assigner.solver.limits import tuning
from assigner.solver.problem.prices import bits
from assigner.solver.problem.problem import heaviest_paths

if TYPE_CHECKING:
    from assigner.schedule.cost import PartitionCost
    from assigner.solver.ilp.linear import Terms
    from assigner.solver.problem.set_memory import SetMemory


class PlacementModel(LinearModel):
    """The model of one table.

    Args:
        one_stage: True: at most one stage a worker.
        turns: All forwards come before all backwards; False: as under 1F1B.
        steady: Of the steady state, M micro-batches without an update: cover, load and memory alone.
    """

    def __init__(
        self, memory: SetMemory, *, one_stage: bool, unit: float, turns: bool = True, steady: bool = False
    ) -> None:
        super().__init__("load", unit=unit, clock=memory.table.problem.clock)
        self._table, self._turns = memory.table, turns
        self._n, self._times = len(self._table.problem.order), self._table.micro_batches
        groups: dict[int, list[int]] = defaultdict(list)
        for worker, group in enumerate(self._table.group):
            groups[group if not one_stage else worker].append(worker)
        self._members = list(groups.values())
        self._x: dict[tuple[int, int], pulp.LpVariable] = {}
        self._r: dict[tuple[int, int], pulp.LpVariable] = {}
        self._cover()
        self._tell_apart()
        self._memory()
        self._step = {self.problem.add_variable("step", 0): 1.0}
        self.problem.setObjective(pulp.LpAffineExpression(self._step))
        everything = (1 << self._n) - 1
        for k in range(len(self._members)):
            load = self._work(k, everything, forward=True, backward=True)
            for i in range(self._n) if not steady else ():
                if (i, k) in self._x:
                    load[self._x[i, k]] += self._price(i, k).update_s / self.unit
            self.above(add((float(len(self._members[k])), self._step)), load)
        sinks = [i for i in range(self._n) if not self._table.behind[i]]
        for number, sink in enumerate(sinks if not steady else ()):
            if turns:
                self._turn(number, sink)
            for which, path in enumerate(self._paths(sink)):
                self._path(f"{number}_{which}", path, one_stage=one_stage)

    @staticmethod
    def is_small(memory: SetMemory) -> bool:
        """Whether it has few enough variables to be built."""
        table = memory.table
        return len(table.problem.order) * len(set(table.group)) <= tuning.VARIABLES

    def _price(self, i: int, k: int) -> PartitionCost:
        price = self._table.prices[self._members[k][0]][i]
        assert price is not None
        return price

    def _cover(self) -> None:
        rules = self._table.problem.remat_rules
        for i in range(self._n):
            for k, members in enumerate(self._members):
                if self._table.prices[members[0]][i] is not None:
                    self._x[i, k] = self.problem.add_variable(f"x_{i}_{k}", 0, 1, pulp.LpInteger)
                    if rules[i] != "never":
                        self._r[i, k] = self.problem.add_variable(f"r_{i}_{k}", 0, 1)
                        sense = pulp.LpConstraintEQ if rules[i] == "always" else pulp.LpConstraintLE
                        self.add_row({self._r[i, k]: 1.0, self._x[i, k]: -1.0}, sense, 0.0)
            self.add_row({self._x[i, k]: 1.0 for k in range(len(self._members)) if (i, k) in self._x},
                      pulp.LpConstraintEQ, 1.0)  # fmt: skip
            for j in bits(self._table.together[i] & ((1 << i) - 1)):
                for k in range(len(self._members)):
                    pair = [self._x[each, k] for each in (i, j) if (each, k) in self._x]
                    self.add_row(dict(zip(pair, (1.0, -1.0), strict=False)), pulp.LpConstraintEQ, 0.0)

    def _tell_apart(self) -> None:
        """Of like workers that are modelled one by one, a later one takes nothing in front of an earlier one."""
        last: dict[int, int] = {}
        for k, members in enumerate(self._members):
            group = self._table.group[members[0]]
            before = last.get(group)
            last[group] = k
            if before is None:
                continue
            for i in range(self._n):
                if (i, k) in self._x:
                    row = {self._x[j, before]: 1.0 for j in range(i) if (j, before) in self._x}
                    self.add_row(row | {self._x[i, k]: -1.0}, pulp.LpConstraintGE, 0.0)

    def _memory(self) -> None:
        table, problem, flight = self._table, self._table.problem, self._times if self._turns else 1
        readers: dict[int, int] = defaultdict(int)
        for _, value, _, _ in table.edges:
            readers[value] += 1
        read = [0.0] * self._n
        for _, value, reader, _ in table.edges:
            read[reader] += table.bytes[value] / readers[value]
        for k, members in enumerate(self._members):
            capacity = max(1.0, problem.workers[members[0]].tensor_bytes)  # the reserve may leave nothing
            used: Terms = {}
            for i in range(self._n):
                if (i, k) in self._x:
                    kept = flight * self._price(i, k).activation_bytes
                    used[self._x[i, k]] = (self._own_state(i) + kept + flight * read[i]) / capacity
                    if (i, k) in self._r:
                        used[self._r[i, k]] = -kept / capacity
            self.add_row(used, pulp.LpConstraintLE, float(len(members)))

    def _own_state(self, i: int) -> float:
        """Bytes of a partition's state without what it may share with another one."""
        problem = self._table.problem
        partition = problem.profile.partition[problem.order[i]]
        state = problem.cost.state((partition.name,)).total
        for tie in problem.profile.ties:
            if partition.name in tie.partitions:
                share = problem.cost.tied_share(partition.name, tie)
                state -= tie.bytes + share * (partition.gradient_bytes + partition.optimizer_bytes)
        return max(0.0, state)

    def _work(self, k: int, mask: int, *, forward: bool = False, backward: bool = False, times: int = 0) -> Terms:
        """Seconds of all micro-batches (or of `times` of them) of the positions that group k holds of a mask."""
        many = (times or self._times) / self.unit
        found: Terms = defaultdict(float)
        for i in bits(mask):
            if (i, k) in self._x:
                price = self._price(i, k)
                found[self._x[i, k]] += many * (forward * price.forward_s + backward * price.backward_s)
                if backward and (i, k) in self._r:
                    found[self._r[i, k]] += many * price.recompute_s
        return found

    def _anywhere(self, mask: int, **work: Any) -> Terms:
        """The same, whoever holds them."""
        return add(*((1.0, self._work(k, mask, **work)) for k in range(len(self._members))))

    def _reaching(self, sink: int, *, gradient: bool) -> int:
        found = 1 << sink
        for i in range(sink - 1, -1, -1):
            if any(maker == i and found >> reader & 1 and (graded or not gradient)
                   for maker, _, reader, graded in self._table.edges):  # fmt: skip
                found |= 1 << i
        return found

    def _turn(self, number: int, sink: int) -> None:
        there, back = (self.problem.add_variable(f"{name}{number}", 0) for name in ("there", "back"))
        before, graded = (self._reaching(sink, gradient=gradient) for gradient in (False, True))
        for k, members in enumerate(self._members):
            self.above({there: float(len(members))}, self._work(k, before, forward=True))
            self.above({back: float(len(members))}, self._work(k, graded, backward=True))
        self.above(self._step, {there: 1.0, back: 1.0})

    def _paths(self, sink: int) -> list[int]:
        """Of each position the heaviest path along gradients that leads through it to the sink; each path once."""
        weight = self._table.least_s
        graded = [(maker, reader) for maker, _, reader, gradient in self._table.edges if gradient]
        into = heaviest_paths(weight, range(sink + 1), graded)
        out = heaviest_paths(weight, range(sink, -1, -1), [(reader, maker) for maker, reader in graded])
        reached = self._reaching(sink, gradient=True)
        return list(dict.fromkeys(into[i][1] | out[i][1] for i in bits(reached)))

    def _path(self, name: str, path: int, *, one_stage: bool) -> None:
        """Rows of one path: forward along it, then back."""
        both, more = {"forward": True, "backward": True}, self._times - 1
        once = self._anywhere(path, **both, times=1)
        for i in bits(path) if more and not (one_stage and self._turns) else ():
            before = once if self._turns else self._anywhere(path & ((2 << i) - 1), **both, times=1)
            self.above(self._step, add((1.0, before), (1.0, self._anywhere(1 << i, **both, times=more))))
        if one_stage and more and self._turns:
            slow = [self.problem.add_variable(f"slow{way}{name}", 0) for way in ("F", "B")]
            for k in range(len(self._members)):
                self.above({slow[0]: 1.0}, self._work(k, path, forward=True, times=1))
                self.above({slow[1]: 1.0}, self._work(k, path, backward=True, times=1))
            for i in bits(path):  # exactly one of these is there: stronger than the rows of the workers
                for variable, way in zip(slow, ("forward", "backward"), strict=True):
                    self.above({variable: 1.0}, self._anywhere(1 << i, **{way: True}, times=1))
            once[slow[0]] += more
            once[slow[1]] += more
        self.above(self._step, once)
