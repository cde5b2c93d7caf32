"""The handle on the optimizer: what it refuses, its state by name, and what a builder of groups gets."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import two_networks
from training_cases import make_scaler, overflowing
from training_optimizers import muon_like, no_decay_by_name
from workloads import Reference, Skips, language, make_plan, pipeline_of, skips

from assigner.errors import FormatError, UsageError
from assigner.runtime.update.rankoptimizer import RankOptimizer


def test_it_is_an_optimizer():
    """Schedulers and hooks see a torch optimizer; its groups and state are those of the user's own."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        seen = []
        pipeline.optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        assert isinstance(pipeline.optimizer, torch.optim.Optimizer)
        assert isinstance(pipeline._rank_optimizer.local, torch.optim.SGD)
        pipeline.step(made.make_batch(8, 0))
        assert seen == ["stepped"]
        assert pipeline.optimizer.param_groups is pipeline._rank_optimizer.local.param_groups
        assert len(pipeline.optimizer.state) == 8


def test_no_other_one_takes_its_place():
    """One that a script made would know this rank's parameters alone; in words, and training goes on."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        with pytest.raises(UsageError, match=r"cannot be another one \(Adam\)") as caught:
            pipeline.optimizer = torch.optim.Adam(dict(pipeline.named_parameters()).values())
        assert "Workload(optimizer=" in (caught.value.hint or "")
        pipeline.step(made.make_batch(8, 0))


class Sharp(torch.optim.SGD):
    """As sharpness-aware minimisation: a second call of its closure gives the gradients after a step uphill."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        moves = [0.05 * each.grad for group in self.param_groups for each in group["params"]]
        self._move(moves, 1)
        with torch.enable_grad():
            closure()
        self._move(moves, -1)
        super().step()
        return loss

    @torch.no_grad()
    def _move(self, moves: Any, sign: int) -> None:
        for each, move in zip((p for group in self.param_groups for p in group["params"]), moves, strict=True):
            each.add_(move, alpha=sign)


@pytest.mark.parametrize("build", [torch.optim.LBFGS, lambda parameters: Sharp(parameters, lr=0.1)])
def test_closures_on_one_worker(build):
    """Optimizers that call their closure several times train as in plain torch, by `step` and by a closure by hand."""
    made = replace(skips(), optimizer=build)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        batch = made.make_batch(8, 0)

        def closure() -> float:
            pipeline.optimizer.zero_grad()
            return pipeline.step(batch, update=False)

        def plain() -> torch.Tensor:
            reference.optimizer.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            return loss

        for step in (lambda: pipeline.step(batch), lambda: pipeline.optimizer.step(closure)):
            assert step() == pytest.approx(float(reference.optimizer.step(plain).detach()), rel=0, abs=1e-10)
        assert reference.distance(pipeline.named_parameters()) < 1e-9
        assert pipeline.steps == 2
        with pytest.raises(UsageError, match=r"step needs a closure, and there is none"):
            pipeline.optimizer.step()


class TwoSteps(torch.optim.SGD):
    """Sharpness-aware minimisation with a backward between two calls."""

    @torch.no_grad()
    def first_step(self, *, zero_grad: bool = False) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["before"] = each.detach().clone()
            each.add_(each.grad, alpha=0.05)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            each.data = self.state[each]["before"]
        self.step()


def test_methods_of_its_own_on_one_rank():
    """A script that calls them trains as in plain torch; gradients with a loss scale are none for them."""
    made = replace(skips(), optimizer=lambda parameters: TwoSteps(parameters, lr=0.1))
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for n in range(3):
            batch, optimizer = made.make_batch(8, n), reference.optimizer
            for call in (lambda each: each.first_step(zero_grad=True), lambda each: each.second_step()):
                reference.loss(batch).backward()
                pipeline.step(batch, update=False)
                for each in (optimizer, pipeline.optimizer):
                    call(each)
            optimizer.zero_grad()
            pipeline.optimizer.zero_grad()
        assert reference.distance(pipeline.named_parameters()) < 1e-9
    with pipeline_of(made, make_plan(made), scaler=make_scaler()) as pipeline:
        pipeline.step(made.make_batch(8, 0), update=False)
        with pytest.raises(UsageError, match=r"optimizer\.first_step\(\) would find gradients that are multiplied"):
            pipeline.optimizer.first_step()


class Annealed(torch.optim.Adam):
    """Its steps have a factor that scripts set."""

    strength = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.clamp_(-self.strength, self.strength)
        return super().step(closure)

    def forget(self) -> None:
        self.state = defaultdict(dict)


def test_what_a_script_sets_reaches_the_one_that_runs():
    """State, param groups and an attribute of its own, as in a plain loop; a move takes them along."""
    made = replace(skips(), optimizer=lambda parameters: Annealed(parameters, lr=0.1))
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for n in range(4):
            if n == 3:
                pipeline.move(make_plan(made, micro_batches=2))
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=0, abs=1e-10)
            for each in (reference.optimizer, pipeline.optimizer):
                each.strength *= 0.01
                each.param_groups = [{**group, "lr": 0.5 * group["lr"]} for group in each.param_groups]
                if n != 2:
                    each.state = defaultdict(dict)
                each.note = [n]
            assert pipeline._rank_optimizer.local.strength == reference.optimizer.strength
            assert pipeline.optimizer.note == [n]
            del pipeline.optimizer.note
            assert not hasattr(pipeline.optimizer, "note")
        pipeline.optimizer.forget()
        assert not pipeline.optimizer.state
        assert reference.distance(pipeline.named_parameters()) < 1e-10


def test_groups_that_are_none_of_the_builders():
    """A list of parameters of the script's own is refused at once, or where it is asked what they are."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        groups = pipeline.optimizer.param_groups
        other = {**groups[0], "params": list(groups[0]["params"])}
        with pytest.raises(UsageError, match=r"param_groups\[0\] of pipeline\.optimizer has a list of parameters of"):
            pipeline.optimizer.param_groups = [other]
        assert pipeline.optimizer.param_groups is groups
        groups[0] = other
        pipeline.step(made.make_batch(8, 0))
        for act in (pipeline.optimizer.state_dict, lambda: pipeline.move(make_plan(made, micro_batches=2))):
            with pytest.raises(UsageError, match="list of parameters of its own"):
                act()
        pipeline.step(made.make_batch(8, 0))


def test_members_of_a_group_are_changed(tmp_path):
    """On one rank steps go on with them, as in plain PyTorch; what would bring the others back is refused."""
    made = skips()
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for each in (reference.optimizer, pipeline.optimizer):
            each.param_groups[0]["params"].pop()
        for n in range(2):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=0, abs=1e-10)
        assert reference.distance(pipeline.named_parameters()) < 1e-10
        state = {"state": {}, "param_groups": []}
        for act in (
            pipeline.optimizer.state_dict,
            lambda: pipeline.optimizer.load_state_dict(state),
            lambda: pipeline.move(make_plan(made, micro_batches=2)),
            lambda: pipeline.save(tmp_path / "saved"),
        ):
            with pytest.raises(UsageError, match=r"param_groups\[0\] of pipeline.optimizer has other parameters than"):
                act()
        pipeline.step(made.make_batch(8, 0))
    named = dict(made.model().named_parameters())
    one = RankOptimizer(made, named.items(), named, ranks=2)
    one.check_tried(lambda number: [number])
    one.param_groups[0]["params"][0] = torch.nn.Parameter(one.param_groups[0]["params"][0].detach())
    with pytest.raises(UsageError, match="other parameters than"):  # by its place each of several ranks has another one
        one.check_tried(lambda number: [number])


def by_dimensions(parameters: Any) -> torch.optim.Optimizer:
    """Weights, and biases."""
    every = list(parameters)
    return torch.optim.Adam([{"params": [each for each in every if each.dim() == n]} for n in (2, 1)], lr=0.1)


def test_a_group_is_taken_out(tmp_path):
    """Its parameters are not trained any more; states, checkpoints and moves are those of the groups that are left."""
    made = replace(skips(), optimizer=by_dimensions)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for n in range(4):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=0, abs=1e-10)
            if n == 1:
                left = pipeline._rank_optimizer.groups.names[1:]
                for each in (reference.optimizer, pipeline.optimizer):
                    del each.param_groups[0]
                pipeline.save(tmp_path / "saved")
            if n == 2:
                pipeline.move(make_plan(made, micro_batches=2))
        assert reference.distance(pipeline.named_parameters()) < 1e-10
        assert [tuple(group["params"]) for group in pipeline.optimizer.state_dict()["param_groups"]] == left
        pipeline.optimizer.load_state_dict(pipeline.optimizer.state_dict())
        pipeline.load(tmp_path / "saved")
    with pipeline_of(made, make_plan(made)) as pipeline, pytest.raises(FormatError, match="is missing"):
        pipeline.load(tmp_path / "saved")


class Around(torch.optim.Optimizer):
    """Lookahead as many scripts have it: without a call of Optimizer.__init__."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.Adam(parameters, lr=0.1)
        self.param_groups, self.state = self.inner.param_groups, defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                slow = self.state[each].setdefault("slow", torch.zeros_like(each))
                slow += 0.5 * (each - slow)
                each.copy_(slow)
        return loss


def test_one_around_another_that_is_not_initialised(tmp_path):
    """It trains as in plain torch, which has no state_dict() of it: a checkpoint and a move are refused in words."""
    made = replace(skips(), optimizer=Around)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            reference.model.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            reference.optimizer.step()
            assert pipeline.step(batch) == pytest.approx(loss.item(), rel=0, abs=1e-10)
        for act in (lambda: pipeline.save(tmp_path / "saved"), lambda: pipeline.move(make_plan(made, micro_batches=2))):
            with pytest.raises(UsageError, match=r"Around keeps self\.inner beside the state of its parameters"):
                act()
        with pytest.raises(UsageError, match=r"Around\.step calls no hooks"):
            pipeline.optimizer.register_step_post_hook(lambda *_: None)


def test_a_history_is_in_no_checkpoint(tmp_path):
    """LBFGS keeps lists, which are refused with what to do; without them a checkpoint is saved and loaded."""
    made = replace(skips(), optimizer=torch.optim.LBFGS)
    with pipeline_of(made, make_plan(made)) as pipeline:
        batch = made.make_batch(8, 0)
        pipeline.step(batch)
        with pytest.raises(UsageError, match="is a list") as refused:
            pipeline.save(tmp_path / "saved")
        assert "state.clear" in str(refused.value.hint)
        pipeline.optimizer.state.clear()
        pipeline.save(tmp_path / "saved")
        after = [pipeline.step(batch), pipeline.step(batch)]
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.load(tmp_path / "saved")
        assert [pipeline.step(batch), pipeline.step(batch)] == after


def test_closures_that_are_not_for_pipelines():
    """LBFGS where two workers have parameters, or under a loss scale; and added groups."""
    made = skips()
    searching = replace(made, optimizer=torch.optim.LBFGS)
    named = dict(made.model().named_parameters())
    first = next(iter(named))
    with pytest.raises(UsageError, match=r"LBFGS\.step needs a closure, which .*; under this one 2 workers"):
        RankOptimizer(searching, named.items(), named, shares=[{first}, named.keys() - {first}])
    with (
        pipeline_of(searching, make_plan(made), scaler=make_scaler()) as pipeline,
        pytest.raises(UsageError, match="loss scale cannot go with a closure"),
    ):
        pipeline.step(made.make_batch(8, 0))
    with (
        pipeline_of(made, make_plan(made)) as pipeline,
        pytest.raises(UsageError, match="groups cannot be added") as refused,
    ):
        pipeline.optimizer.add_param_group({"params": []})
    assert "requires_grad_(False)" in (refused.value.hint or "")


def test_kept_buffers():
    """Forwards of the block leave no trace in buffers that match, and move the others; another pattern is refused."""
    made = two_networks.workload()
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        before = {name: each.detach().clone() for name, each in pipeline.state_dict().items()}
        with pipeline.kept_buffers("generator.**"):
            pipeline.step(made.make_batch(8, 0))
        moved = {name for name, each in pipeline.state_dict().items() if not torch.equal(each, before[name])}
        assert {name for name in moved if "running" in name} == {
            "discriminator.0.1.running_mean", "discriminator.0.1.running_var"
        }  # fmt: skip
        with (
            pytest.raises(UsageError, match="the model has no such buffer"),
            pipeline.kept_buffers("generator.*"),
        ):
            pass


def test_a_builder_that_fails_is_named():
    """The error of a builder, and a result that is no optimizer, are the workload's."""
    made = skips()
    with pytest.raises(UsageError, match=r"Workload\.optimizer failed at .*ZeroDivisionError"):
        pipeline_of(replace(made, optimizer=lambda _: 1 / 0), make_plan(made))
    with pytest.raises(UsageError, match=r"Workload\.optimizer gave list"):
        pipeline_of(replace(made, optimizer=list), make_plan(made))


def test_names_and_shapes_of_the_whole_model():
    """A builder gets every parameter of the model once, in its order, with or without names."""
    made, seen = language(), []

    def named(named_parameters: Any) -> torch.optim.Optimizer:
        seen.extend(named_parameters)
        return torch.optim.SGD([each for _, each in seen], lr=0.1)

    with pipeline_of(replace(made, optimizer=named), make_plan(made)) as pipeline:
        model = made.model()
        expected = {name: each.shape for name, each in model.named_parameters()}
        assert {name: each.shape for name, each in seen} == expected
        assert [name for name, _ in seen] == list(expected)
        assert pipeline._rank_optimizer.groups.names == [tuple(expected)]


def named_adam(named_parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named_parameters)


@pytest.mark.parametrize("build", [muon_like, no_decay_by_name, named_adam])
def test_state_goes_by_name(build):
    """What state_dict gave is taken over by another handle, which then makes the same steps; numbers stay numbers."""
    made = replace(language(), optimizer=build)
    with pipeline_of(made, make_plan(made)) as one, pipeline_of(made, make_plan(made)) as other:
        for n in range(2):
            one.step(made.make_batch(8, n))
        state = one.optimizer.state_dict()
        assert set(state["state"]) == {name for name, _ in one.named_parameters()}
        assert [tuple(group["params"]) for group in state["param_groups"]] == one._rank_optimizer.groups.names
        state["param_groups"][0]["lr"] = 0.003
        with torch.no_grad():
            for (_, mine), (_, theirs) in zip(other.named_parameters(), one.named_parameters(), strict=True):
                mine.copy_(theirs)
        for pipeline in (one, other):
            pipeline.optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps the tensors that it is given
            assert pipeline.optimizer.param_groups[0]["lr"] == 0.003
        losses = [[pipeline.step(made.make_batch(8, n)) for n in (2, 3)] for pipeline in (one, other)]
        assert losses[0] == losses[1]


def test_state_of_other_groups_is_refused():
    """The error says so, and nothing has changed."""
    made = language()
    with pipeline_of(made, make_plan(made)) as one:
        one.step(made.make_batch(8, 0))
        state = one.optimizer.state_dict()
    with pipeline_of(replace(made, optimizer=no_decay_by_name), make_plan(made)) as other:
        with pytest.raises(UsageError, match="other param groups"):
            other.optimizer.load_state_dict(state)
        assert not other.optimizer.state
    with pipeline_of(made, make_plan(made)) as pipeline:
        reference = Reference(made)
        reference.step(made.make_batch(8, 0))
        numbered = reference.optimizer.state_dict()
        for given, words, hint in (
            (numbered, "the state has numbers for parameters", "give the numbers names"),
            ({}, "this has nothing", "state_dict"), ({"optimizer": state}, "this has 'optimizer'", "that part"),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=words) as caught:
                pipeline.optimizer.load_state_dict(given)
            assert hint in (caught.value.hint or "")
        groups = pipeline.optimizer.state_dict()["param_groups"]  # as the hint says
        names = [name for group in groups for name in group["params"]]
        named = {"state": {names[n]: each for n, each in numbered["state"].items()}, "param_groups": groups}
        pipeline.optimizer.load_state_dict(named)
        plain = {name: reference.optimizer.state[each] for name, each in reference.model.named_parameters()}
        found = pipeline.optimizer.state_dict()["state"]
        assert all(torch.equal(found[name][key], plain[name][key]) for name in plain for key in plain[name])


def test_a_state_without_what_this_rank_updates_is_refused():
    """As one of another rank, or of another plan; what has no state yet has an empty entry, and begins anew."""
    made = language()
    with pipeline_of(made, make_plan(made)) as pipeline:
        begun = pipeline.optimizer.state_dict()
        pipeline.step(made.make_batch(8, 0))
        state = pipeline.optimizer.state_dict()
        assert begun["state"].keys() == state["state"].keys()
        name, entry = state["state"].popitem()
        with pytest.raises(UsageError, match=f"has nothing of {name!r}, which this rank updates"):
            pipeline.optimizer.load_state_dict(state)
        assert pipeline.optimizer.state_dict()["state"][name].keys() == entry.keys()
        pipeline.optimizer.load_state_dict(begun)
        assert not pipeline.optimizer.state
        pipeline.step(made.make_batch(8, 1))


def test_norms_that_make_no_sense():
    """A norm type that is not positive, clipping in a step without an update, and of no parameters, are refused."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        with pytest.raises(UsageError, match="max_norm without an update"):
            pipeline.step(made.make_batch(8, 0), update=False, max_norm=1.0)
        pipeline.step(made.make_batch(8, 0), update=False)
        with pytest.raises(UsageError, match="norm_type=0"):
            pipeline.clip_grad_norm_(1.0, 0)
        assert pipeline.clip_grad_norm_(math.inf, "inf") == pipeline.clip_grad_norm_(math.inf, math.inf)  # as torch's
        with pytest.raises(UsageError, match="no module with parameters, has a name as 'part'"):
            pipeline.clip_grad_norm_(1.0, names=("last", "part"))


def test_sums_over_parameters_are_exact_and_of_numbers_by_name():
    """As exact as a float can be; other names, and what is no number, are refused."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        names = [name for name, _ in pipeline.named_parameters()]
        numbers = 1e16, 1.0, torch.tensor([-1e16], dtype=torch.float64)
        assert pipeline.sum_over_parameters(dict(zip(names, numbers, strict=False))) == 1.0
        assert pipeline.sum_over_parameters(dict.fromkeys(names[:2], math.inf)) == math.inf
        with pipeline_of(made, make_plan(made), training=False) as evaluated:
            assert (
                evaluated.sum_over_parameters({name: p.sum() * 0 + 1 for name, p in evaluated.named_parameters()}) == 8
            )
        with pytest.raises(UsageError, match="'nobody' is no parameter of this rank's"):
            pipeline.sum_over_parameters({"nobody": 1.0})
        with pytest.raises(UsageError, match=rf"for {names[0]} there is a tensor of shape \(2,\)"):
            pipeline.sum_over_parameters({names[0]: torch.ones(2)})


class ListsAPart(Skips):
    """One of its layers has gradients that overflow, and is none that it lists."""

    def __init__(self) -> None:
        super().__init__()
        self.parts[1].weight.register_hook(lambda gradient: gradient * torch.inf)

    def named_parameters(self, *args: Any, **words: Any) -> Any:
        return ((name, each) for name, each in super().named_parameters(*args, **words) if "parts.1" not in name)


@pytest.mark.parametrize("scaler", [False, True])
def test_gradients_of_what_a_model_does_not_list(scaler):
    """As in plain torch they are in no norm, and their overflow stops no update."""
    made = replace(skips(), model=lambda: ListsAPart().double())
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), scaler=make_scaler() if scaler else None) as pipeline:
        for n in range(2):
            reference.optimizer.zero_grad()
            reference.loss(made.make_batch(8, n)).backward()
            torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
            torch.nn.utils.clip_grad_value_(reference.model.parameters(), 0.01)
            reference.optimizer.step()
            pipeline.step(made.make_batch(8, n), update=False)
            pipeline.clip_grad_norm_(0.1)
            pipeline.clip_grad_value_(0.01)
            pipeline.optimizer.step()
            pipeline.optimizer.zero_grad()
        assert pipeline.steps == 2
        listed = dict(reference.model.named_parameters())
        assert reference.distance((name, p) for name, p in pipeline.named_parameters() if name in listed) < 1e-10


def test_parameters_all_together_are_refused():
    """torch's clipping over a pipeline's parameters would be by one rank's norm: the message has what does it right."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0), update=False)
        with pytest.raises(UsageError, match=r"a pipeline has no parameters\(\)") as caught:
            torch.nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0)
        assert "pipeline.clip_grad_norm_" in (caught.value.hint or "")


def test_what_plain_scripts_call_has_a_hint():
    """Of a model and of its loss: the message says what stands in its place; `hasattr` finds nothing."""
    made = skips()
    with pipeline_of(made, make_plan(made)) as pipeline:
        loss = pipeline.step(made.make_batch(8, 0))
        for of, name in ((pipeline, "train"), (pipeline, "eval"), (pipeline, "to"), (loss, "backward"), (loss, "item")):
            assert not hasattr(of, name)
            with pytest.raises(AttributeError, match=rf"has no {name}\(\)\n?") as caught:
                getattr(of, name)
            assert isinstance(caught.value, UsageError)
            assert caught.value.hint
        with pytest.raises(UsageError, match="is not called as a model is"):
            pipeline(made.make_batch(8, 0)[0])


def test_a_pipeline_is_not_taken_for_a_model():
    """It has no model inside, is not copied, pickled or converted, and takes a batch as one argument."""
    made = skips()
    x, y = made.make_batch(8, 0)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for name in ("model", "module", "half", "bfloat16"):
            assert getattr(pipeline, name, None) is None
            with pytest.raises(UsageError, match=f"a pipeline has no {name}") as caught:
                getattr(pipeline, name)
            assert caught.value.hint
        for ask in (
            copy.deepcopy,
            copy.copy,
            pickle.dumps,
            torch.optim.swa_utils.AveragedModel,
            lambda of: torch.save(of, io.BytesIO()),
        ):
            with pytest.raises(UsageError, match="a pipeline is neither copied nor pickled"):
                ask(pipeline)
        for method in ("step", "evaluate", "forward"):
            with pytest.raises(UsageError, match=f"pipeline.{method} takes one argument by its place, and was given 2"):
                getattr(pipeline, method)(x, y)
        with pytest.raises(UsageError, match="is not called as a model is") as caught:
            pipeline(x)
        assert "Workload(compile=True)" in (caught.value.hint or "")
        assert float(pipeline.step((x, y))) > 0


def test_gradients_are_seen_without_the_scale():
    """gradients() is the same with and without a scaler, before and after they are unscaled."""
    made = overflowing()
    made = replace(made, model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).double())
    made = replace(made, marks=(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    batch = made.make_batch(8, 0)
    with (
        pipeline_of(made, make_plan(made)) as plain,
        pipeline_of(made, make_plan(made), scaler=make_scaler()) as scaled,
    ):
        for pipeline in (plain, scaled):
            pipeline.step(batch, update=False)
            pipeline.step(batch, update=False)
        expected = plain.gradients()
        assert all(torch.equal(each, expected[name]) for name, each in scaled.gradients().items())
        assert scaled.clip_grad_norm_(1e9) == plain.clip_grad_norm_(1e9)
        assert all(torch.equal(each, expected[name]) for name, each in scaled.gradients().items())
        for pipeline in (plain, scaled):  # scaled again, so that both kinds add up
            pipeline.step(batch, update=False)
            pipeline.optimizer.step()
        assert all(torch.equal(each, plain.state_dict()[name]) for name, each in scaled.state_dict().items())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_that_fails_leaves_gradients_and_hooks(schedule):
    """A script that leaves out its batch goes on; not where half of its gradients have come to others."""

    def model() -> torch.nn.Module:
        made = skips().model()
        made.last.weight.register_hook(lambda gradient: 2 * gradient)
        return made

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if targets.isnan().any():
            raise ArithmeticError("no label")
        return torch.nn.functional.mse_loss(outputs, targets)

    made = replace(skips(), model=model, loss=loss)
    reference = Reference(made)
    good, bad = made.make_batch(8, 0), made.make_batch(8, 1)
    bad[1][-1] = torch.nan
    plan = make_plan(made, schedule=schedule)
    with pipeline_of(made, plan) as pipeline:
        for n in range(2):
            with pytest.raises(ArithmeticError):
                pipeline.step(bad, update=False)
            if n == 1 and schedule == "1f1b":  # its first micro-batches' backwards have run
                for use in (pipeline.optimizer.step, lambda: pipeline.step(good), lambda: pipeline.move(plan)):
                    with pytest.raises(UsageError, match="failed when some of its micro-batches had added"):
                        use()
                pipeline.optimizer.zero_grad()
                reference.optimizer.zero_grad()
            pipeline.step(good, update=False)
            reference.loss(good).backward()
            assert reference.gradient_distance(pipeline.gradients()) < 1e-12


def test_an_overflow_is_kept_until_the_update():
    """Clipping makes the gradients finite and other batches follow: the update is skipped, and the next one is not."""
    made = overflowing()
    batch = made.make_batch(1, 0)  # of one row: infinities of several would add up to what is no number
    with pipeline_of(made, make_plan(made), scaler=make_scaler()) as pipeline:
        pipeline.step(batch, update=False)
        pipeline.clip_grad_value_(1.0)
        assert all(bool(each.isfinite().all()) for each in pipeline.gradients().values())
        pipeline.step(batch, update=False, scale=0.0)
        pipeline.optimizer.step()
        assert (pipeline.steps, pipeline.scaler.get_scale()) == (0, make_scaler().get_scale() / 2)
        pipeline.optimizer.zero_grad()
        pipeline.step(batch, scale=0.0)
        assert pipeline.steps == 1


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_scaler_that_the_script_calls(by_hand):
    """As in a plain loop: the gradients would be divided by the scale twice."""
    made = skips()
    with pipeline_of(made, make_plan(made), scaler=make_scaler()) as pipeline:
        pipeline.scaler.scale(torch.zeros(()))  # of another model's loss
        pipeline.step(made.make_batch(8, 0), update=False)
        if by_hand:
            pipeline.scaler.unscale_(pipeline.optimizer)
        with pytest.raises(UsageError, match=r"was called with pipeline\.optimizer") as caught:
            pipeline.optimizer.step() if by_hand else pipeline.scaler.step(pipeline.optimizer)
        assert "pipeline.optimizer.step() is" in (caught.value.hint or "")


def test_a_scaler_of_another_kind():
    """What is no GradScaler is refused by name; a disabled one switches scaling off."""
    made = skips()
    with pytest.raises(UsageError, match="scaler=65536"):
        pipeline_of(made, make_plan(made), scaler=65536)
    with pipeline_of(made, make_plan(made)) as pipeline:
        assert not pipeline.scaler.is_enabled()
