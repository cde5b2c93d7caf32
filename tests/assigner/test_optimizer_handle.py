"""What a script does with `pipeline.optimizer` reaches the user's optimizer, whatever that names and overrides."""

from __future__ import annotations

import copy
import json
import math
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training_cases import make_scaler, overflowing
from training_optimizers import Counting
from workloads import Reference, make_plan, pipeline_of, skips

from assigner.errors import UsageError
from assigner.runtime.update.optimizer import PipelineOptimizer
from assigner.runtime.update.rankoptimizer import RankOptimizer

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks

EXACT = 1e-10


def made_with(build: Any) -> Any:
    return replace(skips(), optimizer=build)


def own_names() -> list[str]:
    """What the runtime's side of an optimizer has, by any name but Python's own and torch's."""
    named = dict(skips().model().named_parameters())
    of_runtime = dir(RankOptimizer(skips(), named.items(), named))
    return [name for name in of_runtime if not name.startswith("__") and not hasattr(torch.optim.Optimizer, name)]


NAMES = [name for name in own_names() if name not in {"state", "param_groups", "defaults"}]


class Damped(torch.optim.SGD):
    """Its rate is damped by attributes with names that the runtime has for things of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for name in NAMES:
            setattr(self, name, 1.0)

    def step(self, closure: Any = None) -> Any:
        factor = math.prod(getattr(self, name) for name in NAMES)
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.mul_(factor)
        return super().step(closure)


def test_every_name_is_the_users_optimizers():
    """Set and read through the handle, over a move too: `memory`, `local`, `groups`, and those with an underscore."""
    assert {"memory", "local", "groups", "mine", "move", "agree", "_hold"} <= set(NAMES)
    made = made_with(Damped)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for n, name in enumerate(NAMES):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=0, abs=EXACT)
            for each in (reference.optimizer, pipeline.optimizer):
                setattr(each, name, 0.9 + 0.2 * (n % 2))
            assert getattr(pipeline.optimizer, name) == getattr(reference.optimizer, name)
            if n == len(NAMES) // 2:
                pipeline.move(make_plan(made, micro_batches=2))
        assert reference.distance(pipeline.named_parameters()) < EXACT


class Defaulting(torch.optim.SGD):
    """Looks for an attribute that it does not have."""

    _least = 0.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = getattr(self, "_rate", 0.1)
        return super().step(closure)


def test_a_private_name_that_a_script_sets():
    """It is read by the optimizer, and by the script again; and so is what the optimizer has so named, on one rank."""
    made = made_with(Defaulting)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        torch.optim.lr_scheduler.StepLR(pipeline.optimizer, 1)
        for each in (reference.optimizer, pipeline.optimizer):
            each._rate = 0.01
        assert pipeline.optimizer._rate == 0.01
        assert pipeline.step(made.make_batch(8, 0)) == pytest.approx(reference.step(made.make_batch(8, 0)), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        del pipeline.optimizer._rate
        assert not hasattr(pipeline.optimizer, "_rate")
        assert pipeline.optimizer._least == 0.0
        assert isinstance(copy.deepcopy(pipeline.optimizer), torch.optim.Optimizer)


class Described(torch.optim.SGD):
    """Has properties of its groups and of its parameters, and numbers that it was built with."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.beta, self._gamma, self.count = math.exp(0.3), 0.5, 1.5

    @property
    def rate(self) -> float:
        return self.param_groups[0]["lr"] * self.beta

    @property
    def size(self) -> int:
        return sum(each.numel() for group in self.param_groups for each in group["params"])

    @property
    def known(self) -> int:
        return len(self.state)

    @property
    def any_known(self) -> bool:
        return any(self.state.get(each) for each in self.param_groups[0].get("params") or ())


def test_what_all_ranks_have_is_read_on_several():
    """Numbers of the groups and of the builder, over a move too; what is of this rank's parameters is refused."""
    named = dict(skips().model().named_parameters())
    made = RankOptimizer(made_with(Described), named.items(), named, shares=[list(named)], ranks=2)
    handle = PipelineOptimizer(made, apply=lambda _: None)
    with pytest.raises(UsageError, match=r"takes a closure and nothing else, and was given int, loss=\.\.\."):
        handle.step(None, 1, loss=0.5)
    for _ in range(2):
        assert (handle.beta, handle.rate) == (math.exp(0.3), 0.1 * math.exp(0.3))
        for name in ("size", "known", "any_known", "count"):
            if name != "count" or made.local.count != 1.5:
                with pytest.raises(AttributeError, match=f"{name} is what it has made of the parameters of this rank"):
                    getattr(handle, name)
        with pytest.raises(AttributeError, match="has for itself, by its name"):
            _ = handle._gamma
        made.local.count = 2.5  # as a step does
        made.move(named, {}, made.check([list(named)]))


class Decaying(torch.optim.SGD):
    """Keeps some of each gradient for the next step, and takes no argument."""

    def zero_grad(self) -> None:  # type: ignore[override]
        halve(self)


def halve(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                each.grad.mul_(0.5)


def of_a_class(parameters: Any) -> torch.optim.Optimizer:
    return Decaying(parameters, lr=0.05, momentum=0.5)


def on_an_object(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.05)
    made.zero_grad = types.MethodType(halve, made)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("build", [of_a_class, on_an_object, lambda p: torch.optim.SGD(p, lr=0.05)])
def test_gradients_that_its_zero_grad_keeps(build, is_scaled):
    """By the optimizer's class, its builder or the script: in `step`, over a move, and by hand; and under a scale.

    What is kept there is in the loss's own units: plain torch without a scaler.
    """
    scaler = make_scaler if is_scaled else lambda: None
    made = made_with(build)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), scaler=scaler()) as pipeline:
        if build not in (of_a_class, on_an_object):
            for each in (reference.optimizer, pipeline.optimizer):
                each.zero_grad = types.MethodType(halve, each)
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=0, abs=EXACT)
            if n == 1:
                pipeline.move(make_plan(made, micro_batches=2))
        assert reference.distance(pipeline.named_parameters()) < EXACT
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), scaler=scaler()) as pipeline:
        if build not in (of_a_class, on_an_object):
            for each in (reference.optimizer, pipeline.optimizer):
                each.zero_grad = types.MethodType(halve, each)
        for n in range(4):
            batch = made.make_batch(8, n)
            loss = reference.loss(batch)
            loss.backward()
            assert pipeline.step(batch, update=False) == pytest.approx(loss.item(), rel=0, abs=EXACT)
            if n % 2:
                for each in (reference.optimizer, pipeline.optimizer):
                    each.step()
                    each.zero_grad()
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert reference.gradient_distance(pipeline.gradients()) < EXACT


def counting(parameters: Any) -> torch.optim.Optimizer:
    return Counting(parameters, lr=0.1, momentum=0.5)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """The count is told by hooks of the builder's."""
    made = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    made.register_state_dict_post_hook(lambda _, told: {**told, "rate": 0.03})

    def before(of: Any, told: Any) -> Any:
        return {**told, "param_groups": [{**group, "lr": told["rate"]} for group in told["param_groups"]]}

    made.register_load_state_dict_pre_hook(before)
    return made


def halve_gradients(optimizer: Any, *_: Any) -> None:
    halve(optimizer)


def decay_weights(optimizer: Any, *_: Any) -> None:
    """By the largest gradient of each."""
    with torch.no_grad():
        for each in optimizer.param_groups[0]["params"]:
            each.mul_(1 - 0.01 * each.grad.abs().max())


def clip_each(optimizer: Any, *_: Any) -> None:
    for each in optimizer.param_groups[0]["params"]:
        if each.grad is not None:
            each.grad.clamp_(-0.05, 0.05)


def clipping_by_hook(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    made.register_step_pre_hook(clip_each)
    return made


@pytest.mark.parametrize("by_closure", [False, True])
def test_hooks_on_steps_run_once_and_in_torchs_order(by_closure):
    """Those on all optimizers, the builder's and the script's, over a move too; and before a closure is called."""
    made = made_with(clipping_by_hook)
    reference, seen = Reference(made), []
    with pipeline_of(made, make_plan(made)) as pipeline:
        on_all = [
            register_optimizer_step_pre_hook(halve_gradients),
            register_optimizer_step_post_hook(lambda *_: seen.append("all")),
        ]
        try:
            for n in range(4):
                batch, optimizers = made.make_batch(8, n), (reference.optimizer, pipeline.optimizer)
                if n == 1:
                    for each in optimizers:
                        each.register_step_pre_hook(halve_gradients)
                        gone = each.register_step_post_hook(lambda *_: seen.append("gone"))
                        each.register_step_post_hook(lambda o, *_, of=each: seen.append(o is of))
                        each.register_step_post_hook(decay_weights)
                        gone.remove()
                if n == 2:
                    pipeline.move(make_plan(made, micro_batches=2))

                def plain(batch: Any = batch) -> torch.Tensor:
                    reference.optimizer.zero_grad()
                    loss = reference.loss(batch)
                    loss.backward()
                    return loss

                def closure(batch: Any = batch) -> float:
                    pipeline.optimizer.zero_grad()
                    return pipeline.step(batch, update=False)

                if by_closure and n:
                    found, loss = pipeline.optimizer.step(closure), reference.optimizer.step(plain).item()
                else:
                    found, loss = pipeline.step(batch), reference.step(batch)
                assert found == pytest.approx(loss, rel=0, abs=EXACT)
                assert seen == ["all", "all"] if not n else [True, "all", True, "all"], n
                seen.clear()
            assert reference.distance(pipeline.named_parameters()) < EXACT
        finally:
            for each in on_all:
                each.remove()


def test_hooks_on_steps_under_a_loss_scale():
    """They see gradients without the scale; an update that an overflow skips calls none."""
    made, seen = overflowing(), []
    with pipeline_of(made, make_plan(made), scaler=make_scaler()) as pipeline:
        pipeline.optimizer.register_step_pre_hook(
            lambda o, *_: seen.append([each.grad.clone() for each in o.param_groups[0]["params"]])
        )
        pipeline.step(made.make_batch(1, 0))
        assert (seen, pipeline.steps) == ([], 0)
    made = skips()
    for scaler in (None, make_scaler()):
        with pipeline_of(made, make_plan(made), scaler=scaler) as pipeline:
            pipeline.optimizer.register_step_pre_hook(
                lambda o, *_: seen.append([each.grad.clone() for each in o.param_groups[0]["params"]])
            )
            pipeline.step(made.make_batch(8, 0))
    assert all(map(torch.equal, *seen))


class Lookahead(torch.optim.Optimizer):
    """One inside, with a form of its own for the state of both."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        with torch.no_grad():
            for each in (each for group in self.param_groups for each in group["params"]):
                slow = self.state[each].setdefault("slow", each.detach().clone())
                slow.lerp_(each, 0.5)
                each.copy_(slow)
        return loss

    def state_dict(self) -> Any:
        return {"base": self.base.state_dict(), "slow": [each["slow"] for each in self.state.values()]}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups
        every = (each for group in self.param_groups for each in group["params"])
        for each, slow in zip(every, state_dict["slow"], strict=True):
            self.state[each]["slow"] = slow.clone()


class Noted(torch.optim.SGD):
    """Has a count in its state, by a name that is no parameter's, which torch's own state dict has."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"]["n"] = self.state["count"].get("n", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["count"]["n"]
        return super().step(closure)


@pytest.mark.parametrize("build", [counting, hooked, Lookahead, lambda p: Noted(p, lr=0.1)])
def test_state_dicts_of_its_own(build):
    """What the optimizer or a hook on it adds is given and taken, as in plain torch; in another form too."""
    made = made_with(build)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        kept = []
        for n in range(7):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=0, abs=EXACT)
            if n == 1:
                kept = [copy.deepcopy(each.optimizer.state_dict()) for each in (reference, pipeline)]
            if n == 4:
                for each, state in zip((reference, pipeline), kept, strict=True):
                    each.optimizer.load_state_dict(state)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        if build is counting:
            assert kept[1]["count"] == 2
            assert set(kept[1]["state"]) == {name for name, _ in pipeline.named_parameters()}


def test_hooks_of_a_script_on_state_dicts():
    """Called in torch's order, with the handle; one that is taken off is not called."""
    made = skips()
    seen: list[Any] = []
    with pipeline_of(made, make_plan(made)) as pipeline:
        handle = pipeline.optimizer
        handle.register_state_dict_pre_hook(lambda each: seen.append(("before telling", each is handle)))
        handle.register_state_dict_post_hook(lambda each, told: {**told, "seen": each is handle})
        gone = handle.register_state_dict_post_hook(lambda each, told: {**told, "gone": each})
        gone.remove()
        handle.register_load_state_dict_pre_hook(
            lambda _, told: {**told, "param_groups": [{**each, "lr": told["rate"]} for each in told["param_groups"]]}
        )
        handle.register_load_state_dict_post_hook(lambda each: seen.append(each.param_groups[0]["lr"]))
        pipeline.step(made.make_batch(8, 0))
        told = handle.state_dict()
        assert told.keys() == {"state", "param_groups", "seen"}
        handle.load_state_dict({**told, "rate": 0.02})
        assert seen == [("before telling", True), 0.02]


class After(torch.optim.SGD):
    """Loads as torch does, and then sets its rate."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] = 0.004


def test_a_checkpoint_is_loaded_by_its_own_method(tmp_path):
    """`pipeline.load` calls it, too."""
    made = made_with(lambda parameters: After(parameters, lr=0.1, momentum=0.9))
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        pipeline.save(tmp_path / "saved")
        before = copy.deepcopy(pipeline.optimizer.state_dict()["state"])
        assert pipeline.optimizer.param_groups[0]["lr"] == 0.1
        pipeline.load(tmp_path / "saved")
        assert pipeline.optimizer.param_groups[0]["lr"] == 0.004
        after = pipeline.optimizer.state_dict()["state"]
        buffers = [[each["momentum_buffer"] for each in state.values()] for state in (before, after)]
        assert all(map(torch.equal, *buffers))


class Rounded(torch.optim.SGD):
    """Its own state dict has torch's keys, and other values."""

    def state_dict(self) -> Any:
        told = super().state_dict()
        return {**told, "param_groups": [{**group, "lr": 0.5} for group in told["param_groups"]]}


def test_a_checkpoint_without_what_its_own_state_dict_changes(tmp_path):
    """Refused, as what it adds; and so is what a hook of the builder's adds."""
    for build, words in ((lambda p: Rounded(p, lr=0.1), "another 'param_groups' in"), (hooked, "'rate' of")):
        made = made_with(build)
        with (
            pipeline_of(made, make_plan(made)) as pipeline,
            pytest.raises(UsageError, match=f"keeps {words} its own state_dict"),
        ):
            pipeline.save(tmp_path / "saved")


@pytest.mark.distributed
def test_several_ranks(forked: ForkedRanks, tmp_path: Path) -> None:
    """What one worker with all parameters may do is refused on several, in words; what drops gradients trains on."""
    for found in forked.found("own_optimizers.py", tmp_path, ranks=2):
        assert json.loads(json.dumps(found)) == {}
