"""Graphviz DOT: the graph of partitions, coloured by worker, a box around each stage, edges with their bytes.

A stage of several workers has the colour of the first, and names all of them with their numbers of micro-batches.

Like partitions in a row are one node, `blocks.0-6 (7)`, so that a model of 100 partitions is still one picture.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.export.exported import Exported
from assigner.formats.fineness import split_text
from assigner.schedule.cost import CostModel
from assigner.schedule.replication import lanes
from assigner.schedule.simulate import check_fit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.stage import Stage

_FONT = "Helvetica,Arial,sans-serif"
_LEAST_RUN = 3
_SWATCHES = 4  # a row of the legend
_BASE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00", "#BBBBBB")
_SHADES = (0.0, 0.55, -0.45)  # towards white, towards black
_DARK, _LIGHT = "#000000", "#FFFFFF"


@dataclass(frozen=True)
class _Node:
    """What is drawn as one box: a partition, or a run of like ones on one stage."""

    name: str
    partitions: tuple[str, ...]
    stage: int
    again: bool


def partition_drawing(plan: Plan, profile: Profile, *, every: bool = False) -> Exported:
    """The plan's partition graph in the DOT language, for `dot -Tsvg`.

    Args:
        plan: Whose placement.
        profile: What it was solved from: edges, times and bytes.
        every: Draw each partition on its own, like ones too.

    Raises:
        FormatError: the profile is of another workload.
    """
    check_fit(plan, profile)
    text = "\n".join(_Drawing(plan, profile, every=every).lines()) + "\n"
    return Exported(text, text)


class _Drawing:
    def __init__(self, plan: Plan, profile: Profile, *, every: bool) -> None:
        self.plan, self.profile, self.cost = plan, profile, CostModel(profile)
        runs = [(n, run) for n, stage in enumerate(plan.stages) for run in _runs(profile, stage, every=every)]
        self.nodes = [_Node(f"n{k}", run, n, run[0] in plan.stages[n].rematerialise) for k, (n, run) in enumerate(runs)]
        self.lanes = lanes(plan)
        self.holder = {partition: node for node in self.nodes for partition in node.partitions}
        self.colour = {worker: worker_colour(n) for n, worker in enumerate(plan.workers)}

    def lines(self) -> Iterator[str]:
        yield "digraph plan {"
        yield f"  graph [label=<{self.head()}>, labelloc=t, labeljust=l, fontname={_quoted(_FONT)}, fontsize=11,"
        yield '    rankdir=LR, nodesep=0.3, ranksep=0.35, bgcolor="#FFFFFF", pad=0.3];'
        yield f'  node [shape=box, style=filled, fontname={_quoted(_FONT)}, fontsize=12, margin="0.14,0.07"];'
        yield f"  edge [fontname={_quoted(_FONT)}, fontsize=11, arrowsize=0.8];"
        for n in range(len(self.plan.stages)):
            yield from self.cluster(n)
        yield from self.arrows()
        yield from self.shared()
        yield "}"

    def head(self) -> str:
        """The title, the workers' colours and what the other signs mean: a table in the HTML-like language."""
        signs = ["in a box: forward and backward of a micro-batch, parameters", "on an arrow: a micro-batch's values"]
        signs.append("thick: to another worker")
        if any(node.again for node in self.nodes):
            signs.append("dashed, remat: forward runs again (counted)")
        if any(len(node.partitions) > 1 for node in self.nodes):
            signs.append("double: like partitions in a row")
        if self.profile.ties:
            signs.append("dotted: a shared parameter")
        swatches = [self.swatch(worker) for worker in self.plan.workers]
        legend = ["".join(swatches[n : n + _SWATCHES]) for n in range(0, len(swatches), _SWATCHES)]
        rows = [_font(self.title(), "point-size", 15), _table(legend)]
        rows += [_font("; ".join(signs[n : n + 3]), "color", "#555555") for n in range(0, len(signs), 3)]
        return _table([f'<td align="left">{row}</td>' for row in rows])

    def title(self) -> str:
        plan = self.plan
        held = fmt.plural(len(plan.partitions), "partition")
        parts = [
            f"{_plain(plan.workload.name)}: {held} on {fmt.plural(len(plan.workers), 'worker')}",
            f"{plan.schedule}, {split_text(plan.workload.batch_size, plan.micro_batches)}",
        ]
        if plan.predicted is not None:
            parts.append(f"step {fmt.seconds(plan.predicted.step_s)}")
        return "   ·   ".join(parts)

    def swatch(self, worker: str) -> str:
        kind = _plain(self.profile.worker[worker].kind)
        colour = f'<td bgcolor="{self.colour[worker]}" width="24"></td>'
        return f'{colour}<td align="left">{escape(f"{worker}  {kind}")}</td>'

    def cluster(self, number: int) -> Iterator[str]:
        stage = self.plan.stages[number]
        shared = {each.worker: f" takes {each.micro_batches}" for each in stage.replicas}
        each = [f"{name} on {_plain(self.profile.worker[name].host)}{shared.get(name, '')}" for name in stage.workers]
        head = f"stage {number}   ·   {', '.join(each)}"
        if stage.in_flight is not None:
            head += f"   ·   {stage.in_flight} in flight"
        yield f"  subgraph cluster_stage_{number} {{"
        yield f"    label={_quoted(head)}; labeljust=l; labelloc=t; fontsize=12;"
        colour, tip = self.colour[stage.workers[0]], _quoted(", ".join(stage.workers))
        yield f'    style=rounded; penwidth=2.5; color="{colour}"; tooltip={tip};'
        yield from (f"    {self.box(node)}" for node in self.nodes if node.stage == number)
        yield "  }"

    def box(self, node: _Node) -> str:
        colour = self.colour[self.plan.stages[node.stage].workers[0]]
        names = [_plain(each) for each in node.partitions]
        look = ', style="filled,dashed", penwidth=2' if node.again else ""
        look += ", peripheries=2" if len(names) > 1 else ""
        label, tip = _quoted(fmt.ranges(names) + "\n" + self.figures(node)), _quoted(", ".join(names))
        fill = f'fillcolor="{colour}", fontcolor="{text_colour(colour)}"'
        return f"{node.name} [label={label}, {fill}{look}, tooltip={tip}];"

    def figures(self, node: _Node) -> str:
        """What a box costs: a micro-batch's forward and backward, with a recompute where there is one; parameters.

        Of several workers, on each.
        """
        took: dict[str, None] = {}
        for worker in self.plan.stages[node.stage].workers:
            costs = [self.cost.partition(name, worker, self.plan.micro_batch_size) for name in node.partitions]
            seconds = sum(
                each.forward_s + each.backward_s + (each.recompute_s if node.again else 0.0) for each in costs
            )
            took[fmt.seconds(seconds)] = None
        held = sum(self.profile.partition[name].parameter_bytes for name in node.partitions)
        return "  ·  ".join([" or ".join(took), fmt.size(held), *(["remat"] if node.again else [])])

    def arrows(self) -> Iterator[str]:
        """One arrow for all values between two boxes; thick where they go to another worker."""
        between: dict[tuple[_Node, _Node], dict[tuple[str, int], float]] = defaultdict(dict)
        for edge in self.profile.edges:
            source, target = self.holder[edge.source], self.holder[edge.target]
            if source is not target:
                size = edge.bytes_per_sample * self.plan.micro_batch_size + edge.fixed_bytes
                between[source, target][edge.source, edge.output] = size
        for (source, target), values in between.items():
            crosses = any(lane.workers[source.stage] != lane.workers[target.stage] for lane in self.lanes)
            look = 'penwidth=2.2, color="#222222"' if crosses else 'color="#888888", fontcolor="#555555"'
            label = fmt.size(sum(values.values())) + (f" in {len(values)} values" if len(values) > 1 else "")
            yield f"  {source.name} -> {target.name} [label={_quoted(label)}, {look}];"

    def shared(self) -> Iterator[str]:
        for tie in self.profile.ties:
            homes = dict.fromkeys(self.holder[name] for name in tie.partitions)
            label = _quoted(f"shared: {_plain(tie.parameter)}")
            for one, other in itertools.pairwise(homes):
                look = "dir=none, style=dotted, constraint=false, penwidth=1.8"
                yield f"  {one.name} -> {other.name} [{look}, label={label}];"


def _runs(profile: Profile, stage: Stage, *, every: bool) -> Iterator[tuple[str, ...]]:
    """The stage's boxes: partitions in a row that are alike, where they are three or more."""

    def likeness(name: str) -> tuple[str, float, bool]:
        part = profile.partition[name]
        return part.kind, part.parameter_bytes, name in stage.rematerialise

    for _, run in itertools.groupby(stage.partitions, likeness):
        names = tuple(run)
        if every or len(names) < _LEAST_RUN:
            yield from ((name,) for name in names)
        else:
            yield names


def _table(rows: list[str]) -> str:
    cells = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table border="0" cellborder="0" cellspacing="3" cellpadding="1">{cells}</table>'


def _font(text: str, attribute: str, value: object) -> str:
    return f'<font {attribute}="{value}">{escape(text)}</font>'


def _quoted(text: str) -> str:
    r"""A DOT string: `\`, `"` and `&` are escaped, a line break is `\n`."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return '"' + escaped.replace("\n", "\\n") + '"'


def _plain(name: str) -> str:
    r"""A name on one line: signs that cannot be printed as in Python, a line break as `\n`."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in name)


def worker_colour(number: int) -> str:
    """The colour of worker `number`, 0 or more, as #RRGGBB: people with any colour vision can tell them apart.

    The first eight are those of Okabe and Ito, Color Universal Design, 2008, black left out for grey; further ones are
    the same in lighter and darker shades. A colour is never the only sign: what is coloured also says its worker.
    """
    base, shade = _BASE[number % len(_BASE)], _SHADES[number // len(_BASE) % len(_SHADES)]
    end, share = (255, shade) if shade > 0 else (0, -shade)
    return "#" + "".join(f"{round(level + (end - level) * share):02X}" for level in bytes.fromhex(base[1:]))


def text_colour(colour: str) -> str:
    """Black or white, whichever contrasts more with a colour."""
    return max(_DARK, _LIGHT, key=lambda each: contrast(each, colour))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (W3C, WCAG 2.2, relative luminance)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [
        level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4
        for level in (each / 255 for each in bytes.fromhex(colour[1:]))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
