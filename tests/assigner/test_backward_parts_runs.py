"""Training with backwards in two parts is training: models of all habits, in one process, against whole backwards."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from changing_models import Assigned, ByData, Clamped, InPlace, made_of, spectral
from drawn_combinations import in_parts
from sweeps import sweep
from torch import nn
from training_cases import CASES
from workloads import (
    WIDTH,
    Reference,
    diamond,
    language,
    make_plan,
    normalised,
    pipeline_of,
    recurrent,
    skips,
    towers,
    workload,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import Workload
    from assigner.formats.plan import Plan


MODELS: dict[str, Callable[[], Workload]] = {
    "tied, with dropout": lambda: language(dropout=0.2, tied=True),
    "skips": skips,
    "towers": towers,
    "diamond": diamond,
    "recurrent": recurrent,
    "BatchNorm": lambda: workload(normalised),
    "frozen": lambda: made_of(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
    "spectral norm": lambda: made_of(spectral),
    "a buffer written in place": lambda: made_of(InPlace),
    "a buffer written by data": lambda: made_of(ByData),
    "a buffer assigned": lambda: made_of(Assigned),
    "weights that are clamped": lambda: made_of(Clamped),
}


def trained(made: Workload, plan: Any, remat: Any) -> dict[str, torch.Tensor]:
    """The state after two steps, the first of which adds up the gradients of two batches."""
    with pipeline_of(made, plan, remat=remat) as pipeline:
        for n, update in enumerate((False, True, True)):
            pipeline.step(made.make_batch(made.batch_size, n), update=update)
        return {name: tensor.detach().clone() for name, tensor in pipeline.state_dict().items()}


HOOKED: list[torch.Tensor] = []
RETAINED: list[torch.Tensor] = []


class Observed(nn.Module):
    """Its user looks at the gradient of what a product gives: in a hook, and as torch retains it."""

    def __init__(self, *, by_hook: bool) -> None:
        super().__init__()
        self.layers, self.by_hook = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]), by_hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.by_hook:
                x.register_hook(HOOKED.append)
            else:
                x.retain_grad()
                RETAINED.append(x)
            x = x.tanh()
        return x


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("by_hook", [True, False])
def test_a_gradient_that_the_user_looks_at_is_seen_once(by_hook, remat):
    """With both parts of a backward a product runs twice; what it gives has its gradient once."""
    found = []
    made = made_of(lambda: Observed(by_hook=by_hook))
    plan = make_plan(made)
    for each in (plan, in_parts(plan, random.Random(3))):
        HOOKED.clear()
        RETAINED.clear()
        trained(made, each, remat)
        seen = HOOKED if by_hook else [x.grad for x in RETAINED if x.grad is not None]
        found.append((len(seen), float(sum(each.abs().sum() for each in seen))))
    (count, total), (count_in_parts, total_in_parts) = found
    assert count == count_in_parts == 3 * 3 * plan.micro_batches
    assert total == pytest.approx(total_in_parts, rel=1e-12)


def split(made: Workload) -> Plan:
    """The plan of its tests with backwards in two parts."""
    return in_parts(make_plan(made), random.Random(made.name))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scaling", "sparse", "clipping", "accumulation"])
def test_scaled_and_clipped_gradients_are_the_plain_models(case):
    """Updates that overflow are skipped where torch's GradScaler skips them; norms, clipped gradients and weights."""
    worst = CASES[case](split)
    assert worst
    assert max(worst.values()) < 1e-10


@pytest.mark.long
def test_compiled_partitions_train_as_the_plain_model():
    """Their backwards are one node each, which is all input part."""
    torch._dynamo.reset()
    made = replace(skips(), compile={"backend": "aot_eager"})
    reference = Reference(made)
    with pipeline_of(made, split(skips()), remat="except_last") as pipeline:
        for n, rows in enumerate((8, 5, 8)):
            batch = made.make_batch(rows, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-10)
        assert reference.distance(pipeline.named_parameters()) < 1e-10
    torch._dynamo.reset()


REMAT = ("never", "always", "except_last")
IN_TURN = list(zip(MODELS, itertools.cycle(REMAT), strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "remat"), sweep(itertools.product(MODELS, REMAT), quick=IN_TURN))
def test_parts_train_as_whole_backwards_do(name, remat):
    made = MODELS[name]()
    plan = make_plan(made)
    whole = trained(made, plan, remat)
    parts = trained(made, in_parts(plan, random.Random(name)), remat)
    assert whole.keys() == parts.keys()
    for key, tensor in whole.items():
        exact = tensor.dtype == torch.float64
        assert torch.allclose(tensor, parts[key], rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-6), key
