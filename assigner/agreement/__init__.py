"""Predictions and what came of them: a plan beside a trace of its run, and a profile corrected by it."""

from assigner.agreement.calibration import calibrated
from assigner.agreement.comparison import (
    Agreement,
    Compared,
    ComputeAgreement,
    RouteAgreement,
    WorkerAgreement,
    agree,
    as_run,
)
from assigner.agreement.explanation import Cause, Explanation
from assigner.agreement.rehearsal import rehearsed

__all__ = [
    "Agreement", "Cause", "Compared", "ComputeAgreement", "Explanation", "RouteAgreement", "WorkerAgreement", "agree",
    "as_run", "calibrated", "rehearsed",
]  # fmt: skip
