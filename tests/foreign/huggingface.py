"""Tiny models of transformers from their configs, trained on the loss that they work out from `labels`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from workloads import sgd

from assigner.model.workload import Workload

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import that reads it
import transformers
from foreign.case import case

if TYPE_CHECKING:
    from collections.abc import Callable

transformers.logging.set_verbosity_error()

WORDS = 40
LENGTH = 6
TOLERANCE = 1e-5
"""Their losses, and parts of some, are in float32 whatever the model's type."""


def ids(rows: int, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    """Tokens, none of them special."""
    return torch.randint(4, WORDS, (rows, length), generator=generator)


def causal(rows: int, generator: torch.Generator) -> Any:
    """Inputs as labels, one tensor under two names, as the scripts of transformers have it."""
    x = ids(rows, generator)
    return {"input_ids": x, "labels": x}, None


def masked(rows: int, generator: torch.Generator) -> Any:
    """Two tokens of each text are to be found; the last one is padding."""
    x = ids(rows, generator)
    labels = torch.full_like(x, -100)
    labels[:, 1:3] = x[:, 1:3]
    shown = x.clone()
    shown[:, 1:3] = 3
    attended = torch.ones_like(x)
    attended[:, -1] = 0
    return {"input_ids": shown, "attention_mask": attended, "labels": labels}, None


def translated(rows: int, generator: torch.Generator) -> Any:
    """A text and its translation, whose last token does not count."""
    labels = ids(rows, generator, 5)
    labels[:, -1] = -100
    return {"input_ids": ids(rows, generator), "labels": labels}, None


def classified(rows: int, generator: torch.Generator) -> Any:
    """A text and its class."""
    return {"input_ids": ids(rows, generator), "labels": torch.randint(3, (rows,), generator=generator)}, None


def tagged(rows: int, generator: torch.Generator) -> Any:
    """A text and a class for each token."""
    x = ids(rows, generator)
    return {"input_ids": x, "labels": x % 3}, None


def answered(rows: int, generator: torch.Generator) -> Any:
    """A text with the first and last token of its answer."""
    x = ids(rows, generator)
    return {"input_ids": x, "start_positions": x[:, 0] % LENGTH, "end_positions": x[:, 1] % LENGTH}, None


def pictures(rows: int, generator: torch.Generator) -> Any:
    """Images with their classes."""
    pixels = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(3, (rows,), generator=generator)}, None


def hugging_face(
    name: str,
    kind: str,
    marks: str,
    batch: Any,
    *,
    refusal: str = "",
    inherent: bool = False,
    random: bool = False,
    usual: bool = True,
    loss: Callable[[Any, Any], torch.Tensor] = lambda output, _: output.loss,
    prepare: Callable[[Any], object] = lambda _: None,
    **config: Any,
) -> None:
    """Add a case.

    Args:
        name: Comes after "transformers: ".
        kind: The model's class, as `GPT2LMHeadModel`.
        marks: Name patterns, with blanks between.
        batch: Makes batches whose inputs have the labels.
        refusal: See `Case`.
        inherent: See `Case`.
        random: See `Case`.
        usual: See `Case`.
        loss: Of the outputs.
        prepare: What the builder does with the model.
        config: What its config takes.
    """

    def build() -> Any:
        cls = getattr(transformers, kind)
        model = cls._from_config(cls.config_class(**config), dtype=torch.float64)
        prepare(model)
        return model

    def make() -> Workload:
        return Workload(build, batch, loss, sgd, 8, marks=tuple(marks.split()), seed=5, name="test")

    make.__module__ = sys._getframe(1).f_globals["__name__"]  # the module that calls this
    case(f"transformers: {name}", refusal=refusal, inherent=inherent, random=random, tolerance=TOLERANCE, usual=usual)(
        make
    )
