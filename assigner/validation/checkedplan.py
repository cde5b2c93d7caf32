"""Whether what a plan says of itself still holds: priced again by its profile, and without what no longer does.

A plan is a file that can be edited, and its prediction, proof and what-ifs are of the placement that was solved. Where
the profile is at hand they are checked; a plan that does not hold is priced anew, and what was proven of the other one
is left out. Where it is not, only the names of the workers tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.schedule.simulate import predict

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Prediction
    from assigner.formats.profile import Profile


def checked_plan(
    plan: Plan, profile: Profile | None = None, *, own: bool | None = True, doubt: str = "", misfit: bool = False
) -> tuple[Plan, tuple[str, ...]]:
    """The plan as far as it holds by a profile; None: none is at hand.

    `own`: the plan was solved from that profile; None: it does not say from which. `doubt` is why its own profile is
    not at hand though it was found; `misfit`: that is as it was then, and the plan does not fit it.

    Returns:
        The plan, its prediction the file's own, or a new one, or None where none holds; and why it is not the file's
        own: nothing where it is.
    """
    doubts = (doubt,) if doubt else ()
    if profile is None:
        said = _strange(plan, misfit=misfit)
        return (_bare(plan) if said else plan), (*doubts, *([said] if said else []))
    try:
        return _checked(plan, profile, own=own)
    except FormatError as error:
        left_out = ", so its figures are left out" if plan.predicted else ""
        return _bare(plan), (f"the profile cannot price it: {error.message}{left_out}",)


def holds(plan: Plan, now: Prediction) -> bool:
    """Whether a plan's own prediction has the workers, times and memory of a new one, as far as they are printed."""
    stored = plan.predicted_workers
    if plan.predicted is None or stored.keys() != {each.worker for each in now.workers}:
        return False
    pairs = [(now.step_s, plan.predicted.step_s)]
    for each in now.workers:
        old = stored[each.worker]
        pairs += [(each.compute_s, old.compute_s), (each.peak_bytes, old.peak_bytes)]
    return all(fmt.alike(value, before) for value, before in pairs)


def _strange(plan: Plan, *, misfit: bool) -> str:
    """What shows without a profile that a prediction is of another plan."""
    if plan.predicted is None:
        return ""
    told = plan.predicted_workers
    if told and (strange := told.keys() ^ set(plan.workers)):
        name = min(strange)
        which = "the plan's stages do not" if name in told else "its prediction does not"
        other = "its prediction names" if name in told else "the plan's stages name"
        return f"{other} {name}, {which}: the figures of its file are of another plan and are left out"
    return "it was changed since it was solved, so the figures of its file are left out" if misfit else ""


def _checked(plan: Plan, profile: Profile, *, own: bool | None) -> tuple[Plan, tuple[str, ...]]:
    predicted, stored = predict(plan, profile), plan.predicted
    if holds(plan, predicted):
        return plan, ()
    now = replace(plan, predicted=predicted)
    whose = "the profile it was solved from" if own else "the profile that was named"
    if stored is None:
        return _unpriced(now, own=own), (f"priced with {whose}: its file has no prediction",)
    found = f"{fmt.seconds(predicted.step_s)} a step, where its file says {fmt.seconds(stored.step_s)}"
    if fmt.alike(predicted.step_s, stored.step_s):
        found = "the step is as its file says, and its workers' times or memory are not"
    why = "; it was changed since, or solved by another version" if own else ""
    proven = plan.solver is not None or plan.candidates or plan.what_if
    left_out = "; what was proven of it is left out" if proven else ""
    return _without_proof(now, own=own), (f"priced anew with {whose}: {found}{why}{left_out}",)


def _without_proof(plan: Plan, *, own: bool | None) -> Plan:
    """Without what is about the placement that was solved; baselines are the profile's, and go with another one."""
    return replace(plan, solver=None, candidates=(), what_if=(), baselines=plan.baselines if own else ())


def _unpriced(now: Plan, *, own: bool | None) -> Plan:
    """A plan that had no prediction: its proof is of it where it is of a step that takes as long."""
    solver, predicted = now.solver, now.predicted
    if own and solver and predicted and now.objective == "step" and fmt.alike(predicted.step_s, solver.objective_s):
        return now
    return _without_proof(now, own=own)


def _bare(plan: Plan) -> Plan:
    return replace(_without_proof(plan, own=False), predicted=None)
