"""On two ranks: optimizers with methods and state dicts of their own train as in plain torch, or are refused in words.

    torchrun --nproc-per-node 2 tests/runs/own_optimizers.py FOLDER

Writes FOLDER/RANK.json: case -> what is wrong.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from assigner import Pipeline, UsageError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from placements import divided
from training_optimizers import Counting
from workloads import Reference, graph_of, make_plan, skips

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import Workload
    from assigner.formats.plan import Plan

EXACT = 1e-10
NAMES = ["parts.0", "parts.1", "parts.2", "last"]


class Decaying(torch.optim.SGD):
    """Keeps some of each gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(0.5 if set_to_none else 0.25)


class Alternating(Decaying):
    """Every other time."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls % 2:
            torch.optim.SGD.zero_grad(self, set_to_none)
        else:
            super().zero_grad()


class Dropping(torch.optim.SGD):
    """Drops all gradients, and counts how often: its rate goes by that."""

    dropped = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.dropped += 1
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.dropped)
        return super().step(closure)


class Loading(torch.optim.SGD):
    """Does something more when it loads its state."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.loaded = True


class OfItsForm(torch.optim.SGD):
    """Its state dict is not torch's."""

    def state_dict(self) -> Any:
        return {"all": super().state_dict()}


def hooked(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_state_dict_post_hook(lambda _, told: {**told, "more": 1})
    return made


def rated(kind: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, lr=0.1)


def plans(made: Workload) -> dict[str, Plan]:
    shared = make_plan(made, [({0: 2, 1: 2}, NAMES)])
    return {
        "one": make_plan(made, [(1, NAMES)]), "other": make_plan(made, [(0, NAMES)], micro_batches=2),
        "two": make_plan(made, [(0, NAMES[:2]), (1, NAMES[2:])]), "shared": shared, "divided": divided(shared),
    }  # fmt: skip


def trains(build: Any, kind: str, to: str | None = None) -> None:
    """As in plain torch, by `step`, over a move if there is one; and by hand, with what was accumulated."""
    made = replace(skips(), optimizer=build)
    every = plans(made)
    reference = Reference(made)
    with Pipeline(made, every[kind], graph=graph_of(made)) as pipeline:
        for n in range(4):
            batch = made.make_batch(8, n)
            assert abs(pipeline.step(batch) - reference.step(batch)) < EXACT, n
            if n == 1 and to is not None:
                pipeline.move(every[to])
        assert reference.distance(pipeline.named_parameters()) < EXACT
    reference = Reference(made)
    with Pipeline(made, every[kind], graph=graph_of(made)) as pipeline:
        for n in range(4):
            batch = made.make_batch(8, n)
            loss = reference.loss(batch)
            loss.backward()
            assert abs(pipeline.step(batch, update=False) - float(loss.detach())) < EXACT, n
            for each in (reference.optimizer, pipeline.optimizer):
                if n % 2:
                    each.step()
                    each.zero_grad(set_to_none=n != 1)
        assert reference.distance(pipeline.named_parameters()) < EXACT


def loads(build: Any) -> None:
    """State dicts on the ranks of one worker are given and taken, before a move and after it."""
    made = replace(skips(), optimizer=build)
    every = plans(made)
    reference = Reference(made)
    with Pipeline(made, every["one"], graph=graph_of(made)) as pipeline:
        for n in range(6):
            batch = made.make_batch(8, n)
            assert abs(pipeline.step(batch) - reference.step(batch)) < EXACT, n
            if n == 2:
                pipeline.move(every["other"])
            if n in {1, 3}:
                told = [each.optimizer.state_dict() for each in (reference, pipeline)]
            if n in {1, 4}:
                for each, state in zip((reference, pipeline), told, strict=True):
                    each.optimizer.load_state_dict(state)


def refused(words: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except UsageError as error:
        assert words in str(error), error  # noqa: PT017 - this is no test function
    else:
        raise AssertionError(f"not refused: {words}")


def refuses(words: str, build: Any, kind: str) -> None:
    """The pipeline is not made, and another one does not move there."""
    made = replace(skips(), optimizer=build)
    every = plans(made)
    refused(words, lambda: Pipeline(made, every[kind], graph=graph_of(made)))
    with Pipeline(made, every["one"], graph=graph_of(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        refused(words, lambda: pipeline.move(every[kind]))
        pipeline.optimizer.register_step_post_hook(lambda *_: None)  # it is one worker's still
        pipeline.step(made.make_batch(8, 1))


def scaled(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def tells(words: str, act: str, build: Any, kind: str) -> None:
    """A script's call of the handle is refused, and training goes on."""
    made = replace(skips(), optimizer=build)
    with Pipeline(made, plans(made)[kind], graph=graph_of(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        folder = Path(sys.argv[1]) / "saved"
        calls: dict[str, Callable[[], Any]] = {
            "state_dict": pipeline.optimizer.state_dict, "save": lambda: pipeline.save(folder),
            "load_state_dict": lambda: pipeline.optimizer.load_state_dict(pipeline.optimizer.state_dict()),
            "scaled": lambda: scaled(pipeline.optimizer),
        }  # fmt: skip
        refused(words, calls[act])
        pipeline.step(made.make_batch(8, 1))


def holds_state() -> None:
    """A dict of state that the script has kept is empty when its parameter has left, and a warning names it."""
    for build in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: Dropping(p, lr=0.1, momentum=0.9)):
        made = replace(skips(), optimizer=build)
        every = plans(made)
        with Pipeline(made, every["one"], graph=graph_of(made)) as pipeline:
            pipeline.step(made.make_batch(8, 0))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                pipeline.move(every["other"])
            pipeline.step(made.make_batch(8, 1))
            weight = next((each for _, each in pipeline.named_parameters()), None)
            kept = pipeline.optimizer.state[weight] if weight is not None else None
            del weight
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                pipeline.move(every["one"])
            said = [str(each.message) for each in found]
            assert len(said) == (kept is not None), said
            assert all("still holds memory of the optimizer's state of parts.0.weight from" in each for each in said)
            assert not kept


def asks_elsewhere() -> None:
    """State of what another worker updates is not here, in words, also after a load and a move."""
    made = replace(skips(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    every = plans(made)
    with Pipeline(made, every["shared"], graph=graph_of(made)) as pipeline:
        state = pipeline.optimizer.state
        pipeline.step(made.make_batch(8, 0))
        assert {len(state[each]) for _, each in pipeline.named_parameters()} == {1}
        pipeline.move(every["divided"])
        assert pipeline.optimizer.state is state
        pipeline.step(made.make_batch(8, 1))
        for _ in range(2):
            state = pipeline.optimizer.state
            named = dict(pipeline.named_parameters())
            told = pipeline.optimizer.state_dict()["state"]
            assert 0 < len(told) < len(named)
            for name, each in named.items():
                assert (each in state) == (name in told)
                if name not in told:
                    words = f"the optimizer's state of {name!r} is not on this rank"
                    refused(words, lambda each=each, state=state: state[each]["momentum_buffer"])
                    refused(words, lambda each=each, state=state: state.__setitem__(each, {}))
            assert type(copy.deepcopy(state)) is defaultdict
            pipeline.optimizer.load_state_dict(pipeline.optimizer.state_dict())
        pipeline.move(every["other"])
        assert {len(pipeline.optimizer.state[each]) for _, each in pipeline.named_parameters()} <= {1}


def hooks_run(closure: bool) -> None:
    """Of the script, where one worker of two has all parameters: once on each rank, also over a move."""
    made = replace(skips(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    every, seen = plans(made), []
    reference = Reference(made)
    with Pipeline(made, every["one"], graph=graph_of(made)) as pipeline:
        for each in (reference.optimizer, pipeline.optimizer):
            each.register_step_pre_hook(halve)
        reference.optimizer.register_step_pre_hook(lambda *_: clip(reference.model, 0.1))
        pipeline.optimizer.register_step_pre_hook(lambda *_: clip(pipeline, 0.1))
        pipeline.optimizer.register_step_post_hook(lambda *_: seen.append(float(torch.rand(()))))
        state = torch.get_rng_state()
        for n in range(4):
            batch = made.make_batch(8, n)
            if closure:
                pipeline.optimizer.step(lambda batch=batch: taken(pipeline, batch))
                reference.optimizer.step(lambda batch=batch: taken_plainly(reference, batch))
            else:
                pipeline.step(batch)
                reference.step(batch)
            assert len(seen) == n + 1
            if n == 1:
                pipeline.move(every["other"])
        assert closure or (torch.equal(torch.get_rng_state(), state) and len(set(seen)) == 4)
        assert reference.distance(pipeline.named_parameters()) < EXACT


def taken(pipeline: Pipeline, batch: Any) -> float:
    pipeline.optimizer.zero_grad()
    return pipeline.step(batch, update=False)


def taken_plainly(reference: Reference, batch: Any) -> torch.Tensor:
    reference.optimizer.zero_grad()
    loss = reference.loss(batch)
    loss.backward()
    return loss


def clip(of: Any, norm: float) -> None:
    if isinstance(of, Pipeline):
        of.clip_grad_norm_(norm)
    else:
        torch.nn.utils.clip_grad_norm_(of.parameters(), norm)


def halve(optimizer: Any, *_: Any) -> None:
    for each in optimizer.param_groups[0]["params"]:
        if each.grad is not None:
            each.grad.mul_(0.5)


def notes(build: Any) -> None:
    """Each rank a number of its own, again and again; and none at all of what steps read."""
    made = replace(skips(), optimizer=build)
    with Pipeline(made, plans(made)["two"], graph=graph_of(made)) as pipeline:
        for n in range(3):
            pipeline.optimizer.last_step_s = 0.1 * n + float(os.environ["RANK"])
            pipeline.step(made.make_batch(8, n))
            assert pipeline.optimizer.last_step_s == 0.1 * n + float(os.environ["RANK"])


class CountingGroups(torch.optim.SGD):
    """Counts in each group that has parameters, and goes by that, as fused optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in filter(lambda group: group["params"], self.param_groups):
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


def counts(kind: str) -> None:
    """Every rank has the count of a group, also one that updates nothing of it."""

    def build(named_parameters: Any) -> torch.optim.Optimizer:
        groups = [[each for name, each in named_parameters if name.startswith(start)] for start in (*NAMES, "none")]
        return CountingGroups([{"params": each} for each in groups], lr=0.1)

    made = replace(skips(), optimizer=build)
    reference = Reference(made)
    with Pipeline(made, plans(made)[kind], graph=graph_of(made)) as pipeline:
        for n in range(3):
            assert abs(pipeline.step(made.make_batch(8, n)) - reference.step(made.make_batch(8, n))) < EXACT
        assert [group.get("count") for group in pipeline.optimizer.param_groups] == [3, 3, 3, 3, None]
        assert reference.distance(pipeline.named_parameters()) < EXACT


class CountingAlone(torch.optim.SGD):
    """Counts the updates of each group that has gradients in attributes of its own, and in its defaults all of them."""

    def step(self, closure: Any = None) -> Any:
        self.defaults["count"] = self.defaults.get("count", 0) + 1
        for n, group in enumerate(self.param_groups):
            if any(each.grad is not None for each in group["params"]):
                setattr(self, f"count{n}", getattr(self, f"count{n}", 0) + 1)
                group["seen"] = [*group.get("seen", []), self.defaults["count"]]
                group["lr"] = 0.1 / (getattr(self, f"count{n}") + self.defaults["count"] + len(group["seen"]))
        return super().step(closure)


def counts_alone(before: str, after: str) -> None:
    """Counts go along from a rank that updates all, and in groups; a move is refused where ranks have unlike ones."""

    def build(named_parameters: Any) -> torch.optim.Optimizer:
        groups = [[each for name, each in named_parameters if name.startswith(start)] for start in NAMES]
        return CountingAlone([{"params": each} for each in groups], lr=0.1)

    made = replace(skips(), optimizer=build)
    reference, every = Reference(made), plans(made)
    with Pipeline(made, every[before], graph=graph_of(made)) as pipeline:
        for n in range(4):
            assert abs(pipeline.step(made.make_batch(8, n)) - reference.step(made.make_batch(8, n))) < EXACT, n
            if n == 1 and before == "two":
                refused(
                    "keeps self.count0 beside the state of its parameters, which worker:0 and worker:1",
                    lambda: pipeline.move(every[after]),
                )
            elif n == 1:
                pipeline.move(every[after])
        assert reference.distance(pipeline.named_parameters()) < EXACT


def hook_on_all(kind: str, *, late: bool) -> None:
    """Runs once a step where it is tried out before; one that comes later is refused where several have parameters."""
    made, hooks = replace(skips(), optimizer=rated(torch.optim.SGD)), []
    reference = Reference(made)
    try:
        if not late:
            hooks.append(register_optimizer_step_pre_hook(halve))
        with Pipeline(made, plans(made)[kind], graph=graph_of(made)) as pipeline:
            if late:
                hooks.append(register_optimizer_step_pre_hook(halve))
                pipeline.step(made.make_batch(8, 0))
            for n in range(2):
                pipeline.step(made.make_batch(8, n))
                reference.step(made.make_batch(8, n))
            assert reference.distance(pipeline.named_parameters()) < EXACT
    finally:
        for each in hooks:
            each.remove()


def main() -> None:
    torch.set_num_threads(1)
    keeps, one_of = "zero_grad keeps something of the gradients", "state_dict() of its own, or hooks on it"
    count = "keeps 'count' of its own state_dict() beside the state"
    cases: dict[str, Callable[[], None]] = {
        "keeping, one": lambda: trains(rated(Decaying), "one"),
        "keeping, moved": lambda: trains(rated(Decaying), "one", "other"),
        "dropping, two": lambda: trains(rated(Dropping), "two"),
        "dropping, shared": lambda: trains(rated(Dropping), "shared"),
        "dropping, divided": lambda: trains(rated(Dropping), "divided"),
        "dropping, moved": lambda: trains(rated(Dropping), "divided", "two"),
        "telling": lambda: loads(rated(Counting)),
        "telling by hooks": lambda: loads(hooked),
        **{f"keeping, {kind}": lambda kind=kind: refuses(keeps, rated(Decaying), kind) for kind in ("two", "divided")},
        "keeping, shared": lambda: refuses(keeps, rated(Alternating), "shared"),
        "told, two": lambda: tells(count, "state_dict", rated(Counting), "two"),
        "told, hooks": lambda: tells("keeps 'more' of its own state_dict()", "state_dict", hooked, "divided"),
        "saved": lambda: tells(one_of, "save", rated(Loading), "two"),
        "loaded": lambda: tells(one_of, "load_state_dict", rated(Loading), "shared"),
        "state that is held": holds_state,
        "state elsewhere": asks_elsewhere,
        "hooks on steps": lambda: hooks_run(closure=False),
        "hooks on steps, closure": lambda: hooks_run(closure=True),
        "hook on all": lambda: hook_on_all("two", late=False),
        "late hook on all": lambda: refused(
            "was registered after the pipeline was made", lambda: hook_on_all("two", late=True)
        ),
        "notes": lambda: notes(rated(torch.optim.SGD)),
        "notes that may be read": lambda: refused("calls optimizer.last_step_s = ", lambda: notes(rated(Dropping))),
        "counts": lambda: counts("two"),
        "counts, divided": lambda: counts("divided"),
        "counts, moved": lambda: counts_alone("one", "two"),
        "counts, moved to divided": lambda: counts_alone("other", "divided"),
        "counts, unlike": lambda: counts_alone("two", "other"),
        "scaled": lambda: tells("at the gradients of this rank alone", "scaled", rated(torch.optim.SGD), "two"),
        "a form": lambda: tells("has another form than torch's", "state_dict", rated(OfItsForm), "one"),
    }  # fmt: skip
    wrong = {}
    for name, case in cases.items():
        try:
            case()
        except Exception as error:  # noqa: BLE001 - it is told
            wrong[name] = f"{type(error).__name__}: {error}"
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(wrong))


if __name__ == "__main__":
    main()
