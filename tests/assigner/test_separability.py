"""Optimizers that look at several parameters at once are told from those that do not, before they train anything."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_optimizers import OPTIMIZERS, ByTheMean, Orthogonal, muon_like, no_decay_by_name
from workloads import WIDTH, Skips, graph_of, language, make_plan, skips

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.machine.generators import GeneratorStates
from assigner.runtime.stages.updaters import shares_of
from assigner.runtime.update.optimizer import PipelineOptimizer
from assigner.runtime.update.rankoptimizer import RankOptimizer
from assigner.runtime.update.separability import check_separable, is_known

NAMES = tuple(name for name, _ in Skips().named_parameters())
SHARES = [NAMES[:3], NAMES[3:]]


def check(build: Any, shares: Any = SHARES, model: nn.Module | None = None) -> bool:
    """Make the handle of an optimizer on the first of two workers; True: the stand-ins had to tell."""
    named = list((model or Skips()).named_parameters())
    made = replace(skips(), optimizer=build)
    handle = RankOptimizer(made, named, dict(named[:3]))
    return handle.check(shares).was_tried


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients in its step, as LAMB's common form does."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1.0)
        return super().step(closure)


class ClippingScaled(torch.optim.SGD):
    """Clips what a loss that is multiplied by a million gives."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1e5)
        return super().step(closure)


class Stopping(torch.optim.SGD):
    """Trains no further once a gradient is too large."""

    limit = 1e6

    def step(self, closure: Any = None) -> Any:
        held = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not all(each.grad.abs().max() < self.limit for each in held):
            raise FloatingPointError("diverged")
        return super().step(closure)


class ClippingOrStopping(torch.optim.SGD):
    """Clips what does not stop it, as `ClippingScaled`."""

    def step(self, closure: Any = None) -> Any:
        held = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not all(each.grad.abs().max() < 1e8 for each in held):
            raise FloatingPointError("diverged")
        nn.utils.clip_grad_norm_(held, 1e5)
        return super().step(closure)


class StoppingSoon(Stopping):
    """Some gradients of the stand-ins are larger in any trial."""

    limit = 1e3


class RaisingSmall(torch.optim.SGD):
    """Takes longer steps where all gradients are small."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        if sum(float((each**2).sum()) for each in held) < 1e-3:
            torch._foreach_mul_(held, 1 + 1e4 * len(held))
        return super().step(closure)


class LearningItsRate(torch.optim.Optimizer):
    """As Prodigy and D-Adaptation: the distance to the start is estimated over all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-6, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        group = self.param_groups[0]
        rate, weight = group["d"] * group["lr"], 0.0
        for each in group["params"]:
            if each.grad is None:
                continue
            state = self.state[each]
            start = state.setdefault("start", each.clone())
            summed = state.setdefault("sum", torch.zeros_like(each))
            group["numerator"] += rate * float((each.grad * (start - each)).sum())
            summed += rate * each.grad
            weight += float(summed.abs().sum())
        for each in group["params"]:
            if each.grad is not None:
                each.sub_(rate * each.grad.sign())
        group["d"] = max(group["d"], group["numerator"] / weight if weight else 0.0)


class Sign(torch.optim.Optimizer):
    """As Lion: every parameter by itself."""

    def __init__(self, parameters: Any, *, log: list[int] | None = None) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.log = [] if log is None else log

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.log.append(1)
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                    each.sub_(group["lr"] * momentum.mul_(0.9).add_(each.grad).sign())


class Guarded(torch.optim.AdamW):
    """Leaves out steps in which a gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        held = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        return super().step(closure) if all(each.isfinite().all() for each in held) else None


def guarded_by_a_hook(parameters: Any) -> torch.optim.Optimizer:
    """Drops all gradients where one is not a number."""
    made = torch.optim.AdamW(parameters)

    def hook(*_: Any) -> None:
        held = [each for group in made.param_groups for each in group["params"] if each.grad is not None]
        if any(each.grad.isnan().any() for each in held):
            for each in held:
                each.grad = None

    made.register_step_pre_hook(hook)
    return made


class AllOrNone(torch.optim.SGD):
    """Leaves out steps in which a parameter has no gradient."""

    def step(self, closure: Any = None) -> Any:
        is_left_out = any(each.grad is None for group in self.param_groups for each in group["params"])
        return None if is_left_out else super().step(closure)


class CountingUsed(torch.optim.SGD):
    """Its rate goes by the steps in which there was a gradient."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += any(each.grad is not None for group in self.param_groups for each in group["params"])
        for group in self.param_groups:
            group["lr"] = 0.1 / max(self.count, 1)
        return super().step(closure)


class GuardedEach(torch.optim.SGD):
    """Leaves out each parameter whose gradient is not finite, by itself."""

    def step(self, closure: Any = None) -> Any:
        for each in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            each.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().step(closure)


class ClippingLarge(torch.optim.SGD):
    """Clips the gradients of large parameters alone, by the norm of these."""

    def step(self, closure: Any = None) -> Any:
        held = [each for group in self.param_groups for each in group["params"] if each.numel() >= 16]
        nn.utils.clip_grad_norm_(held, 0.05)
        return super().step(closure)


class ClippingWhenTold(torch.optim.SGD):
    """Clips by the norm of all gradients once a setting says by which, in its group or on itself."""

    limit = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["max_norm"] = 0.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if limit := group["max_norm"] or self.limit:
                nn.utils.clip_grad_norm_(group["params"], limit)
        return super().step(closure)


def clipped_by_a_hook(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(parameters)
    made.register_step_pre_hook(
        lambda optimizer, *_: (
            nn.utils.clip_grad_norm_([e for g in optimizer.param_groups for e in g["params"]], 1.0) and None
        )
    )
    return made


def averaged_by_a_hook(parameters: Any) -> torch.optim.Optimizer:
    """Moves each tensor towards the mean of all of them after the step."""
    made = torch.optim.SGD(parameters, lr=0.1)

    def hook(optimizer: Any, *_: Any) -> None:
        every = [each.data for group in optimizer.param_groups for each in group["params"]]
        mean = torch.stack([each.mean() for each in every]).mean()
        for each in every:
            each.lerp_(mean.expand_as(each), 0.1)

    made.register_step_post_hook(hook)
    return made


def replaced_step(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    plain = made.step

    def step(closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(made.param_groups[0]["params"], 1.0)
        return plain(closure)

    made.step = step
    return made


def counted_by_a_hook(parameters: Any) -> torch.optim.Optimizer:
    made, steps = torch.optim.Adam(parameters), []
    made.register_step_post_hook(lambda *_: steps.append(1))
    return made


@pytest.mark.parametrize(
    "build",
    [
        Clipping,
        ClippingScaled,
        ClippingOrStopping,
        RaisingSmall,
        LearningItsRate,
        clipped_by_a_hook,
        averaged_by_a_hook,
        replaced_step,
        ClippingLarge,
    ],
)
def test_what_looks_at_all_parameters_is_refused(build):
    """A norm of all gradients, a rate learnt from all, hooks and a replaced step: with the way out in the hint."""
    with pytest.raises(UsageError, match="looks at several parameters at once: what it does to '") as caught:
        check(lambda parameters: build(parameters, lr=0.1) if build is Clipping else build(parameters))
    assert "clip_grad_norm_" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("build", "what"),
    [(Guarded, "finite"), (guarded_by_a_hook, "finite"), (AllOrNone, "there"), (CountingUsed, "there")],
)
def test_what_looks_whether_others_have_gradients_is_refused(build, what):
    """A step left out over one gradient that is missing, or not finite: each worker would decide alone."""
    with pytest.raises(UsageError, match=f"depends on whether the gradients of others are {what}") as caught:
        check(build)
    assert "decide in the loop" in (caught.value.hint or "")


def spread(build: Any) -> tuple[RankOptimizer, PipelineOptimizer]:
    """The first of two workers', and its handle."""
    named = list(Skips().named_parameters())
    made = RankOptimizer(replace(skips(), optimizer=build), named, dict(named[:3]), shares=SHARES, ranks=2)
    return made, PipelineOptimizer(made, apply=lambda _: None)


@pytest.mark.parametrize("place", ["limit", "param_groups[0]['max_norm']"])
def test_what_a_script_turns_on_is_tried_out(place):
    """At the next step, with the settings that are there then; a rate is one whatever number it is."""
    made, handle = spread(ClippingWhenTold)
    made.check_tried(lambda number: [number])
    handle.param_groups[0]["lr"] = 0.01
    made.check_tried(lambda number: [number])
    if place == "limit":
        handle.limit = 0.05
    else:
        handle.param_groups[0]["max_norm"] = 0.05
    with pytest.raises(UsageError, match=r"looks at several .* as it was built it did not, but ") as caught:
        made.check_tried(lambda number: [number])
    assert f"but {place} was set since" in caught.value.message
    with pytest.raises(UsageError, match="looks at several"):
        made.check([NAMES[:2], NAMES[2:]])  # as by a move


def test_a_hook_that_another_plan_was_refused_for_is_refused_under_this_one():
    """It was tried out for a move that was not made: here each worker would clip by the norm of its own gradients."""
    made, _ = spread(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def clip(optimizer: Any, *_: Any) -> None:
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)

    clips = register_optimizer_step_pre_hook(clip)
    try:
        with pytest.raises(UsageError, match="looks at several"):
            made.check([NAMES[:2], NAMES[2:]])  # as by a move
        with pytest.raises(UsageError, match="a hook on the steps of all optimizers was registered after the pipeline"):
            made.check_tried(lambda number: [number])
    finally:
        clips.remove()


def test_a_setting_that_may_be_turned_on_is_tried_out_once(monkeypatch):
    """Of each kind; what the trial finds counts from then on, and the builder keeps the optimizer that runs."""
    kept, last, trials = list[torch.optim.Optimizer](), None, list[int]()

    class ClippingByValue(torch.optim.SGD):
        limit = None

        def step(self, closure: Any = None) -> Any:
            if self.limit is not None:
                nn.utils.clip_grad_value_([each for group in self.param_groups for each in group["params"]], self.limit)
            return super().step(closure)

    def build(parameters: Any) -> torch.optim.Optimizer:
        nonlocal last
        last = ClippingByValue(parameters, lr=0.1)
        kept.append(last)
        return last

    made, handle = spread(build)
    assert not made.changes_gradients
    monkeypatch.setattr(
        "assigner.runtime.update.building.check_separable",
        lambda *each: trials.append(1) or check_separable(*each),
    )
    counts = []
    for limit in (None, 0.1, 0.2, None, 0.3):
        handle.limit = limit
        made.check_tried(lambda number: [number])
        counts.append(len(trials))
    assert counts == [1, 2, 2, 2, 2]
    assert made.changes_gradients
    assert kept[-1] is last is made.local


def test_groups_in_another_order_on_another_rank():
    """As a set of names gives them: a script that sets a rate in the first would set it for others there."""
    orders = ["parts", "last"], ["last", "parts"]

    def build(named: Any, order: list[str]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p for name, p in named if name.startswith(each)]} for each in order], lr=1)

    numbers: list[float] = []
    made = [
        spread(lambda named_parameters, order=order: build([*named_parameters], order))[0]
        for order in (*orders, sorted(orders[0], reverse=True))
    ]
    for each in made:
        each.agree(lambda number: numbers.append(number) or [number])
    numbers = numbers[::2]  # behind each, the figure of a trial
    made[0].agree(lambda number: [numbers[0], numbers[2]] if number else [])
    with pytest.raises(UsageError, match="made other param groups on rank 1 than on rank 0, or the same in another"):
        made[0].agree(lambda _: numbers)


def test_another_step_on_another_rank():
    """As one that goes over a set: rank 1 turns what rank 0 has pushed. A rank that did not try it says nothing."""

    def build(turns: tuple[str, ...]) -> Any:
        def push(optimizer, *_):
            for parameter in optimizer.param_groups[0]["params"]:
                for turn in turns if parameter.grad is not None else ():
                    parameter.grad = parameter.grad * 2 if turn == "double" else parameter.grad + 0.1

        def make(parameters):
            optimizer = torch.optim.SGD(parameters, lr=0.05)
            optimizer.register_step_pre_hook(push)
            return optimizer

        return make

    made = [spread(build(turns))[0] for turns in (("double", "push"), ("push", "double"), ("double", "push"))]
    told: list[list[float]] = [[], []]
    for each in made:
        numbers = iter(told)
        each.agree(lambda number, numbers=numbers: next(numbers).append(number) or [number])
    groups, figures = told

    def both(of_figures: list[float]) -> Any:
        answers = iter((groups[: len(of_figures)], of_figures))
        return lambda _: next(answers)

    made[0].agree(both([figures[0], figures[2] * (1 + 1e-9)]))
    made[0].agree(both([0.0, figures[1]]))
    with pytest.raises(
        UsageError, match=r"SGD\.step, with the hooks on it, does something else on rank 1 than on rank 0"
    ):
        made[0].agree(both(figures[:2]))


@pytest.mark.parametrize(
    "build",
    [Sign, Orthogonal, counted_by_a_hook, Stopping, GuardedEach],
)
def test_what_treats_each_by_itself_is_let_through(build):
    """An optimizer of one's own, and a hook that only counts."""
    assert check(build)
    assert check(muon_like, model=language().model(), shares=shares_of_language())


def shares_of_language() -> list[frozenset[str]]:
    graph = graph_of(language())
    return shares_of(graph, make_plan(language(), [(0, ["tokens", "blocks.0"]), (1, ["blocks.1", "blocks.2", "head"])]))


def test_complex_parameters_are_tried():
    """As spectral weights are, beside real ones."""
    model = nn.ParameterList([torch.ones(4, dtype=kind) for kind in (torch.complex64, torch.float32, torch.complex64)])
    shares = [["0"], ["1", "2"]]
    assert check(Stopping, shares, model)
    with pytest.raises(UsageError, match="looks at several parameters at once"):
        check(lambda parameters: Clipping(parameters, lr=0.1), shares, model)


class ClippingGroups(torch.optim.SGD):
    """Clips by the norm of a group, where it has a limit."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["max_norm"] < math.inf:
                nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
        return super().step(closure)


def test_groups_by_size_are_tried_as_they_were_built():
    """The stand-ins of all are small: in groups that go by their own sizes none would be clipped."""

    def build(parameters: Any, limit: float) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [
            {"params": [each for each in every if (each.numel() > WIDTH) == is_large], "max_norm": max_norm}
            for is_large, max_norm in ((True, limit), (False, math.inf))
        ]
        return ClippingGroups(groups, lr=0.1)

    assert check(lambda parameters: build(parameters, math.inf))
    with pytest.raises(UsageError, match="looks at several parameters at once"):
        check(lambda parameters: build(parameters, 0.1))


class CountingForAll(torch.optim.SGD):
    """Its rate goes by a count that all of its class have."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        CountingForAll.calls += 1
        self.param_groups[0]["lr"] = 0.1 / CountingForAll.calls
        return super().step(closure)


class Firsts(torch.optim.SGD):
    """Reads the first parameter of each group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group["params"][0].dim()
        return super().step(closure)


@pytest.mark.parametrize(
    ("build", "message", "hint"),
    [
        (CountingForAll, "keeps something that outlives it, as in an attribute of its class", "in each param group"),
        (Firsts, "it fails: IndexError", "is empty there: have step"),
    ],
)
def test_other_reasons_are_told(build, message, hint):
    """A count of a class, which a trial counts on; and the first parameter of a group that may have none."""
    with pytest.raises(UsageError, match=message) as caught:
        check(lambda parameters: build([{"params": [each]} for each in parameters], lr=0.1))
    assert hint in (caught.value.hint or "")


def test_what_draws_is_told_so():
    """As noise on the gradients: on two workers each would draw what one draws first."""

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for each in (each for group in self.param_groups for each in group["params"]):
                each.grad.add_(torch.randn_like(each.grad))
            return super().step(closure)

    with pytest.raises(UsageError, match="Noisy draws random numbers in its step: what it does to 'parts"):
        check(lambda parameters: Noisy(parameters, lr=0.1))


class Drawing(torch.optim.SGD):
    """Adds noise of some size to some parameters."""

    def __init__(self, parameters: Any, *, size: float, draw: Any = torch.randn_like, wanted: Any = lambda _: True):
        super().__init__(parameters, lr=0.1)
        self.size, self.draw, self.wanted = size, draw, wanted

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in filter(self.wanted, (each for group in self.param_groups for each in group["params"])):
            each.add_(self.draw(each), alpha=self.size)
        return super().step(closure)


def by_numpy(like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.random.rand(*like.shape)).to(like)


def by_python(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, random.random())


@pytest.mark.parametrize("draw", [torch.randn_like, by_numpy, by_python])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_noise_however_small_is_told_as_draws(size, draw):
    """It is compared to the last bit; and where one worker has all parameters, it is no matter."""
    before = GeneratorStates.now()
    with pytest.raises(UsageError, match="Drawing draws random numbers in its step: what it does to 'parts"):
        check(lambda parameters: Drawing(parameters, size=size, draw=draw))
    assert check(lambda parameters: Drawing(parameters, size=size, draw=draw), [NAMES, NAMES])
    assert GeneratorStates.now() == before


def updated(build: Any, shares: Any, model: nn.Module) -> None:
    """What a worker does that has the first parameters, or all that there are."""
    named = list(model.named_parameters())
    held = {name: each for name, each in named if name in shares[0]}
    made = RankOptimizer(replace(skips(), optimizer=build), named, held, shares=shares, ranks=2)
    for each in held.values():
        each.grad = torch.ones_like(each)
    with made.around(made.applied, torch.device("cpu")) or contextlib.nullcontext():
        made.local.step()


@pytest.mark.parametrize("draw", [torch.randn_like, by_numpy])
@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        (lambda each: each.dtype == torch.bfloat16, torch.bfloat16),
        (lambda each: 66 in each.shape, torch.float64),
    ],
)
def test_draws_that_a_trial_does_not_see_end_the_first_update(wanted, kind, draw):
    """Those for a type, or a size: where others have parameters for which they would be drawn too."""
    model = nn.Sequential(*(nn.Linear(66 if n == 0 else 8, 8) for n in range(4))).to(kind)
    names = tuple(name for name, _ in model.named_parameters())

    def build(parameters: Any) -> torch.optim.Optimizer:
        return Drawing(parameters, size=1.0, draw=draw, wanted=wanted)

    updated(build, [names, names], model)
    with pytest.raises(UsageError, match="Drawing draws random numbers in its step: what it does to "):
        updated(build, [names[:4], names[4:]], model)
    updated(lambda parameters: Drawing(parameters, size=1.0, wanted=lambda _: False), [names[:4], names[4:]], model)


ONE = torch.Generator()


@pytest.mark.parametrize(
    ("generators", "is_refused"),
    [(lambda _: ONE, True), (lambda each: torch.Generator().manual_seed(each.dim()), False)],
)
def test_draws_for_a_type_are_seen_in_that_type(generators, is_refused):
    """From a generator of the optimizer's own, too, as one for all that are rounded; one for each parameter will do."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).bfloat16()
    names = tuple(name for name, _ in model.named_parameters())

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generators(like)).to(like)

    def build(parameters: Any) -> torch.optim.Optimizer:
        return Drawing(parameters, size=1.0, draw=draw, wanted=lambda each: each.dtype == torch.bfloat16)

    updated(build, [names, names], model)
    with pytest.raises(UsageError, match="in its step: what it does to '") if is_refused else contextlib.nullcontext():
        updated(build, [names[:4], names[4:]], model)


@pytest.mark.parametrize("draw", [np.random.rand, random.random, lambda: float(torch.rand(()))])
def test_one_draw_for_a_whole_step_is_alike_on_all_workers(draw):
    """It does not say what there is for which it draws."""

    class Whimsical(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] = 0.1 * draw()
            return super().step(closure)

    updated(lambda parameters: Whimsical(parameters, lr=0.1), SHARES, Skips())


@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_with_modes_is_tried_in_both(clips):
    """As it was built its step may fail, or do something else."""

    class Switched(Clipping):
        trains = False

        def train(self) -> None:
            self.trains = True

        def step(self, closure: Any = None) -> Any:
            if not self.trains and not clips:
                raise RuntimeError("not in train mode")
            return super().step(closure) if self.trains and clips else torch.optim.SGD.step(self, closure)

    if clips:
        with pytest.raises(UsageError, match="looks at several parameters at once"):
            check(lambda parameters: Switched(parameters, lr=0.1))
    else:
        assert check(lambda parameters: Switched(parameters, lr=0.1))


def test_a_worker_without_gradients_takes_no_part_in_what_fails_there():
    """Of none there is no mean: its step is left out, and one that runs over nothing is called as ever."""
    named = list(Skips().named_parameters())
    for build, runs in ((ByTheMean, False), (Sign, True)):
        made = replace(skips(), optimizer=build)
        idle, busy = (RankOptimizer(made, named, held, shares=[NAMES], ranks=2) for held in ({}, dict(named)))
        assert idle.applied is (idle.local if runs else None)
        assert busy.applied is busy.local


def test_what_was_built_frozen_may_lie_elsewhere():
    """A worker with nothing else counts for none, unless the optimizer moves what it has by what others have."""
    model = Skips()
    model.last.requires_grad_(False)
    shares = [NAMES[:6], NAMES[6:]]
    assert check(ByTheMean, shares, model)
    assert check(torch.optim.LBFGS, shares, model) is False

    def following(parameters: Any) -> torch.optim.Optimizer:
        """What is frozen follows the mean of all gradients, as an average of weights may."""
        made = torch.optim.SGD(parameters, lr=0.1)

        def hook(*_: Any) -> None:
            every = made.param_groups[0]["params"]
            mean = torch.stack([each.grad.norm() for each in every if each.grad is not None]).mean()
            for each in every:
                if each.grad is None:
                    each.data.add_(mean)

        made.register_step_post_hook(hook)
        return made

    for build, name in ((averaged_by_a_hook, "parts.0.weight"), (following, "last.weight")):
        with pytest.raises(UsageError, match=f"what it does to '{name}' depends on others"):
            check(build, shares, model)


def test_all_on_one_worker_is_no_question():
    """An optimizer that cannot be tried with small tensors is let through where it has all parameters."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        if all(each.dtype == torch.float64 for each in parameters):
            raise RuntimeError("too small")
        return Sign(parameters)

    named = list(Skips().named_parameters())
    made = replace(skips(), optimizer=lambda parameters: build(list(parameters)))
    handle = RankOptimizer(made, named, {}, shares=[NAMES], ranks=2)
    assert (handle.applied, handle.changes_gradients) == (None, True)


def test_a_hook_that_fails_over_nothing_says_so():
    """On a rank that updates nothing a hook on the handle sees no parameters."""
    named = list(Skips().named_parameters())
    made = [RankOptimizer(skips(), named, held, shares=[NAMES], ranks=2) for held in ({}, dict(named))]
    for handle in [PipelineOptimizer(each, apply=lambda _: None) for each in made]:
        handle.register_step_post_hook(
            lambda *_, of=handle: torch.stack([p.sum() for p in of.param_groups[0]["params"]])
        )
    with made[1].hooked(runs=True):
        made[1].local.step()
    with (
        pytest.raises(UsageError, match="fails on a rank that updates nothing: RuntimeError"),
        made[0].hooked(runs=False),
    ):
        pass


def test_a_shared_parameter_is_in_the_shares_of_all_that_hold_it():
    """Under the first of its names."""
    first, second = shares_of_language()
    assert first & second == {"tokens.weight"}
    assert "blocks.0.inner.weight" in first - second


TORCHS_OWN = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": ({"momentum": 0.9, "nesterov": True}, {"foreach": True}, {"fused": True, "momentum": 0.9}),
    "Adam": ({"amsgrad": True}, {"foreach": True}, {"fused": True}), "AdamW": ({"foreach": True}, {"fused": True}),
    "Adagrad": ({"foreach": True}, {"fused": True}), "RMSprop": ({"centered": True, "foreach": True},),
    **{name: ({"foreach": True},) for name in ("Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor")},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TORCHS_OWN.keys() - {"LBFGS"}))
def test_torchs_own_treat_each_parameter_by_itself(name, monkeypatch):
    """Every one that this torch has, in every form that runs on a CPU: so they are never put to the question."""
    matrices = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))  # Muon takes nothing else
    names = [each for each, _ in matrices.named_parameters()]
    shares = [names[:1], names[1:]]
    for form in ({}, *FORMS.get(name, ())):

        def build(parameters: Any, form: dict[str, Any] = form) -> torch.optim.Optimizer:
            made = TORCHS_OWN[name](parameters, lr=0.01, **form)
            if name == "SparseAdam":
                made.register_step_pre_hook(_sparse)
            return made

        assert is_known(TORCHS_OWN[name](matrices.parameters(), lr=0.01, **form))
        assert not check(lambda p, form=form: TORCHS_OWN[name](p, lr=0.01, **form), shares, matrices)
        with monkeypatch.context() as patch:
            patch.setattr("assigner.runtime.update.rankoptimizer.is_known", lambda _: False)
            named = list(matrices.named_parameters())
            handle = RankOptimizer(replace(skips(), optimizer=build), named, dict(named[:1]), shares=shares)
            assert handle.changes_gradients is (name == "SparseAdam")  # of its hook here


def _sparse(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                dense, each.grad = each.grad, None
                each.grad = dense.to_sparse()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_builders_of_daily_use_are_let_through(name):
    """Groups by name, shape and place, a tensor for a rate."""
    check(OPTIMIZERS[name], shares_of_language(), language().model())


def two_workers() -> Any:
    return make_plan(skips(), [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])


def test_one_worker_may_have_any_optimizer():
    """It has all parameters: the optimizer is the plain one; for two workers it is refused, and the run goes on."""
    made = replace(skips(), optimizer=lambda p: Clipping(p, lr=0.1))
    with Pipeline(made, make_plan(made), graph=graph_of(skips())) as pipeline:
        assert pipeline.step(made.make_batch(8, 0)) > 0
        with pytest.raises(UsageError, match="Clipping, with the hooks"):
            pipeline._rank_optimizer.check(shares_of(pipeline.graph, two_workers()))
        assert pipeline.step(made.make_batch(8, 0)) > 0


def test_the_optimizer_that_was_made_last_is_the_pipelines():
    """A builder may keep what it made, for a scheduler: the stand-ins' optimizers come before."""
    kept: list[torch.optim.Optimizer] = []

    def build(parameters: Any) -> torch.optim.Optimizer:
        kept.append(Sign(parameters))
        return kept[-1]

    named = list(Skips().named_parameters())
    before = [each.detach().clone() for _, each in named]
    state = torch.random.get_rng_state()
    handle = RankOptimizer(replace(skips(), optimizer=build), named, dict(named[:3]), shares=SHARES)
    assert handle.local is kept[-1]
    assert not kept[-1].log
    assert len(kept) > 2
    assert all(torch.equal(each, was) for (_, each), was in zip(named, before, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_one_that_cannot_be_tried_is_refused():
    """What fails with small tensors is told with its error."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        if all(each.dtype == torch.float64 for each in parameters):
            raise RuntimeError("too small")
        return Sign(parameters)

    with pytest.raises(UsageError, match=r"whether Sign treats .* UsageError: .* RuntimeError: too small") as caught:
        check(lambda parameters: build(list(parameters)))
    assert "at most 2 entries" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"whether StoppingSoon treats .* it fails: FloatingPointError: diverged"):
        check(StoppingSoon)


class Twice(torch.optim.SGD):
    """Takes the gradients of another point, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_one_that_needs_a_closure_says_so():
    """Not that it fails: what it calls is not there."""
    with pytest.raises(UsageError, match=r"Twice\.step needs a closure, which runs the forward again") as caught:
        check(lambda parameters: Twice(parameters, lr=0.1))
    assert "--max-workers 1" in (caught.value.hint or "")


def test_parameters_of_another_model_are_refused():
    """A closure over a model that was built beside the workload's, or over the loss's parameters."""
    model, loss = Skips(), nn.Linear(1, 1)
    named = list(Skips().named_parameters())
    builders = {
        8: lambda _: torch.optim.SGD(model.parameters(), lr=0.1),
        2: lambda p: torch.optim.SGD([*p, *loss.parameters()], lr=0.1),
    }
    for count, build in builders.items():
        with pytest.raises(UsageError, match=f"groups with {count} parameters that it was not given") as caught:
            RankOptimizer(replace(skips(), optimizer=build), named, dict(named))
        assert "lambda parameters" in (caught.value.hint or "")
    assert check(no_decay_by_name) is False


def test_a_group_without_parameters_is_refused():
    """Where they are chosen by comparison with those of the model that was built, or of one beside it."""
    model = Skips()
    chosen = list(model.parameters())[:2]
    ids = set(map(id, chosen))

    def build(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        slow, fast = ([each for each in given if (id(each) in ids) == wanted] for wanted in (True, False))
        return torch.optim.SGD([{"params": fast}, {"params": slow, "lr": 0.01}], lr=0.1)

    def by_themselves(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        slow, fast = ([p for p in given if any(p is each for each in chosen) == wanted] for wanted in (True, False))
        return torch.optim.SGD([{"params": fast}, {"params": slow, "lr": 0.01}], lr=0.1)

    named = list(model.named_parameters())
    held = {name: nn.Parameter(each.detach().clone()) for name, each in named}
    for given in (named, list(Skips().named_parameters())):
        for builder in (build, by_themselves):
            with pytest.raises(UsageError, match=r"param group 1 of Workload\.optimizer has no parameter") as caught:
                RankOptimizer(replace(skips(), optimizer=builder), given, held)
            assert "by name" in (caught.value.hint or "")
    kept: list[torch.optim.Optimizer] = []

    def by_name(named_parameters: Any) -> torch.optim.Optimizer:
        """As of the norms of a model that may have some."""
        groups = [[each for name, each in named_parameters if ("norm" in name) == wanted] for wanted in (True, False)]
        kept.append(torch.optim.SGD([{"params": each} for each in groups], lr=0.1))
        return kept[-1]

    made = RankOptimizer(replace(skips(), optimizer=by_name), named, held)
    assert made.local is kept[-1]
    assert made.groups.names == [(), NAMES]


def test_hooks_on_the_handle_need_one_worker():
    """They would see one worker's parameters: refused where several have some, and so is a move to several."""
    named = list(Skips().named_parameters())
    for shares in (SHARES, [NAMES]):
        made = RankOptimizer(skips(), named, dict(named), shares=shares)
        handle = PipelineOptimizer(made, apply=lambda _: None)
        for register in (handle.register_step_pre_hook, handle.register_step_post_hook):
            if shares is SHARES:
                with pytest.raises(UsageError, match="sees the parameters of one worker"):
                    register(lambda *_: None)
            else:
                register(lambda *_: None)
    made.check([NAMES])
    with pytest.raises(UsageError, match="sees the parameters of one worker"):
        made.check(SHARES)


def test_a_builder_that_asks_for_values_of_other_workers():
    """It is told what stands in for them."""
    with pytest.raises(UsageError, match=r"Workload\.optimizer failed at .*test_separability\.py:\d+") as caught:
        check(
            lambda parameters: torch.optim.SGD(list(parameters), lr=1 / float(sum(each.norm() for each in parameters)))
        )
    assert "no values" in (caught.value.hint or "")
