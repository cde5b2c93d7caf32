"""Stages that several workers share, on three ranks: training beside plain PyTorch, and what cannot be shared.

    torchrun --nproc-per-node 3 tests/runs/replicas.py FOLDER CASE...
    torchrun --nproc-per-node 2 tests/runs/replicas.py FOLDER beside

Writes FOLDER/RANK.json: case -> what this rank found.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from assigner import Pipeline
from assigner.runtime.stages import gathering, reduction

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from drawn_orders import with_drawn_order
from metric_cases import METRICS, whole
from placements import by_one, divided, everywhere, mixed, names_of
from training_cases import CASES, PARTED, Found, larger, optimizers, schedulers
from training_optimizers import ByTheMean, ClippingEach
from unshareable import refusals
from workloads import (
    WIDTH,
    Reference,
    adam,
    graph_of,
    in_one_buffer,
    language,
    make_plan,
    normalised,
    recurrent,
    skips,
    workload,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.plan import Plan
    from assigner.model.workload import Workload


PLACES: dict[str, Callable[[Workload], Plan]] = {
    "everywhere": everywhere,
    "mixed": mixed,
    "divided": lambda made: divided(everywhere(made)),
}

THINNED: dict[str, Callable[[Any], Found]] = {
    "optimizers": lambda place: optimizers(place, PARTED),
    "schedulers": lambda place: schedulers(place, in_turn=True),
}


def alike(made: Workload, plan: Plan, rows: Sequence[int], **settings: Any) -> Found:
    """Losses and the whole state are those of the same micro-batches on one worker."""
    found: list[list[float]] = []
    states: list[Any] = []
    stages = make_plan(made, [(1, names_of(made))]).stages
    for each in (replace(plan, stages=stages), plan):
        with Pipeline(made, each, graph=graph_of(made), **settings) as pipeline:
            found.append([pipeline.step(made.make_batch(count, n)) for n, count in enumerate(rows)])
            found[-1] += [pipeline.evaluate(made.make_batch(count, n)) for n, count in enumerate(rows)]
            states.append(pipeline.full_state_dict(to=None))
    return {
        "losses": max(abs(a - b) for a, b in zip(*found, strict=True)),
        "state": max(float((states[0][name] - each).abs().max()) for name, each in states[1].items()),
    }


class Twice(nn.Module):
    """A BatchNorm that is called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x) + self.norm(x * x))


def batch_norm() -> Found:
    """Running statistics are of all micro-batches on every worker, also on one that had none of the first step's."""
    made = workload(normalised)
    plan = make_plan(made, [({0: 1, 2: 3}, "0"), ({0: 1, 1: 1, 2: 2}, "12"), ({1: 3, 0: 1}, "3")])
    found = alike(made, plan, (2, 8, 7, 4))
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice()))
    plan = make_plan(made, [(1, "0"), ({0: 3, 1: 1}, "1")])
    return {**found, **{f"{key}, called twice": value for key, value in alike(made, plan, (2, 8, 8)).items()}}


def dropout() -> Found:
    """A micro-batch has its own draws, wherever it runs, also when its forward runs again."""
    made = language(dropout=0.4)
    found = alike(made, mixed(made), (8, 7, 2, 8), remat="always")
    return {**found, **{f"{key}, everywhere": each for key, each in alike(made, everywhere(made), (8, 1, 8)).items()}}


def recurrence() -> Found:
    """An LSTM lists its weights anew in its first forward; workers can share it all the same."""
    made = recurrent()
    return alike(made, everywhere(made), (8, 5, 8))


def hooks() -> Found:
    """A hook on a parameter is called with the gradient of the whole batch."""

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        made[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
        return made

    worst: Found = {}
    made = workload(model)
    for name, place in PLACES.items():
        reference = Reference(made)
        with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
            for n in range(3):
                batch = made.make_batch(8, n)
                larger(worst, {f"{name}: loss": abs(pipeline.step(batch) - reference.step(batch))})
            larger(worst, {f"{name}: weights": reference.distance(pipeline.named_parameters())})
    return worst


def small_buckets() -> Found:
    """However many buckets there are, of several types, the sums are the same."""
    before = reduction.BUCKET_BYTES
    reduction.BUCKET_BYTES = gathering.BUCKET_BYTES = 300
    try:
        made = language()
        worst = dict[str, float]()
        for plan in (everywhere(made), divided(everywhere(made))):
            reference = Reference(made)
            with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
                for n in range(3):
                    batch = made.make_batch(8, n)
                    larger(worst, {"loss": abs(pipeline.step(batch) - reference.step(batch))})
                larger(worst, {"gradients": reference.gradient_distance(pipeline.gradients())})
                larger(worst, {"weights": reference.distance(pipeline.named_parameters())})
    finally:
        reduction.BUCKET_BYTES = gathering.BUCKET_BYTES = before
    return worst


def results() -> Found:
    """Metrics and outputs are those of the batch on the ranks that want them; ranks give what they need alone."""
    worst: Found = {}
    made = replace(skips(), metrics=METRICS)
    for name, place in PLACES.items():
        reference = Reference(made)
        with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
            needs = pipeline.needs_inputs, pipeline.needs_targets
            if name == "mixed":
                assert needs == ((True, True), (False, False), (True, False))[pipeline.rank], needs
            for n, (rows, to) in enumerate(((8, "all"), (7, 2), (1, 1), (8, 0))):
                inputs, targets = made.make_batch(rows, n)
                given = inputs if needs[0] else None, targets if needs[1] else None
                plain = reference.output(inputs)
                found = pipeline.evaluate(given, outputs_to=to)
                assert (found.outputs is not None) == (to in ("all", pipeline.rank))
                if found.outputs is not None:
                    larger(worst, {f"{name}: outputs": float((found.outputs - plain).abs().max())})
                for key, value in whole(plain, targets).items():
                    larger(worst, {f"{name}: {key}": abs(found.metrics[key] - value)})
                larger(worst, {f"{name}: weight": abs(found.weight - rows)})
                trained = pipeline.step(given, outputs_to=to)
                larger(worst, {f"{name}: loss": abs(trained - reference.step((inputs, targets)))})
                for key, value in whole(plain, targets).items():
                    larger(worst, {f"{name}: {key} in training": abs(trained.metrics[key] - value)})
    return worst


def checkpoints(folder: Path) -> Found:
    """What is saved with replicas goes on without them, and the other way round; every tensor is saved once."""
    worst: Found = {}
    made = language()
    alone = make_plan(made, [(2, names_of(made))])
    plans = {"everywhere": everywhere(made), "mixed": mixed(made), "alone": alone}
    plans |= {f"{name}, divided": divided(plan) for name, plan in plans.items()}
    ways = (
        ("everywhere", "alone"), ("alone", "mixed"), ("mixed", "everywhere"), ("everywhere, divided", "mixed, divided"),
        ("mixed, divided", "alone"), ("alone", "everywhere, divided"),
    )  # fmt: skip
    for n, (one, other) in enumerate(ways):
        place = folder / f"checkpoint {n}"
        with Pipeline(made, plans[one], graph=graph_of(made)) as pipeline:
            for step in range(2):
                pipeline.step(made.make_batch(8, step))
            pipeline.save(place)
            expected = [pipeline.step(made.make_batch(8, step)) for step in (2, 3)]
        if one == "everywhere":
            shards = sorted(each.name for each in place.glob("*.safetensors"))
            assert shards == ["model-00001.safetensors", "optimizer-00001.safetensors"], shards
        with Pipeline(made, plans[other], graph=graph_of(made)) as pipeline:
            pipeline.load(place)
            found = [pipeline.step(made.make_batch(8, step)) for step in (2, 3)]
        larger(worst, {f"{one} to {other}": max(abs(a - b) for a, b in zip(expected, found, strict=True))})
    return worst


def states() -> Found:
    """The plain model's state_dict is gathered from replicas and handed out to all of them."""
    worst: Found = {}
    made = language()
    for name, place in PLACES.items():
        reference = Reference(made)
        with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
            batch = made.make_batch(8, 0)
            pipeline.step(batch)
            reference.step(batch)
            state = pipeline.full_state_dict(to=1)
            if state is not None:
                larger(worst, {f"{name}: gathered": reference.distance(state.items())})
            given = {key: each + 1 for key, each in reference.model.state_dict().items()}
            pipeline.load_state_dict(given if pipeline.rank == 2 else None)
            reference.model.load_state_dict(given)
            larger(worst, {f"{name}: handed out": reference.distance(pipeline.named_parameters())})
            larger(worst, {f"{name}: loss": abs(pipeline.step(batch) - reference.step(batch))})
    return worst


def moves() -> Found:
    """A training that moves between plans with replicas and without them goes on as the plain one."""
    worst: Found = {}
    made = language()
    alone = make_plan(made, [(2, names_of(made))])
    apart = make_plan(made, [(0, names_of(made)[:2]), (1, names_of(made)[2:])], schedule="1f1b")
    reference = Reference(made)
    with Pipeline(made, alone, graph=graph_of(made)) as pipeline:
        one, other = divided(everywhere(made)), divided(mixed(made))
        plans = (
            everywhere(made), mixed(made), one, everywhere(made), other, apart, mixed(made), one, alone, other, one,
            apart,
        )  # fmt: skip
        for n, plan in enumerate(plans):
            batch = made.make_batch(8, n)
            larger(worst, {"loss": abs(pipeline.step(batch) - reference.step(batch))})
            pipeline.move(plan)
            larger(worst, {"weights": reference.distance(pipeline.named_parameters())})
    return worst


def divided_updates() -> Found:
    """Each worker of a stage updates some of it for all: bit for bit what they train when each updates everything."""
    worst: Found = {}
    made = language(dropout=0.4)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
        "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    }
    for name, build in kinds.items():
        chosen = replace(made, optimizer=build)
        for place in (everywhere, mixed):
            found: list[Any] = []
            for plan in (place(made), divided(place(made))):
                with Pipeline(chosen, plan, graph=graph_of(made)) as pipeline:
                    frozen = dict(pipeline.named_parameters()).get("head.weight")
                    for n in range(4):
                        if frozen is not None:
                            frozen.requires_grad_(n != 2)
                        pipeline.step(made.make_batch(8, n), max_norm=0.5)
                    pipeline.step(made.make_batch(8, 9), update=False)
                    pipeline.optimizer.step()
                    pipeline.optimizer.zero_grad()
                    assert not pipeline.gradients()
                    for _, each in pipeline.named_parameters():
                        with contextlib.suppress(KeyError):  # another one may have it: that makes no state here
                            _ = pipeline.optimizer.state[each]
                    here = {key: each.detach().clone() for key, each in pipeline.named_parameters()}
                    found.append((here, pipeline.optimizer.state_dict()["state"]))
            (plain, states), (weights, own) = found
            assert plain.keys() == weights.keys()
            assert all(torch.equal(each, weights[key]) for key, each in plain.items())
            assert own.keys() <= states.keys(), (own.keys(), states.keys())
            for key, state in own.items():
                assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(states[key][k])) for k, v in state.items())
            everything: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everything, sorted(own))
            held = [each for mine in everything for each in mine]
            assert set(states) <= set(held)
            if place is everywhere:
                assert len(held) == len(set(held)), held
            worst[f"{name}, {place.__name__}"] = 0.0
    return worst


def seen(pipeline: Pipeline) -> list[Any]:
    """What an update leaves beside weights, on every rank in turn: gradients, and what groups note."""
    noted = [
        {key: value for key, value in group.items() if key != "params"} for group in pipeline.optimizer.param_groups
    ]
    gradients = {key: each.clone() for key, each in pipeline.gradients().items()}
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (noted, gradients))
    return everything


def one_updates() -> Found:
    """An optimizer that looks at all parameters trains where one worker has them, beside others that have none."""
    worst: Found = {}
    made = replace(language(), optimizer=lambda parameters: ByTheMean(parameters, lr=0.02))
    bare = workload(
        lambda: nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh()),
        optimizer=lambda parameters: ByTheMean(parameters, lr=0.1),
    )
    frozen = replace(
        bare, model=lambda: nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 1).requires_grad_(False)).double()
    )
    places = {
        "alone": (made, make_plan(made, [(1, names_of(made))])),
        "one for all": (made, by_one(everywhere(made))),
        "without parameters": (bare, make_plan(bare, [(2, "0"), (0, "1")])),
        "frozen ones": (frozen, make_plan(frozen, [(2, "0"), (0, "1")])),
    }
    for name, (each, plan) in places.items():
        reference = Reference(each)
        with Pipeline(each, plan, graph=graph_of(each)) as pipeline:
            for n in range(3):
                batch = each.make_batch(8, n)
                larger(worst, {f"{name}: loss": abs(pipeline.step(batch) - reference.step(batch))})
                for noted, _ in seen(pipeline):
                    mean = reference.optimizer.param_groups[0]["mean"]
                    larger(worst, {f"{name}: noted": abs(noted[0]["mean"] - mean)})
            larger(worst, {f"{name}: gradients": reference.gradient_distance(pipeline.gradients())})
            larger(worst, {f"{name}: weights": reference.distance(pipeline.named_parameters())})
    return worst


def hooked_on_one() -> Found:
    """A hook on all optimizers of one process, as a profiler's, changes nothing of the messages behind an update."""
    made = language()
    worst: Found = {}
    hook = register_optimizer_step_post_hook(lambda *_: None) if dist.get_rank() == 1 else None
    for name, plan in {"alone": make_plan(made, [(1, names_of(made))]), "by one": by_one(everywhere(made))}.items():
        reference = Reference(made)
        with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
            for n in range(2):
                batch = made.make_batch(8, n)
                larger(worst, {f"{name}: loss": abs(pipeline.step(batch) - reference.step(batch))})
    if hook is not None:
        hook.remove()
    return worst


def changed_gradients() -> Found:
    """Gradients that a divided update has changed or dropped are the same on all workers behind it."""
    worst: Found = {}
    made = replace(language(), optimizer=lambda parameters: ClippingEach(parameters, lr=0.1))
    for name, plan in {"in turn": divided(everywhere(made)), "by one": by_one(everywhere(made))}.items():
        reference = Reference(made)
        with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
            for n in range(2):
                batch = made.make_batch(8, n)
                larger(worst, {f"{name}: loss": abs(pipeline.step(batch) - reference.step(batch))})
                left = {key for key, each in reference.model.named_parameters() if each.grad is not None}
                for _, gradients in seen(pipeline):
                    assert gradients.keys() == left
                    larger(worst, {f"{name}: gradients": reference.gradient_distance(gradients)})
            larger(worst, {f"{name}: weights": reference.distance(pipeline.named_parameters())})
    return worst


def kept_gradients() -> Found:
    """A buffer whose views are the gradients has them, where workers add them up, and where one updates for others."""
    worst: Found = {}
    made = language()
    for name, place in PLACES.items():
        reference = Reference(made)
        with Pipeline(made, place(made), graph=graph_of(made)) as pipeline:
            mine = in_one_buffer(dict(pipeline.named_parameters()).values())
            buffers = [in_one_buffer(reference.model.parameters()), mine]
            for n in range(2):
                batch = made.make_batch(8, n)
                loss = reference.loss(batch)
                loss.backward()
                larger(worst, {f"{name}: loss": abs(pipeline.step(batch, update=False) - loss.item())})
                for buffer, optimizer in zip(buffers, (reference.optimizer, pipeline.optimizer), strict=True):
                    buffer.clamp_(-0.01, 0.01)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
            larger(worst, {f"{name}: weights": reference.distance(pipeline.named_parameters())})
            larger(worst, {f"{name}: left": float(mine.abs().max())})
    return worst


class Noisy(torch.optim.SGD):
    """It adds noise to each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.randn_like(each), alpha=0.01)
        return closure


def noise() -> Found:
    """An optimizer that draws draws the same on all workers, whatever their scripts have drawn."""
    made = replace(workload(normalised), optimizer=lambda parameters: Noisy(parameters, lr=0.05))
    plan = make_plan(made, [({0: 1, 1: 2, 2: 1}, names_of(made))])
    worst: Found = {}
    kept = {}
    stages = make_plan(made, [(1, names_of(made))]).stages
    for name, each in (("alone", replace(plan, stages=stages)), ("shared", plan)):
        torch.manual_seed(dist.get_rank())
        with Pipeline(made, each, graph=graph_of(made)) as pipeline:
            for n in range(3):
                pipeline.step(made.make_batch(8, n))
            mine = {key: value.detach().clone() for key, value in pipeline.named_parameters()}
            kept[name] = pipeline.full_state_dict(to=None)
            larger(worst, {name: max((float((kept[name][key] - mine[key]).abs().max()) for key in mine), default=0.0)})
    larger(
        worst, {"state": max(float((kept["alone"][key] - each).abs().max()) for key, each in kept["shared"].items())}
    )
    return worst


class Optional(nn.Module):
    """A part for an input that batches may leave out, and one that eval mode leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.head, self.aux = (nn.Linear(WIDTH, each) for each in (WIDTH, WIDTH, 1, 1))

    def forward(self, x: torch.Tensor, e: torch.Tensor | None = None) -> torch.Tensor:
        y = self.first(x).tanh()
        z = y if e is None else y + self.side(e)
        return self.head(z) + self.aux(y) if self.training else self.head(z)


def optional(rows: int, generator: torch.Generator) -> Any:
    """Both inputs."""
    x, e = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "e": e}, x.sum(1, keepdim=True)


def left_out() -> Found:
    """Batches and modes that leave partitions out: also with divided updates, and where a worker has nothing to do."""
    made = workload(Optional, "first", "side", "head", "aux", batch=optional, optimizer=adam)
    names, worst = names_of(made), dict[str, float]()
    apart = make_plan(made, [(n % 3, [name]) for n, name in enumerate(names)], remat=names[1:2], schedule="interleaved")
    plans = {
        "divided": divided(everywhere(made)),
        "divided in part": divided(make_plan(made, [(0, names[:1]), ({1: 1, 2: 3}, names[1:])])),
        "one updates": by_one(everywhere(made)),
        "listed": with_drawn_order(apart, graph_of(made).edges, random.Random(1), halves=True),
    }
    for name, plan in plans.items():
        reference = Reference(made)
        with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
            for n in range(4):
                inputs, targets = made.make_batch(8, n)
                batch = ({"x": inputs["x"]} if n % 2 else inputs), targets
                larger(worst, {name: abs(pipeline.step(batch) - reference.step(batch))})
                with torch.no_grad():
                    reference.model.eval()
                    larger(worst, {name: abs(pipeline.evaluate(batch) - reference.loss(batch).item())})
                    reference.model.train()
            larger(worst, {name: reference.distance(pipeline.full_state_dict(to=None).items())})
    return worst


def beside() -> Found:
    """Two ranks that share everything end where DistributedDataParallel ends, given the same batches."""
    worst: Found = {}
    made = language(tied=False)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(made.seed)
    plain = DistributedDataParallel(made.model())
    optimizer = made.make_optimizer(plain.module.named_parameters())
    with Pipeline(made, make_plan(made, [({0: 2, 1: 2}, names_of(made))]), graph=graph_of(made)) as pipeline:
        for n in range(5):
            ids, targets = made.make_batch(8, n)
            mine = slice(4 * rank, 4 * rank + 4)
            optimizer.zero_grad()
            loss = made.loss(plain(ids[mine]), targets[mine])
            loss.backward()
            optimizer.step()
            both = loss.detach().clone()
            dist.all_reduce(both)
            larger(worst, {"loss": abs(pipeline.step((ids, targets)) - float(both) / 2)})
        named = dict(plain.module.named_parameters())
        for name, parameter in pipeline.named_parameters():
            larger(worst, {"weights": float((parameter - named[name]).detach().abs().max())})
    dist.destroy_process_group()
    return worst


def main(folder: Path, parts: Sequence[str]) -> None:
    """Run some of it."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "beside" in parts:
        found["beside"] = beside()
    else:
        dist.init_process_group("gloo")
        for name, case in CASES.items():
            for where, place in PLACES.items() if name in parts else ():
                if where == "mixed" or name not in THINNED:
                    found[f"{name}, {where}"] = THINNED.get(name, case)(place)
        for case in (
            batch_norm,
            dropout,
            recurrence,
            noise,
            hooks,
            small_buckets,
            results,
            states,
            moves,
            divided_updates,
            one_updates,
            changed_gradients,
            kept_gradients,
            hooked_on_one,
            left_out,
        ):
            if case.__name__ in parts:
                found[case.__name__] = case()
        if "checkpoints" in parts:
            found["checkpoints"] = checkpoints(folder)
        if refused := refusals(parts):
            found["refusals"] = refused
        dist.destroy_process_group()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
