"""Training loops on a pipeline beside the same loops in plain PyTorch, for any placement of the partitions.

A case takes a `Place`, which makes the plan of a workload, and gives the largest differences that it found on this rank
(and numbers that all ranks must agree on). tests/assigner/test_training.py runs the cases in one process with several
stages, tests/runs/training.py on three ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from kept import kept
from mixed_precision import Mixed, make_workload
from torch import nn
from training_models import lookups, shared
from training_optimizers import OPTIMIZERS, SCHEDULERS, no_decay_by_name
from workloads import WIDTH, Reference, captured, graph_of, language, tokens, workload

from assigner import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.formats.plan import Plan
    from assigner.model.workload import Workload

    Place = Callable[[Workload], Plan]

Found = dict[str, float]


def differences(pipeline: Pipeline, reference: Reference) -> Found:
    """Between weights, between gradients (also which there are), between the groups' settings."""
    gradients = pipeline.gradients()
    named = dict(reference.model.named_parameters())
    wanted = {name for name, _ in pipeline.named_parameters() if named[name].grad is not None}
    return {
        "weights": reference.distance(pipeline.named_parameters()),
        "gradients": reference.gradient_distance(gradients),
        "parameters with a gradient": float(len(wanted ^ gradients.keys())),
        "settings": float(settings(pipeline.optimizer) != settings(reference.optimizer)),
    }


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' settings."""
    hidden = ("params", "param_names")
    return [{key: value for key, value in group.items() if key not in hidden} for group in optimizer.param_groups]


def larger(worst: Found, found: Found) -> None:
    """Keep the larger of each figure; what is no number is the largest."""
    for key, value in found.items():
        worst[key] = max(worst.get(key, 0.0), math.inf if math.isnan(value) else value)


PARTED = (
    "SGD foreach", "AdamW fused", "AdamW with a tensor for its rate", "AdamW of named pairs", "Adafactor",
    "matrices apart", "groups by name", "groups by shape",
)  # fmt: skip
"""Optimizers for which it counts that a rank has a part of the parameters: groups, lists of tensors, what they take."""


def optimizers(place: Place, names: Iterable[str] = OPTIMIZERS) -> Found:
    """Three steps with each optimizer."""
    worst: Found = {}
    base = language()
    for name in names:
        build = OPTIMIZERS[name]
        made = replace(base, optimizer=build)
        reference = Reference(made)
        with Pipeline(made, place(base), graph=graph_of(base)) as pipeline:
            for n in range(3):
                batch = made.make_batch(8, n)
                larger(worst, {f"{name}: loss": abs(pipeline.step(batch) - reference.step(batch))})
            larger(worst, {f"{name}: {key}": value for key, value in differences(pipeline, reference).items()})
    return worst


def schedulers(place: Place, *, in_turn: bool = False) -> Found:
    """Ten steps with each scheduler: with updates in the step, and as a loop of one's own; or these in turn."""
    worst: Found = {}
    base = language()
    made = replace(base, optimizer=no_decay_by_name)
    for number, (name, build) in enumerate(SCHEDULERS.items()):
        for update in (number % 2 == 0,) if in_turn else (True, False):
            reference = Reference(made)
            with Pipeline(made, place(base), graph=graph_of(base)) as pipeline:
                mine, other = build(pipeline.optimizer), build(reference.optimizer)
                for n in range(10):
                    batch = made.make_batch(8, n)
                    loss, expected = pipeline.step(batch, update=update), reference.step(batch)
                    if not update:
                        pipeline.optimizer.step()
                    for scheduler, seen in ((mine, loss), (other, expected)):
                        scheduler.step(*([round(seen, 6)] if name == "ReduceLROnPlateau" else []))
                    if not update:
                        larger(worst, {f"{name}: {key}": v for key, v in differences(pipeline, reference).items()})
                        pipeline.optimizer.zero_grad(set_to_none=n % 2 == 0)
                    larger(worst, {f"{name}: loss": abs(loss - expected)})
                larger(worst, {f"{name}: weights": reference.distance(pipeline.named_parameters())})
                larger(
                    worst, {f"{name}: settings": float(settings(pipeline.optimizer) != settings(reference.optimizer))}
                )
    return worst


def clipping(place: Place) -> Found:
    """Norms of several kinds, that of shared weights once, and the clipped gradients."""
    worst: Found = {}
    made = language()
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        reference = Reference(made)
        with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
            for n, max_norm in enumerate((1e-3, 0.5, 1e6)):
                batch = made.make_batch(7, n)
                pipeline.step(batch, update=False)
                reference.optimizer.zero_grad()
                reference.loss(batch).backward()
                expected = nn.utils.clip_grad_norm_(reference.model.parameters(), max_norm, norm_type)
                norm = pipeline.clip_grad_norm_(max_norm, norm_type)
                larger(worst, {f"norm {norm_type}": abs(norm - float(expected))})
                larger(worst, differences(pipeline, reference))
                pipeline.optimizer.step()
                pipeline.optimizer.zero_grad()
                reference.optimizer.step()
            pipeline.step(batch, update=False)
            reference.optimizer.zero_grad()
            reference.loss(batch).backward()
            nn.utils.clip_grad_value_(reference.model.parameters(), 1e-4)
            pipeline.clip_grad_value_(1e-4)
            larger(worst, differences(pipeline, reference))
            pipeline.optimizer.zero_grad()
            pipeline.step(batch, max_norm=0.1)
            reference.optimizer.zero_grad()
            reference.loss(batch).backward()
            nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
            reference.optimizer.step()
            larger(worst, differences(pipeline, reference))
    return worst


PARTS = {
    "tokens": (1e-3, r"tokens\..*"),
    ("blocks.?", "**.bias"): (0.2, r"blocks\..*|.*\.bias"),
    "head.*": (0.05, r"head\..*"),
}
"""Names, and what the norm of what fits them is clipped to, and how they fit: head's weight is that of tokens, too."""


def clipping_of_parts(place: Place) -> Found:
    """Parts of the model, each by its own norm, in as many steps as are looked at for norms of one rank."""
    worst: Found = {}
    made = language()
    reference = Reference(made)
    named = list(reference.model.named_parameters(remove_duplicate=False))
    with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
        for n in range(6):
            batch = made.make_batch(7, n)
            pipeline.step(batch, update=False)
            reference.optimizer.zero_grad()
            reference.loss(batch).backward()
            for names, (limit, fitting) in PARTS.items():
                some = {id(p): p for name, p in named if re.fullmatch(fitting, name)}
                expected = nn.utils.clip_grad_norm_(some.values(), limit)
                larger(worst, {f"norm of {names}": abs(pipeline.clip_grad_norm_(limit, names=names) - float(expected))})
            larger(worst, differences(pipeline, reference))
            mine, whole = ({k: (p.detach() * p.grad).sum() for k, p in each.named_parameters() if p.grad is not None}
                           for each in (pipeline, reference.model))  # fmt: skip
            larger(worst, {"product": abs(pipeline.sum_over_parameters(mine) - float(sum(whole.values())))})
            pipeline.optimizer.step()
            pipeline.optimizer.zero_grad()
            reference.optimizer.step()
    return worst


IGNORED = -100


def some_tokens(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of which a random part is ignored: nearly all of them in the first rows, none in the last."""
    ids, targets = tokens(rows, generator)
    share = torch.linspace(0.95, 0.0, rows).unsqueeze(1)
    return ids, targets.masked_fill(torch.rand(targets.shape, generator=generator) < share, IGNORED)


def counted(_: Any, targets: torch.Tensor) -> torch.Tensor:
    """How many tokens count."""
    return (targets != IGNORED).sum()


def masked() -> Workload:
    """`language` in which some targets are ignored, and micro-batches count by the others."""
    return replace(language(), batch=some_tokens, weight=counted)


def weights(place: Place) -> Found:
    """The mean over tokens, with micro-batches that hold few of them or none."""
    worst: Found = {}
    made = masked()
    reference = Reference(made)
    with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
        for n, rows in enumerate((8, 7, 3, 8)):
            ids, targets = made.make_batch(rows, n)
            if n > 1:
                targets = targets.clone()
                targets[: 2 if n == 2 else 5] = IGNORED  # the loss of a whole micro-batch is 0 / 0
            larger(worst, {"loss": abs(pipeline.step((ids, targets)) - reference.step((ids, targets)))})
            larger(worst, differences(pipeline, reference))
    return worst


def accumulation(place: Place) -> Found:
    """Gradients add up until they are dropped, and `scale` makes a mean of several batches of them."""
    worst: Found = {}
    made = masked()
    reference = Reference(made)
    with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
        batches = [made.make_batch(rows, rows) for rows in (8, 5, 3)]
        total = sum(int(counted(*batch)) for batch in batches)
        for batch in batches:
            share = int(counted(*batch)) / total
            loss = pipeline.step(batch, update=False, scale=share)
            expected = reference.loss(batch)
            (expected * share).backward()
            larger(worst, {"loss": abs(loss - expected.item()), **differences(pipeline, reference)})
        for _ in range(2):  # an update drops nothing: the second one is made with the first one's gradients, and more
            pipeline.optimizer.step()
            reference.optimizer.step()
            larger(worst, differences(pipeline, reference))
            pipeline.step(batches[0], update=False)
            reference.loss(batches[0]).backward()
            larger(worst, differences(pipeline, reference))
        pipeline.step(batches[1])
        reference.loss(batches[1]).backward()
        reference.optimizer.step()
        larger(worst, differences(pipeline, reference))
        larger(worst, {"loss": abs(pipeline.step(batches[2]) - reference.step(batches[2]))})
        larger(worst, differences(pipeline, reference))
    return worst


def frozen(place: Place) -> Found:
    """Shared weights that are frozen, or that no backward reaches, get no gradient and stay as they are."""
    worst: Found = {}
    made = shared()
    reference = Reference(made)
    with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            larger(worst, {"loss": abs(pipeline.step(batch, max_norm=0.3) - clipped_step(reference, batch))})
            larger(worst, differences(pipeline, reference))
        count = pipeline.sum_over_parameters({name: 1.0 for name, _ in pipeline.named_parameters()})
        larger(worst, {"parameters": abs(count - len(list(reference.model.parameters())))})
    return worst


def clipped_step(reference: Reference, batch: Any) -> float:
    """A plain step with clipping."""
    reference.optimizer.zero_grad()
    loss = reference.loss(batch)
    loss.backward()
    nn.utils.clip_grad_norm_(reference.model.parameters(), 0.3)
    reference.optimizer.step()
    return loss.item()


class Overflowing(nn.Module):
    """Layers of which one has a weight whose gradient is so large that it overflows under a large scale."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.parts[1].huge = nn.Parameter(torch.zeros(WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.parts[0](x))
        x = torch.tanh(self.parts[1](x) + self.parts[1].huge * 1e300)
        return self.last(torch.tanh(self.parts[2](x)))


def huge_apart(named_parameters: Any) -> torch.optim.Optimizer:
    """The huge weight gets gradients, but stays."""
    huge = [each for name, each in named_parameters if name.endswith("huge")]
    rest = [each for name, each in named_parameters if not name.endswith("huge")]
    return torch.optim.SGD([{"params": rest}, {"params": huge, "lr": 0.0}], lr=0.05)


def make_scaler() -> torch.amp.GradScaler:
    """Its first updates overflow in `Overflowing`, later ones do, and some do not."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**42, growth_interval=3)


SCALED = 18
"""Steps: scales fall until no gradient overflows, and rise again until one does."""


@kept
def overflowing() -> Workload:
    """`Overflowing`; in float64, so that a scale changes no result."""
    return workload(Overflowing, "parts.*", "last", optimizer=huge_apart)


def scaling(place: Place) -> Found:
    """An overflow on one rank skips the update on all; scales and weights are those of torch's GradScaler."""
    worst: Found = {}
    made = overflowing()
    reference, scaler, skipped = Reference(made), make_scaler(), 0
    with Pipeline(made, place(made), scaler=make_scaler(), graph=graph_of(made)) as pipeline:
        for n in range(SCALED):
            batches = [made.make_batch(8, n), made.make_batch(5, n)][: 1 + n % 2]
            reference.optimizer.zero_grad()
            for batch in batches:
                scaler.scale(reference.loss(batch)).backward()
            scaler.unscale_(reference.optimizer)
            norm = clip_but_huge(reference) if n % 3 == 0 else 0.0
            scaler.step(reference.optimizer)
            before = scaler.get_scale()
            scaler.update()
            bad = scaler.get_scale() < before
            skipped += bad
            for batch in batches[:-1]:
                pipeline.step(batch, update=False)
            pipeline.step(batches[-1], update=False)
            if n % 3 == 0:
                found = pipeline.clip_grad_norm_(CLIP, math.inf)
                differ = not math.isclose(found, norm, rel_tol=1e-12) and (math.isfinite(found) or math.isfinite(norm))
                larger(worst, {"norm": float(differ)})
            pipeline.optimizer.step()
            if not bad:
                small = {name: each for name, each in pipeline.gradients().items() if not name.endswith("huge")}
                larger(worst, {"gradients": reference.gradient_distance(small)})
            pipeline.optimizer.zero_grad()
            larger(worst, {
                "weights": reference.distance(pipeline.named_parameters()),
                "scale": abs(pipeline.scaler.get_scale() - scaler.get_scale()),
                "steps": abs(pipeline.steps - (n + 1 - skipped)),
            })  # fmt: skip
    worst["all or none were skipped"] = float(not 0 < skipped < SCALED)
    return worst


CLIP = 1e305


def clip_but_huge(reference: Reference) -> float:
    """A norm that the huge gradients set, clipped to a size that leaves the others alone only now and then."""
    return float(nn.utils.clip_grad_norm_(reference.model.parameters(), CLIP, math.inf))


def sparse(place: Place) -> Found:
    """Sparse gradients add up, are scaled, summed over those who share the weight, and clipped as dense ones."""
    worst: Found = {}
    made = lookups()
    reference = Reference(made)
    parameters = list(reference.model.parameters())
    with Pipeline(
        made, place(made), scaler=torch.amp.GradScaler("cpu", init_scale=64.0), graph=graph_of(made)
    ) as pipeline:
        for n, norm_type in enumerate((1.0, 2.0, math.inf)):
            reference.optimizer.zero_grad()
            for rows in (8, 5):
                batch = made.make_batch(rows, n + rows)
                loss = reference.loss(batch)
                loss.backward()
                larger(worst, {"loss": abs(pipeline.step(batch, update=False) - loss.item())})
            for parameter in parameters:
                parameter.grad = parameter.grad.to_dense()
            larger(worst, {"sum": reference.gradient_distance(dense(pipeline))})
            expected = nn.utils.clip_grad_norm_(parameters, 0.1, norm_type)
            larger(worst, {f"norm {norm_type}": abs(pipeline.clip_grad_norm_(0.1, norm_type) - float(expected))})
            larger(worst, {"clipped by norm": reference.gradient_distance(dense(pipeline))})
            nn.utils.clip_grad_value_(parameters, 1e-3)
            pipeline.clip_grad_value_(1e-3)
            larger(worst, {"clipped by value": reference.gradient_distance(dense(pipeline))})
            reference.optimizer.step()
            pipeline.optimizer.step()
            pipeline.optimizer.zero_grad()
            larger(worst, {"weights": reference.distance(pipeline.named_parameters())})
    return worst


def dense(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """This rank's gradients, none of them sparse."""
    return {name: each.to_dense() if each.is_sparse else each for name, each in pipeline.gradients().items()}


def half(place: Place) -> Found:
    """float16: the pipeline makes its own scaler, finds a scale that works, and learns."""
    made = make_workload(Mixed, autocast="float16")
    with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
        losses = [pipeline.step(made.make_batch(8, 0), max_norm=1.0) for _ in range(12)]
        assert pipeline.scaler.is_enabled()
        return {"not learned": float(not losses[-1] < losses[0]), "skipped": float(pipeline.steps < 8)}


def capture_all() -> None:
    """The graphs of all cases."""
    capture_loops()
    for made in (lookups(), make_workload(Mixed, autocast="float16")):
        captured(made)


def capture_loops() -> None:
    """Those of weights, accumulation, frozen weights and scales."""
    for made in (masked(), overflowing(), shared()):
        captured(made)


CASES: dict[str, Callable[[Place], Found]] = {
    "optimizers": optimizers,
    "schedulers": schedulers,
    "clipping": clipping,
    "clipping of parts": clipping_of_parts,
    "weights": weights,
    "accumulation": accumulation,
    "frozen": frozen,
    "scaling": scaling,
    "half": half,
    "sparse": sparse,
}
