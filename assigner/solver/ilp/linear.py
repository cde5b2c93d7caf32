"""Rows of linear models, as PuLP has them, and HiGHS or CBC that run one."""

from __future__ import annotations

import math
import re
import signal
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import highspy
import pulp

from assigner.solver.limits.clock import OutOfTime, SolveClock
from assigner.solver.problem.options import SolverName

if TYPE_CHECKING:
    from collections.abc import Iterator

Terms = dict[pulp.LpVariable, float]
"""A linear expression: coefficients by variable."""

LARGEST = 1e6
"""The largest coefficient of a model, where the best plan has about 1,000: what takes longer is as bad as this.

HiGHS leaves out rows with coefficients of 1e15 or more, and beside some of 1e10 its tolerances are no longer small. A
message over a link that is as good as dead (1e13 s) has such ones.
"""


def add(*parts: tuple[float, Terms]) -> Terms:
    """The weighted sum of linear expressions."""
    total: Terms = defaultdict(float)
    for weight, terms in parts:
        for variable, value in terms.items():
            total[variable] += weight * value
    return total


def capped(terms: Terms) -> Terms:
    """What is minimised without coefficients above `LARGEST`: its optimum is a bound of the one with them."""
    return {variable: min(value, LARGEST) for variable, value in terms.items()}


class LinearModel:
    """A model that is minimised.

    Args:
        unit: Seconds of one unit of its objective; about a thousandth of the step time scales it well.
        clock: When it is of no use any more; None: never.
    """

    def __init__(self, name: str, *, unit: float, clock: SolveClock | None = None) -> None:
        self.unit = unit
        self._clock = SolveClock(within=clock)
        self._stated_s = 0.0
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self._rows = 0

    def add_row(self, terms: Terms, sense: int, bound: float) -> None:
        """A row; one without terms that cannot hold makes the model infeasible.

        An inequality with coefficients above `LARGEST` is weakened: those that make it hard to hold are capped, and
        with one that makes it easy it is left out. So every bound of the model stays one.

        Raises:
            OutOfTime: the time is over.
        """
        self._clock.check()
        terms = {variable: value for variable, value in terms.items() if value}
        if not terms:
            if not ((sense == pulp.LpConstraintEQ and bound) or (sense == pulp.LpConstraintGE and bound > 0)):
                return
            terms = {self.problem.add_variable(f"never{self._rows + 1}", 0, 0): 1.0}
        if sense != pulp.LpConstraintEQ:
            hard = 1.0 if sense == pulp.LpConstraintLE else -1.0
            if any(hard * value < -LARGEST for value in terms.values()):
                return
            terms = {variable: hard * value for variable, value in capped(add((hard, terms))).items()}
        self._rows += 1
        expression = pulp.LpAffineExpression(terms)
        self.problem.addConstraint(pulp.LpConstraint(expression, sense, f"r{self._rows:06d}", bound))
        self._stated_s = self._clock.elapsed_s

    def above(self, high: Terms, low: Terms) -> None:
        """High >= low."""
        self.add_row(add((1.0, high), (-1.0, low)), pulp.LpConstraintGE, 0.0)

    def check(self) -> None:
        """Raise OutOfTime where less time is left than stating it took: PuLP takes about as long to hand it over."""
        if self._clock.left_s <= self._stated_s:
            raise OutOfTime


@dataclass(frozen=True)
class Outcome:
    """What a run proves, in the model's unit.

    Args:
        found: There is a solution, and the variables hold it.
        value: Its objective; inf without one.
        bound: No solution below the cutoff is better; the cutoff itself if there is none, inf if there is no solution.
        finished: The run ended by itself.
    """

    found: bool
    value: float
    bound: float
    finished: bool

    def scaled(self, unit: float) -> Outcome:
        """The same with value and bound times `unit`."""
        return replace(self, value=self.value * unit, bound=self.bound * unit)


@dataclass(frozen=True)
class Backend:
    """An ILP solver with its settings, which says only what is proven.

    After a time limit PuLP's status says "Optimal"; only `sol_status` 1 is a proof. The dual bound comes from HiGHS
    itself; CBC does not hand its own over, so an unfinished CBC run proves nothing beyond the relaxation, nor does it
    tell of its search (`watch`).
    """

    name: SolverName
    seed: int
    watch: Callable[[], None] | None = None

    def relax(self, problem: pulp.LpProblem, *, time_limit: float) -> Outcome:
        """Solve the linear relaxation; reduced costs are then in the variables' `dj`."""
        solver = self._highs(time_limit, mip=False) if self.name == "highs" else self._cbc(time_limit, mip=False)
        _solve(problem, solver)
        if problem.sol_status == pulp.LpSolutionInfeasible:
            return Outcome(False, math.inf, math.inf, True)
        if problem.sol_status != pulp.LpSolutionOptimal:
            return Outcome(False, math.inf, -math.inf, False)
        value = pulp.value(problem.objective)
        return Outcome(True, value, value, True)

    def search(
        self, problem: pulp.LpProblem, *, gap: float, cutoff: float, time_limit: float, nodes: int | None = None
    ) -> Outcome:
        """Solve the ILP for a solution below `cutoff`, to a relative gap, in at most so many nodes of its tree."""
        if self.name == "highs":
            return self._search_highs(problem, gap, cutoff, time_limit, nodes)
        return self._search_cbc(problem, gap, cutoff, time_limit, nodes)

    def version(self) -> str:
        """The solver's version."""
        if self.name == "highs":
            return str(highspy.Highs().version())  # type: ignore[no-untyped-call]
        return _cbc_version()

    def _highs(self, time_limit: float, *, mip: bool, **settings: Any) -> pulp.HiGHS:
        kinds = highspy.cb.HighsCallbackType
        wanted = [kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt]
        return pulp.HiGHS(
            mip=mip, msg=False, threads=1, timeLimit=time_limit, random_seed=self.seed,
            callbackTuple=(_Watcher(self.watch, SolveClock(time_limit)), None), callbacksToActivate=wanted, **settings,
        )  # fmt: skip

    def _search_highs(
        self, problem: pulp.LpProblem, gap: float, cutoff: float, time_limit: float, nodes: int | None
    ) -> Outcome:
        settings: dict[str, Any] = {} if math.isinf(cutoff) else {"objective_bound": cutoff}
        if nodes is not None:
            settings["mip_max_nodes"] = nodes
        solver = self._highs(time_limit, mip=True, gapRel=gap, gapAbs=0.0, **settings)
        _solve(problem, solver)
        status = problem.solverModel.getModelStatus()
        statuses = highspy.HighsModelStatus
        dual = problem.solverModel.getInfo().mip_dual_bound
        if problem.sol_status == pulp.LpSolutionInfeasible or status == statuses.kObjectiveBound:
            return Outcome(False, math.inf, cutoff, True)
        feasible = problem.solverModel.getInfo().primal_solution_status == 2
        value = pulp.value(problem.objective) if feasible else math.inf
        finished = problem.sol_status == pulp.LpSolutionOptimal
        if value is None or value > cutoff:
            return Outcome(False, math.inf, cutoff if finished else min(dual, cutoff), finished)
        return Outcome(True, value, min(dual, value), finished)

    def _cbc(self, time_limit: float, *, mip: bool, **settings: Any) -> pulp.COIN_CMD:
        return pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            mip=mip,
            msg=False,
            timeLimit=max(1, math.ceil(time_limit)),
            **settings,
        )

    def _search_cbc(
        self, problem: pulp.LpProblem, gap: float, cutoff: float, time_limit: float, nodes: int | None
    ) -> Outcome:
        options = [f"randomSeed {self.seed}", f"randomCbcSeed {self.seed}"]
        if not math.isinf(cutoff):
            options.append(f"cutoff {cutoff!r}")
        if nodes is not None:
            options.append(f"maxNodes {nodes}")
        solver = self._cbc(time_limit, mip=True, gapRel=gap, gapAbs=0.0, options=options, threads=1)
        _solve(problem, solver)
        finished = problem.sol_status == pulp.LpSolutionOptimal
        if problem.status == pulp.LpStatusInfeasible:  # "Infeasible" or "Integer infeasible": nothing below the cutoff
            return Outcome(False, math.inf, cutoff, True)
        whole = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        value = pulp.value(problem.objective) if whole else math.inf
        if value is None or math.isinf(value):
            return Outcome(False, math.inf, -math.inf, False)
        return Outcome(True, value, value * (1 - gap) if finished else -math.inf, finished)


def _solve(problem: pulp.LpProblem, solver: Any) -> None:
    with _interruptible() as stop:
        if hasattr(solver, "callbackTuple"):
            solver.callbackTuple[0].stop = stop
        try:
            problem.solve(solver)
        except pulp.PulpSolverError:
            if not stop.is_set():  # CBC is a process of its own, and Ctrl-C reaches it too
                raise
        if stop.is_set():
            raise KeyboardInterrupt


class _Watcher:
    """HiGHS's callback: reports progress and passes an interrupt on."""

    def __init__(self, watch: Callable[[], None] | None, clock: SolveClock) -> None:
        self._watch, self._clock = watch, clock
        self.stop = threading.Event()

    def __call__(self, kind: Any, _message: str, _out: Any, into: Any, _data: Any) -> None:
        if self.stop.is_set() or self._clock.over:  # HiGHS's own clock starts when PuLP has handed the model over
            into.user_interrupt = True
        if self._watch and kind == highspy.cb.HighsCallbackType.kCallbackMipInterrupt:
            try:
                self._watch()
            except KeyboardInterrupt:  # must not travel through foreign code
                self.stop.set()
                into.user_interrupt = True


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """While the solver runs, Ctrl-C sets the event instead of raising inside foreign code."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _cbc_version() -> str:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        problem = pulp.LpProblem("version", pulp.LpMinimize)
        problem.setObjective(problem.add_variable("v", 0, 1))
        problem.solve(pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, logPath=str(log)))
        found = re.search(r"Version:\s*(\S+)", log.read_text())
    return found[1] if found else "unknown"
