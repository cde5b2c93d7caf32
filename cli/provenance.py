"""The profile behind a plan where it is at hand: commands that can do without one do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.errors import FormatError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from assigner.plan import Plan
    from assigner.profile import Profile


def profile_of(plan: Plan, path: Path, given: Path | None = None) -> Profile | None:
    """The profile that a plan was solved from; None: it is not there, or has changed since.

    Args:
        plan: The plan.
        path: Its file.
        given: A profile that the user named: it has to be there and to fit.

    Raises:
        UsageError: the named profile cannot be read.
        FormatError: the named profile is not sound, or is of another workload than the plan.
    """
    from assigner.origin import profile_path
    from assigner.profile import load_profile
    from assigner.simulate import check_fit

    try:
        found = load_profile(profile_path(plan, path, given))
        check_fit(plan, found)
    except (FormatError, UsageError):
        if given is not None:
            raise
        return None
    return found
