"""The profile behind a plan where it is at hand: commands that can do without one do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.errors import FormatError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

Known = dict["Path", "Profile"]
"""Profiles that were loaded already, by their files."""


def behind(
    plan: Plan, path: Path, given: Path | None = None, *, known: Known | None = None
) -> tuple[tuple[Plan, tuple[str, ...]], Profile | None, Path | None]:
    """A plan held against the profile that it was solved from, where that is at hand, or one that the user named.

    Loaded profiles are kept in `known`, for the next plan.

    Returns:
        What `checked_plan` says, and the profile that it was held against and its file; None: there is none that fits.

    Raises:
        UsageError: the named profile cannot be read.
        FormatError: the named profile is not sound, or is of another workload than the plan.
    """
    from assigner.formats.plan import is_origin, profile_path
    from assigner.schedule.simulate import check_fit
    from assigner.validation.checkedplan import checked_plan

    if given is not None:
        found = _loaded(given, known)
        check_fit(plan, found)
        return checked_plan(plan, found, own=is_origin(plan, given)), found, given
    try:
        file = profile_path(plan, path)
        found = _loaded(file, known)
    except UsageError:  # it names none, or it is not there: many a plan is read without its profile
        return checked_plan(plan), None, None
    except FormatError as error:
        return checked_plan(plan, doubt=f"not checked with its profile: {error.message}"), None, None
    try:
        check_fit(plan, found)
    except FormatError as error:
        doubt = f"does not fit {file}, which it was solved from: {error.message}"
        return checked_plan(plan, doubt=doubt, misfit=True), None, None
    return checked_plan(plan, found), found, file


def _loaded(path: Path, known: Known | None) -> Profile:
    from assigner.formats.profile import load_profile

    known = {} if known is None else known
    if path not in known:
        known[path] = load_profile(path)
    return known[path]
