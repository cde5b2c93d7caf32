"""What a partition's forward leaves in context variables, the environment and torch's default type."""

from __future__ import annotations

import contextvars
import os

import pytest
import torch
from cutting import of
from sweeps import sweep
from torch import nn
from workloads import WIDTH

from assigner.errors import MarkingError
from assigner.model.marking import partition_graph

STEP = contextvars.ContextVar[int]("step")
NEVER_SET = contextvars.ContextVar("step", default=0)  # of the same name
VARIABLE = "ASSIGNER_TEST_STEP"


def counts_in_a_context_variable() -> None:
    NEVER_SET.set(NEVER_SET.get() + 1)


def counts_in_the_environment() -> None:
    os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, "0")) + 1)


def changes_the_default_type() -> None:
    torch.set_default_dtype(torch.float16)


def sets_and_resets() -> None:
    STEP.reset(STEP.set(1))
    os.environ[VARIABLE] = "1"
    del os.environ[VARIABLE]


def compiles() -> None:
    os.environ["TRITON_TEST_FOLDER"] = "somewhere"


class Leaving(nn.Linear):
    """Does something beside."""

    def __init__(self, leaves) -> None:
        super().__init__(WIDTH, WIDTH)
        self.leaves = leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.leaves()
        return super().forward(x)


@pytest.mark.long
@pytest.mark.parametrize("place", sweep(["b", "c"], quick=["c"]))
@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        (counts_in_a_context_variable, "sets the context variable 'step'"),
        (counts_in_the_environment, f"sets the environment variable '{VARIABLE}'"),
        (changes_the_default_type, "sets torch's default type"),
        (sets_and_resets, ""),
        (compiles, ""),
    ],
)
def test_what_a_forward_leaves_around_it(leaves, words, place, monkeypatch):
    """It is refused in true words, of the last partition too, and all is as it was behind that."""
    monkeypatch.delenv("TRITON_TEST_FOLDER", raising=False)
    STEP.set(3)
    made = of(lambda s, x: s.c(s.b(s.a(x))), **{place: lambda: Leaving(leaves)})
    before = torch.get_default_dtype()
    if words:
        with pytest.raises(MarkingError, match=f"the forward of '{place}' {words}"):
            partition_graph(made)
    else:
        partition_graph(made)
    assert torch.get_default_dtype() == before
    assert NEVER_SET not in contextvars.copy_context()
    assert VARIABLE not in os.environ
    monkeypatch.delenv("TRITON_TEST_FOLDER", raising=False)
