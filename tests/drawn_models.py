"""Random small models in float64: chains and graphs of modules, written out as the source of a forward.

A seed gives the text of one class, `Model`, with a forward as a person would write it: skips over several modules,
branches and joins, tuples, dicts, None and plain values between modules, in-place operations, detached values, inputs
that are read in the middle, and glue between the modules. The text is what a failing test prints.
"""

from __future__ import annotations

import linecache
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import drawn_parts
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from kept import kept

from assigner.model.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 9

_CALLS = {
    "Plain": "{new} = {m}({a})",
    "Affine": "{new} = {m}({a})",
    "Normed": "{new} = {m}({a})",
    "InPlace": "{new} = {m}({a} * 0.9)",
    "Two": "{new}, {side} = {m}({a})",
    "Record": "made = {m}({a}, other={b}, scale=0.5)\n{new} = made['hidden'] if made['flag'] else {a}\n"
    "{side} = made['more'][0] * made['number']",
    "Gate": "{new} = {m}({a}, {b})",
    "Columns": "{new} = {m}({a})",
    "Halves": "{new} = {m}({a}).flatten(-2)",
    "Spread": "{new} = {m}({a}) + {b}",
    "Detached": "{new} = {m}({a}) + {b}",
    "Blocked": "{new} = {m}({a})",
    "Spare": "{new} = {m}({a})",
    "Sign": "{new}, sign = {m}({a})\n{side} = torch.where(sign, {b}, -{b})",
    "Choice": "{new} = {m2}({m}({a}))",
    "Shifted": "{new} = {m}({a})",
    "Through": "{side}, {new} = {m}({a})",
    "Scaled": "{new}, {side} = {m}({a})\n{side} = {b} * {side}",
    "Nothing": "_, {new} = {m}({a}, None)",
    "Body": "{new} = {m}({a})",
    "Unread": "{side} = {m}({a})\n{new} = {b} * 0.5",
    "Attention": "{new}, _ = {m}({a}, {b}, {b})",
    "Recurrent": "{new}, {side} = {m}({a})\n{side} = {b} + {side}.transpose(0, 1)",
}
_MADE = {
    "Nothing": "Nothing()",
    "Body": "Body(Normed({width}), Affine({width}))",
    "Unread": "Plain({width})",
    "Attention": "nn.MultiheadAttention({width}, 2, batch_first=True)",
    "Recurrent": "nn.GRU({width}, {width}, batch_first=True)",
}
_SEQUENCES = ("Attention", "Recurrent")
_TWICE = ("Plain", "Affine", "Normed", "Shifted", "Spare")
_GLUE = (
    "{new} = {a} + {b}",
    "{new} = {a} * torch.sigmoid({b})",
    "{new} = torch.where({a} > 0, {a}, {b})",
    "{new} = {a} - {a}.mean(-1, keepdim=True)",
    "{new} = torch.cat(({a}, {b}), -1).unflatten(-1, (2, -1)).sum(-2)",
    "left, right = {a}.chunk(2, -1)\n{new} = torch.cat((right, left), -1)",
    "{new} = {a}.clone()\n{new} += {b}",
    "{new} = {a} + 1\n{new}.mul_(0.5)",
    "{new} = {a}.detach() * 0.5 + {b}",
    "{new} = {a}.flip(-1) + self.bias",
    "{new} = {a} * torch.arange({a}.shape[-1], dtype=torch.float64).add_(1).div({a}.shape[-1])",
    "mask = torch.ones({a}.shape[-1], {a}.shape[-1], dtype=torch.float64)\nmask.tril_()\n{new} = {a} @ mask",
    "{new} = {a} + torch.zeros({a}.shape[0], *[1] * ({a}.dim() - 1), dtype=torch.float64)",
    "{new} = torch.zeros_like({a}) + {b} * {a}.amax(-1, keepdim=True)",
    "{new} = {a} + F.one_hot({b}.argmax(-1), {b}.shape[-1])",
    "{new} = {g}({a})",
)


@dataclass(frozen=True)
class DrawnModel:
    """A model of one seed.

    Args:
        workload: With marks, loss and optimizer.
        text: The model's source.
    """

    workload: Workload
    text: str


class _Draft:
    """The source of a model while it is written."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.width, self.length = rng.choice([4, 6, 8]), rng.choice([0, 0, 3, 5])  # length 0: rows of one vector
        self.tokens = self.length > 0 and rng.random() < 0.5
        self.parts: list[str] = []
        self.init: list[str] = []
        self.forward: list[str] = []
        self.values: list[str] = []
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def module(self, made: str, *, marked: bool = True) -> str:
        """A new submodule; gives how the forward names it."""
        if marked:
            self.parts.append(made)
        name = f"p{len(self.parts) - 1}" if marked else f"g{len(self.init)}"
        if made.startswith("Body"):
            name = name.replace("p", "body")
        self.init.append(f"self.{name} = {made}")
        return f"self.{name}"

    def pick(self) -> str:
        """A value to read, more often a late one."""
        late = self.values[-2:]
        return self.rng.choice(late if self.rng.random() < 0.6 else self.values)

    def call(self, kind: str) -> None:
        """A call of a new module."""
        a, b, new, side = self.pick(), self.pick(), self.name(), self.name()
        m = self.module(_MADE.get(kind, "{kind}({width})").format(kind=kind, width=self.width))
        m2 = self.module(f"nn.Embedding({self.width}, {self.width})") if kind == "Choice" else ""
        if kind == "Record" and self.rng.random() < 0.5:
            b = "None"
        line = _CALLS[kind].format(new=new, side=side, a=a, b=b, m=m, m2=m2)
        if kind in _TWICE and self.rng.random() < 0.15:
            line = f"{new} = {m}({m}({a}))"
        self.forward += line.splitlines()
        if side in line and kind != "Unread" and self.rng.random() < 0.6:
            self.values.insert(-1, side)
        if kind == "Affine" and self.rng.random() < 0.4:  # straight into a module that writes to it
            self.forward.append(f"{side} = {self.module(f'InPlace({self.width})')}({new})")
            new = side
        self.values.append(new)

    def glue(self) -> None:
        """A line between the modules."""
        line, new = self.rng.choice(_GLUE), self.name()
        if "self.bias" in line and not any("self.bias" in each for each in self.init):
            self.init.append(f"self.bias = nn.Parameter(torch.arange({self.width}) / 10)")
        made = self.module(self.rng.choice([f"nn.LayerNorm({self.width})", "nn.ReLU(inplace=False)"]), marked=False) \
            if "{g}" in line else ""  # fmt: skip
        self.forward += line.format(new=new, a=self.pick(), b=self.pick(), g=made).splitlines()
        self.values.append(new)

    def state(self) -> None:
        """Shared weights, and some that are frozen."""
        plain = [n for n, made in enumerate(self.parts) if made.startswith(("Plain", "Affine", "Normed", "Gate"))]
        tied = set()
        if len(plain) > 1 and self.rng.random() < 0.35:
            first, second = sorted(self.rng.sample(plain, 2))
            tied = {first, second}
            self.init.append(f"self.p{second}.inner.weight = self.p{first}.inner.weight")
        for n in range(len(self.parts) - 1):
            if n not in tied and not (n == 0 and self.tokens) and self.rng.random() < 0.12:
                name = "body" if self.parts[n].startswith("Body") else "p"
                self.init.append(f"self.{name}{n}.requires_grad_(False)")


_HEAD = {
    "tensor": "return {m}({a})",
    "tuple": "return {m}({a}), {b}",
    "dict": "return {{'score': {m}({a}), 'aside': {b}, 'nothing': None, 'number': 3, 'spare': {c}}}",
}


def _draw(rng: random.Random) -> tuple[_Draft, str, str]:
    """A draft, the kind of its inputs and the kind of its output."""
    draft = _Draft(rng)
    inputs = rng.choice(["x", "pair", "dict"])
    draft.values = ["x"]
    if draft.tokens:
        draft.values = [draft.name()]
        draft.forward.append(f"{draft.values[0]} = {draft.module(f'nn.Embedding({TOKENS}, {draft.width})')}(x)")
    read_at = rng.randrange(3)
    for n in range(rng.randint(2, 5)):
        draft.call(rng.choice([kind for kind in _CALLS if draft.length or kind not in _SEQUENCES]))
        if n == read_at and inputs != "x":
            draft.values.insert(-1, "y")
        while rng.random() < 0.45:
            draft.glue()
    if inputs == "dict":
        draft.forward.append(f"{draft.values[-1]} = {draft.values[-1]} * factor + level")
    output = rng.choice(list(_HEAD))
    made = TOKENS if draft.tokens else 1
    head = draft.module(f"nn.Linear({draft.width}, {made}, bias={not draft.tokens})")
    joined = " + ".join(dict.fromkeys([draft.values[-1], draft.pick()]))
    draft.forward.append(_HEAD[output].format(m=head, a=joined, b=draft.pick(), c=draft.pick()))
    if draft.tokens and rng.random() < 0.6:
        draft.init.append(f"{head}.weight = self.p0.weight")
    draft.state()
    return draft, inputs, output


def _write(draft: _Draft, inputs: str) -> str:
    given = {"x": "x", "pair": "x, y", "dict": "x, *, y, level, factor=0.5, nothing=None"}[inputs]
    lines = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in draft.init),
        "",
        f"    def forward(self, {given}):",
        *(f"        {line}" for line in draft.forward),
    ]
    return "\n".join(lines) + "\n"


def _batch(draft: _Draft, inputs: str, output: str) -> Callable[[int, torch.Generator], Any]:
    length = (draft.length,) if draft.length else ()

    def batch(rows: int, generator: torch.Generator) -> Any:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

        x = numbers(*length, draft.width)
        if draft.tokens:
            x = torch.randint(TOKENS, (rows, *length), generator=generator)
        y = numbers(*length, draft.width)
        level = torch.tensor(0.25, dtype=torch.float64)  # no rows: goes whole to every micro-batch
        wanted = (x + 1) % TOKENS if draft.tokens else numbers(*length, 1)
        given = {"x": x, "pair": (x, y), "dict": {"x": x, "y": y, "level": level, "factor": 0.5, "nothing": None}}
        return given[inputs], {"wanted": wanted, "bonus": numbers(), "name": "drawn"} if output == "dict" else wanted

    return batch


def _loss(draft: _Draft, output: str, reduction: str) -> Callable[[Any, Any], torch.Tensor]:
    def main(score: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if draft.tokens:
            return F.cross_entropy(score.flatten(0, 1), wanted.flatten(), reduction=reduction)
        return F.mse_loss(score, wanted, reduction=reduction)

    def loss(made: Any, targets: Any) -> torch.Tensor:
        reduce = torch.mean if reduction == "mean" else torch.sum
        if output == "tensor":
            return main(made, targets)
        if output == "tuple":
            return main(made[0], targets) + 0.3 * reduce(made[1] ** 2)
        aside = made["aside"].flatten(1).sum(1) * targets["bonus"] * made["number"]
        return main(made["score"], targets["wanted"]) + 0.1 * reduce(aside)

    return loss


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "decay": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@kept
def drawn_model(seed: int) -> DrawnModel:
    """The model of a seed, the same in every process."""
    rng = random.Random(f"model {seed}")
    draft, inputs, output = _draw(rng)
    reduction, optimizer = rng.choice(["mean", "sum"]), rng.choice(list(_OPTIMIZERS))
    text, file = _write(draft, inputs), f"<drawn model {seed}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    space: dict[str, Any] = dict(vars(drawn_parts))
    exec(compile(text, file, "exec"), space)
    workload = Workload(
        lambda: space["Model"]().double(), _batch(draft, inputs, output), _loss(draft, output, reduction),
        _OPTIMIZERS[optimizer], 8, marks=("p*", "body*.part_*") if "Body(" in text else ("p*",),
        seed=seed, reduction=reduction, name=f"drawn {seed}",
    )  # fmt: skip
    return DrawnModel(workload, f"{text}\n# loss: {reduction} over {output}; optimizer: {optimizer}\n")
