"""What is known of a model before its workload is written: how it is built, what it takes, gives, and is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


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
