"""The file itself: one HTML document with its style, its figures and its code inside, and a policy that allows no more.

The Content-Security-Policy names the hash of each script and of the style sheet. So nothing else runs, whatever a name
in a plan says, and nothing is fetched from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.comparison import comparison_report
from assigner.report.links import collectives, transfers
from assigner.report.page import sections
from assigner.report.page.figures import page_data
from assigner.report.page.markup import cards_html, heat_maps, json_html, parts_html, placement_css, placement_html
from assigner.report.page.shown import unlike_batches
from assigner.report.plan import candidates
from assigner.report.sheet import Line, with_hosts
from assigner.report.whatif import what_if, what_if_hint
from assigner.validation.steps import runs_by_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.report.page.shown import Shown
    from assigner.report.sheet import Part

CODE = ("format.js", "theme.js", "timeline.js", "inspect.js", "memory.js", "splits.js", "page.js")
"""The page's own code, in the order in which it is put together."""


def page_html(pages: Sequence[Shown], *, title: str, made_at: str, priced_by: str = "") -> str:
    """The whole file of plans of one workload, the first of which is the baseline; `made_at` stands at its foot.

    `priced_by` is the profile that prices all plans; empty: each is priced by its own.
    """
    style, library = _static("page.css") + placement_css(pages), _static("echarts.min.js")
    code = '"use strict";(() => {\n' + "\n".join(_static(name) for name in CODE) + "\n})();"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(code)}; style-src {_hash(style)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_static("page.html")).substitute(
        policy=escape(policy),
        title=escape(title),
        style=style,
        subtitle=escape(_subtitle(pages)),
        plans=_choice(pages),
        summary=_of_each(pages, lambda page: _summary(pages, page)),
        comparison=_comparison(pages, priced_by),
        starts=_of_each(pages, lambda page: _tables(page, sections.starts_sheet(page))),
        memory=_of_each(pages, lambda page: _tables(page, (sections.memory_sheet(page),))),
        links=_of_each(pages, _links),
        splits=_of_each(pages, lambda page: _halves((sections.split_sheet(page),), candidates(page.plan))),
        what_if=_of_each(pages, lambda page: parts_html((*what_if(page.plan), *what_if_hint(page.plan)))),
        stages=_of_each(pages, lambda page: _tables(page, (sections.stage_sheet(page),))),
        measured=_measured(pages),
        about=_of_each(pages, _about),
        made_at=escape(made_at),
        data=json_html(page_data(pages, title=title)),
        library=library,
        code=code,
    )


def _static(name: str) -> str:
    return (files("assigner.report.page") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a policy names an inline element: by the hash of what is between its tags."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _subtitle(pages: Sequence[Shown]) -> str:
    page = pages[0]
    workload = page.plan.workload
    facts = ["" if unlike_batches(pages) else f"batch of {workload.batch_size}", workload.dtype, workload.optimizer]
    facts.append(fmt.plural(len(page.profile.partitions), "partition"))
    facts.append(fmt.plural(len(page.profile.workers), "worker"))
    return " · ".join(fact for fact in facts if fact)


def _of_each(pages: Sequence[Shown], make: Callable[[Shown], str]) -> str:
    """A part of the page for each plan; the page's code shows that of the plan that was chosen.

    Where there are several, each has its plan's name above it: for paper, and where scripts do not run.
    """
    names = [f'<p class="whose">{escape(page.name)}</p>' if len(pages) > 1 else "" for page in pages]
    return "\n".join(f'<div data-plan="{n}">{names[n]}{make(page)}</div>' for n, page in enumerate(pages))


def _tables(page: Shown, parts: Iterable[Part]) -> str:
    """Tables of a plan's workers, with their hosts where there are several."""
    return parts_html(with_hosts(parts, page.profile))


def _choice(pages: Sequence[Shown]) -> str:
    """Radio buttons, one for each plan."""
    if len(pages) == 1:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="plan" value="{n}"{" checked" if n == len(pages) - 1 else ""}>'
        f"<span>{escape(page.name)}{' (baseline)' if n == 0 else ''}"
        f" <b>{escape(_speed(pages, page))}</b></span></label>"
        for n, page in enumerate(pages)
    )
    return f'<fieldset class="choice"><legend>Plan</legend>{buttons}</fieldset>'


def _speed(pages: Sequence[Shown], page: Shown) -> str:
    """The figure by which plans are chosen between: the step, or samples a second where batches differ."""
    said = page.predicted
    return fmt.rate(said.samples_per_s) if unlike_batches(pages) else fmt.seconds(said.step_s)


def _summary(pages: Sequence[Shown], page: Shown) -> str:
    strip = placement_html([page]) if len(pages) == 1 else ""
    said = (*sections.summary(page), sections.critical_sheet(page.timeline))
    return cards_html(sections.cards(pages, page)) + strip + _halves(said, sections.steps(pages, page))


def _halves(one: Iterable[Part], other: Iterable[Part]) -> str:
    return f'<div class="halves"><div>{parts_html(one)}</div><div>{parts_html(other)}</div></div>'


def _comparison(pages: Sequence[Shown], priced_by: str) -> str:
    if len(pages) == 1:
        return ""
    pairs = [(page.name, page.plan) for page in pages]
    runs = {run.name: run.trace for page in pages for run in page.runs}  # each once, if it is of several plans alike
    report = comparison_report(pages, traces=runs_by_plan(pairs, list(runs.items())), priced_by=priced_by)
    return _section("comparison", "Plans side by side", placement_html(pages) + parts_html(report))


def _links(page: Shown) -> str:
    found = "".join(heat_maps(page))
    sent = transfers(page.predicted, page.timeline.program) or (Line("One worker runs everything: nothing is sent."),)
    return f'<div class="matrices">{found}</div>{parts_html((*sent, *collectives(page.profile)))}'


def _measured(pages: Sequence[Shown]) -> str:
    if not any(page.runs for page in pages):
        return ""
    nothing = (Line("No run of this plan was given."),)
    runs = _of_each(pages, lambda page: _tables(page, sections.measured_section(page) or nothing))
    return _section("measured", "Predicted and measured", runs)


def _about(page: Shown) -> str:
    warnings, about = page.profile.warnings, parts_html(sections.about(page))
    if not warnings:
        return about
    said = f"{fmt.plural(len(warnings), 'warning')} of the profile"
    return f"{about}<details><summary>{said}</summary>{parts_html(map(Line, warnings))}</details>"


def _section(name: str, title: str, inner: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{inner}</section>'
