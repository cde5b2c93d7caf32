"""Where a plan comes from: the profile that it was solved from, found again beside it and known by its hash."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.errors import FormatError, UsageError
from assigner.files import read_bytes
from assigner.formats.plan import ProfileReference

if TYPE_CHECKING:
    from assigner.formats.plan import Plan


def profile_path(plan: Plan, path: Path, given: Path | None = None) -> Path:
    """The file of the profile that a plan is to be priced with.

    Args:
        plan: The plan.
        path: Its file.
        given: A profile that the user named; it is taken as it is. None: the one that the plan was solved from,
            where the plan says, seen from here or from the plan's folder, or beside the plan.

    Raises:
        UsageError: the plan names no profile, or the file is not there.
        FormatError: the file has changed since the plan was solved.
    """
    if given is not None:
        return given
    if plan.profile is None:
        raise UsageError(f"{path} does not say which profile it was solved from", hint="name it: --profile PROFILE")
    named = Path(plan.profile.path)
    places = dict.fromkeys((named, path.parent / named, path.parent / named.name))
    found = [place for place in places if place.is_file()]
    if not found:
        raise UsageError(
            f"{path} was solved from {named}, which is not there", hint="name the profile: --profile PROFILE"
        )
    for place in found:
        if is_origin(plan, place):
            return place
    raise FormatError(
        f"{found[0]} has changed since {path} was solved from it",
        hint=f"--profile {found[0]} takes it as it is now; assigner solve makes a new plan",
    )


def is_origin(plan: Plan, path: Path) -> bool | None:
    """True if the file is the profile that the plan was solved from, as it was then; None: the plan names none."""
    return None if plan.profile is None else file_hash(path) == plan.profile.sha256


def reference(path: Path) -> ProfileReference:
    """What a plan says of the profile that it is solved from."""
    return ProfileReference(str(path), file_hash(path))


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(read_bytes(path, hint="name the profile: --profile PROFILE")).hexdigest()
