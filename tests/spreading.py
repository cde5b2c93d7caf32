"""Profiles whose spreads are known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assigner.formats.profile import Profile


def spread_out(profile: Profile, *, compute: float = 0.0, link: float = 0.0) -> Profile:
    """The profile with one spread for all measurements and one for all points of links."""
    return replace(
        profile,
        measurements=tuple(replace(each, spread=compute) for each in profile.measurements),
        links=tuple(
            replace(each, points=tuple(replace(point, spread=link) for point in each.points)) for each in profile.links
        ),
    )
