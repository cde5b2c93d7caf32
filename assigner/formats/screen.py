"""Results that show themselves: printed, by rich and in a notebook, as `assigner show` shows them."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType

    from assigner.report.sheet import Report

_ASIDE = 120
"""Columns where there is no terminal, as in a notebook."""


class OnScreen:
    """What has a screen of its own: `print(plan)`, `rich.print(plan)`, and `plan` as a notebook's last line."""

    def __str__(self) -> str:
        from rich.console import Console

        from assigner.report.sheet import draw

        width = shutil.get_terminal_size(fallback=(_ASIDE, 25)).columns
        console = Console(file=io.StringIO(), width=width, height=25, highlight=False, markup=False, emoji=False)
        with console.capture() as drawn:
            console.print(draw(_report(self), width=width))
        return "\n".join(line.rstrip() for line in drawn.get().splitlines())

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from assigner.report.sheet import draw

        yield draw(_report(self), width=options.max_width)

    def _repr_html_(self) -> str:
        """For notebooks."""
        from assigner.report.page.markup import parts_html

        return f"<div>{parts_html(_report(self))}</div>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - as IPython calls it
        """For IPython in a terminal."""
        printer.text(str(self))


def _report(result: OnScreen) -> Report:
    """What `assigner show` prints of it, or of the plan that it holds."""
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.report.plan import plan_report
    from assigner.report.profile import profile_report

    if isinstance(result, Profile):
        return profile_report(result)
    plan = result if isinstance(result, Plan) else getattr(result, "plan", None)
    assert isinstance(plan, Plan), "only plans, profiles and solutions are on screen"
    return plan_report(plan)
