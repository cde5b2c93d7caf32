"""What is known of a model before its workload is written, and the file that says it: valid, formatted Python.

Its comments say what is whose to change.

`EXAMPLE` is what is written for nobody's model in particular: a small language model, complete and runnable.
"""

from __future__ import annotations

import builtins
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True)
class Code:
    """How the model is built.

    Args:
        imports: Lines of other packages, `from torchvision.models import resnet50`.
        local: Lines of the user's own files, `from net import Net`.
        definitions: Text of classes above `model()`; empty: none.
        body: Lines of `model()`, the last of which returns the model.
        files: Those that define it; none of them is to be written to.
    """

    imports: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    definitions: str = ""
    body: tuple[str, ...] = ()
    files: frozenset[Path] = frozenset()


@dataclass(frozen=True)
class DraftInput:
    """One tensor that the model takes.

    Args:
        name: The argument of its forward.
        shape: Without the rows.
        tokens: Whole numbers below this; None: it holds numbers of any size.
    """

    name: str
    shape: tuple[int, ...]
    tokens: int | None = None


@dataclass(frozen=True)
class DraftOutput:
    """The tensor that the loss is computed from.

    Args:
        access: What stands behind `outputs` to get it: empty, `.logits`, `[0]`.
        shape: Without the rows.
    """

    access: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MarkPattern:
    """A name pattern of partitions, and how many modules it names."""

    pattern: str
    count: int


@dataclass(frozen=True)
class Draft:
    """A workload to be written.

    Args:
        name: Of the model, for tables.
        made_by: The command line that asks for the file.
        code: How the model is built.
        takes: Its tensors; empty: not known.
        keywords: They are given by name, as several always are.
        gives: Its output; None: not known.
        marks: Proposed partitions.
        children: It is an nn.Sequential, whose children are its partitions without a mark.
        data: Lines of `batch` that make tokens `(rows, length + 1)`; empty: drawn at random.
        gaps: What the user has to fill in, each a sentence.
        notes: What the file leaves out though it works, each a sentence.
    """

    name: str
    made_by: str
    code: Code
    takes: tuple[DraftInput, ...] = ()
    keywords: bool = False
    gives: DraftOutput | None = None
    marks: tuple[MarkPattern, ...] = ()
    children: bool = False
    data: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def task(self) -> Literal["next token", "classes", "numbers"]:
        """What the made-up targets are: the next token of each place, one class for each row, or numbers."""
        if self.gives is not None and len(self.takes) == 1:
            (given,) = self.takes
            if given.tokens is not None and self.gives.shape == (*given.shape, given.tokens):
                return "next token"
        return "classes" if self.gives is None or len(self.gives.shape) == 1 < self.gives.shape[0] else "numbers"


_NET = '''\
VOCABULARY, LENGTH, WIDTH, BLOCKS = 256, 64, 128, 8


class Net(nn.Module):
    """Tokens (rows, length) -> scores of the next token (rows, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embedding, blocks that look back and not ahead, head."""
        length = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        x = self.embed(tokens) + self.position[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)
'''

EXAMPLE = Draft(
    name="net",
    made_by="assigner init",
    code=Code(definitions=_NET, body=("return Net()",)),
    takes=(DraftInput("tokens", (64,), 256),),
    gives=DraftOutput("", (64, 256)),
    data=(
        "# Something to learn: counting from anywhere, in steps of 1 to 8.",
        "start = torch.randint(VOCABULARY, (rows, 1), generator=generator)",
        "stride = torch.randint(1, 9, (rows, 1), generator=generator)",
        "tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY",
    ),
    marks=(MarkPattern("embed", 1), MarkPattern("blocks.*", 8), MarkPattern("head", 1)),
)


_WIDTH = 80

RESERVED = frozenset(
    ("Any", "Path", "Tensor", "argparse", "assigner", "batch", "config", "contextlib", "given", "loss", "model", "nn",
     "optimizer", "parser", "time", "torch", "train", "workload", *dir(builtins))
)  # fmt: skip
"""Names that mean something in every workload file: what is imported there under one of them has to have another."""


def workload_text(draft: Draft, file: str = "workload.py") -> str:
    """The file.

    Args:
        draft: What is known of the model.
        file: Its name, for the commands in its head.
    """
    call = "model(**inputs)" if draft.keywords else "model(inputs)"
    access = draft.gives.access if draft.gives is not None else ""
    flat, targets, name = {
        "next token": (".flatten(0, 1)", "targets.flatten()", "cross_entropy"),
        "classes": ("", "targets", "cross_entropy"),
        "numbers": ("", "targets", "mse_loss"),
    }[draft.task]
    shape = "not known yet; here (rows, classes)" if draft.gives is None else f"({_sizes(draft.gives.shape)})"
    definitions = f"\n\n{draft.code.definitions.rstrip()}" if draft.code.definitions else ""
    return f'''\
"""{_in_docstring(_head(draft, file))}
"""

{_imports(draft)}{definitions}


def model() -> nn.Module:
    """The model: the same one on each rank, which keeps its own part of it."""
{_indented(draft.code.body, 4)}


def batch(rows: int, generator: torch.Generator) -> tuple[Any, Any]:
    """Inputs and targets of `rows` rows; the rows are every tensor's first dimension.

    The model is called as `{call}`. These are made up: put your data here,
    and choose rows with the generator, which is alike on every rank.
    """
{_indented(_batch_lines(draft), 4)}


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """The mean over the rows; `outputs` is what the model returned."""
    values = outputs{access}  # {shape}
    return nn.functional.{name}(values{flat}, {targets})


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Any torch optimizer; an argument called `named_parameters` gets names as well."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def workload() -> assigner.Workload:
    """What `assigner profile` measures and a plan trains."""
    return assigner.Workload(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        batch_size=16,  # rows in a step; a plan cuts them into micro-batches
        name={_string(draft.name)},
{_indented(_marks(draft), 8)}
        # autocast="bfloat16",  # forward and loss in a smaller type
        # compile=True,  # each partition under torch.compile
    )


def train(steps: int, trace: Path | None = None, *, force: bool = False) -> None:
    """The training loop, on every rank of `assigner run plan.json -- {_in_docstring(shlex.quote(file))}`."""
    plan = assigner.load_plan()
    work = workload()
    with (
        assigner.Pipeline(work, plan) as pipeline,
        pipeline.trace(trace, force=force) if trace else contextlib.nullcontext(),
    ):
        for step in range(steps):
            start = time.perf_counter()
            value = pipeline.step(work.make_batch(plan.workload.batch_size, seed=step))
            ms = 1e3 * (time.perf_counter() - start)
            if pipeline.rank == 0:
                print(f"step {{step}}: {{ms:.1f}} ms, loss {{value:.4f}}", flush=True)
        # pipeline.save("checkpoint"), and pipeline.load("checkpoint") under any plan


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train under $ASSIGNER_PLAN.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", type=Path, help="write what the ranks do here")
    parser.add_argument("--force", action="store_true", help="replace that file")
    given = parser.parse_args()
    if given.trace and given.trace.exists() and not given.force:
        parser.error(f"--trace: {{given.trace}} exists; --force replaces it")
    train(**vars(given))
'''


def _head(draft: Draft, file: str) -> str:
    """The file's docstring, with what is left to the user, and what is left out."""
    made_by = f"Made by `{draft.made_by}`, to be changed: first `batch` and `loss`, which are made up."
    text = [
        f"A workload for assigner: {draft.name} with its data, loss and optimizer.",
        "",
        f"    assigner profile {shlex.quote(f'{file}:workload')} -o profile.json --workers 2",
        "    assigner solve profile.json -o plan.json",
        f"    assigner run plan.json -- {shlex.quote(file)}",
        "",
        *textwrap.wrap(made_by, _WIDTH, break_long_words=False),
    ]
    for title, texts in (("Before it works:", draft.gaps), ("Left out:", draft.notes)):
        lines = (textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ") for text in texts)
        text += ["", title, "", *(line for each in lines for line in each)] if texts else []
    return "\n".join(text)


def _in_docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', r"\"\"\"")


def _indented(lines: Iterable[str], width: int) -> str:
    return "\n".join(" " * width + line for line in lines)


def _imports(draft: Draft) -> str:
    straight = ["import assigner", "import torch"]
    named = sorted(["from torch import Tensor, nn", *draft.code.imports], key=lambda line: line.split()[1].casefold())
    own = ["import argparse", "import contextlib", "import time", "from pathlib import Path", "from typing import Any"]
    blocks = ["\n".join(lines) for lines in (own, [*straight, *named], draft.code.local)]
    return "\n\n".join(block for block in blocks if block)


def _batch_lines(draft: Draft) -> Iterator[str]:
    if not draft.takes:
        yield "# What the model takes is not known yet; say, 64 numbers, and 10 classes to tell:"
        yield "inputs = torch.randn(rows, 64, generator=generator)"
        yield "targets = torch.randint(10, (rows,), generator=generator)"
        yield "return inputs, targets"
        return
    if draft.task == "next token":
        (tokens,) = draft.takes
        yield from draft.data or (
            f"length = {tokens.shape[0]}",
            f"tokens = torch.randint({tokens.tokens}, (rows, length + 1), generator=generator)",
        )
        inputs = f'{{"{tokens.name}": tokens[:, :-1]}}' if draft.keywords else "tokens[:, :-1]"
        yield f"return {inputs}, tokens[:, 1:]"
        return
    if draft.keywords:
        yield "inputs = {"
        yield from (f'    "{tensor.name}": {_made(tensor)},' for tensor in draft.takes)
        yield "}"
    else:
        yield f"inputs = {_made(draft.takes[0])}"
    if draft.task == "classes":
        classes = draft.gives.shape[0] if draft.gives is not None else 10
        yield f"targets = torch.randint({classes}, (rows,), generator=generator)"
    else:
        assert draft.gives is not None
        yield f"targets = torch.randn({_sizes(draft.gives.shape)}, generator=generator)"
    yield "return inputs, targets"


def _made(tensor: DraftInput) -> str:
    if tensor.tokens is not None:
        sizes = _sizes(tensor.shape) + ("" if tensor.shape else ",")
        return f"torch.randint({tensor.tokens}, ({sizes}), generator=generator)"
    return f"torch.randn({_sizes(tensor.shape)}, generator=generator)"


def _sizes(shape: tuple[int, ...]) -> str:
    return ", ".join(["rows", *map(str, shape)])


def _marks(draft: Draft) -> Iterator[str]:
    """The partitions, one pattern a line, and what else could be said of them."""
    if draft.children:
        yield "# The partitions: the children of the nn.Sequential; marks=(...) names others."
        return
    if not draft.marks:
        yield "# The partitions: name patterns of submodules, where `*` stops at a dot."
        yield '# marks=("blocks.*", "head"),'
        return
    yield "# The partitions: name patterns of submodules, each placed as a whole; what is"
    yield "# in none goes with a neighbour. assigner.partition(module) does the same."
    if len(draft.marks) == 1:
        (mark,) = draft.marks
        yield f"marks=({_string(mark.pattern)},),{_count(mark)}"
        return
    yield "marks=("
    yield from (f"    {_string(mark.pattern)},{_count(mark)}" for mark in draft.marks)
    yield "),"


def _count(mark: MarkPattern) -> str:
    return f"  # {mark.count} modules" if mark.count > 1 else ""


def _string(text: str) -> str:
    """A string as a formatter would leave it: in double quotes, unless it has some itself."""
    return repr(text) if '"' in text else '"' + repr(f"'{text}")[2:]
