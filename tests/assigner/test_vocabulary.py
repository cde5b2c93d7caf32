"""Which names a forward can reach anything by."""

from __future__ import annotations

import functools
import operator
import random
import random as chance
import sys
import types
from random import random as toss
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy import random as chance_of_numpy
from numpy.random import rand as toss_of_numpy
from torch import autograd, nn
from torch.autograd import grad as gradient
from workloads import WIDTH, make_plan, pipeline_of, workload

from assigner.errors import UsageError
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.reach import reach
from assigner.model.deferred.vocabulary import vocabulary_of
from assigner.model.marking import partition_graph

MADE: list[Any] = []
SCALE = 2.0


class Plain(nn.Module):
    """What a subclass calls in its forward reads `factor` and SCALE."""

    made = 0
    table: ClassVar[dict[str, float]] = {"factor": 2.0}

    def __init__(self) -> None:
        super().__init__()
        MADE.append(self)
        Plain.made += SCALE > 0
        self.factor, self.history = 2.0, [0.0]

    def forward(self, x: Any) -> Any:
        """As it is."""
        return x

    def scaled(self, x: Any) -> Any:
        """By both."""
        return x * self.factor * SCALE

    def report(self) -> Any:
        """Nobody calls it."""
        return self.factor, self.history, SCALE, MADE, Plain.table

    def extra_repr(self) -> str:
        """Nor does a forward call this."""
        return f"{self.factor}, {SCALE}"


def helper(module: Any, x: Any) -> Any:
    """In a file."""
    return module.scaled(x)


class Tool:
    """Calls the module that has it."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Any) -> Any:
        """By another method."""
        return self.run(x)

    def run(self, x: Any) -> Any:
        """Of the module."""
        return self.module.scaled(x)


def decorated(function: Any) -> Any:
    """Nothing is added."""

    @functools.wraps(function)
    def inner(*given: Any) -> Any:
        return function(*given)

    return inner


PARTIAL, GETTER = functools.partial(Plain.scaled), operator.methodcaller("scaled", 1.0)


class ByHelper(Plain):
    """By a method."""

    def forward(self, x: Any) -> Any:
        """The base's."""
        return self.scaled(x)


class ByProperty(Plain):
    """By a property."""

    @property
    def both(self) -> Any:
        """A number."""
        return self.scaled(1.0)

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return x * self.both


class ByGetattr(Plain):
    """By a text."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return getattr(self, "scaled")(x)  # noqa: B009 - as people write it


class ByAnyText(Plain):
    """By a text that is made."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return getattr(self, "".join(["sca", "led"]))(x)


class ByDict(Plain):
    """By its namespace."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return functools.reduce(operator.mul, [each for each in vars(self).values() if type(each) is float], x) * SCALE


class ByDecorator(Plain):
    """By what another function has made."""

    @decorated
    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        """Scaled."""
        return self.scaled(x)


class BySuper(ByHelper):
    """By its base."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return super().forward(x)


class ByNested(Plain):
    """By functions inside."""

    def forward(self, x: Any) -> Any:
        """Scaled."""

        def inner(each: Any) -> Any:
            return self.scaled(each)

        return [*map(inner, (x, x))][0]  # noqa: RUF015


class ByFile(Plain):
    """By a function of the file."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return helper(self, x)


class ByPartial(Plain):
    """By a partial function of the file."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return PARTIAL(self, x)


class ByGetter(Plain):
    """By one of Python's, in the file."""

    def forward(self, _: Any) -> Any:
        """Scaled."""
        return GETTER(self)


class ByTool(Plain):
    """By an object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.tool = Tool(self)

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return self.tool(x)


class ByMaking(Plain):
    """By an object that it makes."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        return Tool(self)(x)


class ByImport(Plain):
    """By a file that its forward imports."""

    def forward(self, x: Any) -> Any:
        """Scaled."""
        import imported_by_a_forward  # type: ignore[import-not-found]

        return imported_by_a_forward.anew(self, x)


class ByHook(Plain):
    """By a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, _, made: module.scaled(made))


imported = sys.modules["imported_by_a_forward"] = types.ModuleType("imported_by_a_forward")
imported.anew = helper  # type: ignore[attr-defined]

READERS = (
    ByHelper, ByProperty, ByGetattr, ByAnyText, ByDict, ByDecorator, BySuper, ByNested, ByFile, ByPartial, ByGetter,
    ByTool, ByMaking, ByImport, ByHook,
)  # fmt: skip


def kept_of(module: nn.Module) -> Memento:
    return Memento([("", module)], top="read", vocabulary=vocabulary_of([module]))


@pytest.mark.parametrize("kind", READERS)
def test_what_a_forward_can_reach_counts(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever leads there: an attribute, a name of the file, and the code itself."""
    module = kind()
    kept = kept_of(module)
    assert not kept.changes()
    module.factor = 3.0
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    changed = {"factor", "SCALE"}
    if kind not in (ByDict, ByHook):
        monkeypatch.setattr(kind, "forward", lambda _, x: x)
        changed.add("forward")
    assert {each.key for each in kept.changes()} == changed


@pytest.mark.parametrize("kind", [Plain, ByHelper, ByDecorator, BySuper, ByTool])
def test_what_no_code_of_it_names_does_not_count(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other methods name is theirs, as `__init__` and a report."""
    module = kind()
    kept = kept_of(module)
    kind()
    module.history.append(1.0)
    module.epoch = 1
    monkeypatch.setitem(Plain.table, "factor", 3.0)
    if kind is Plain:
        module.factor = 3.0
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert not kept.changes()


def test_another_function_at_the_top_of_the_file_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another number does."""
    kept = kept_of(ByFile())
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda _, x: x)
    assert [str(each.name) for each in kept.changes()] == ["test_vocabulary.helper"]


CONFIG = {"scale": 1.0}


class Block(nn.Linear):
    """Reads what its file has."""

    def __init__(self, config: dict[str, float]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled."""
        return super().forward(x) * self.config["scale"]


class Root(Plain):
    """Names it where it is made alone."""

    @functools.cached_property
    def count(self) -> int:
        """Of its parts."""
        return len(list(self.children()))

    @functools.lru_cache(maxsize=8)  # noqa: B019 - as people write it
    def positions(self, n: int) -> torch.Tensor:
        """For each place one."""
        return torch.arange(n) / n

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG
        self.blocks = nn.ModuleList([Block(CONFIG), nn.Linear(WIDTH, 1)])

    def forward(self, x: Any) -> Any:
        """One after the other."""
        for block in self.blocks:
            x = block(x + self.positions(x.size(1)))
        return x


def test_a_loop_may_change_what_code_between_partitions_does_not_read() -> None:
    """A config that partitions read reaches them; what a model notes for its script is the script's."""
    one = workload(Root, "blocks.*")
    with pipeline_of(one, make_plan(one, micro_batches=2)) as pipeline:
        model, (x, _) = pipeline.graph.deferred.model, one.make_batch(8, 0)
        first = pipeline.forward(x)
        CONFIG["scale"] = 2.0
        model.history.append(pipeline.step(one.make_batch(8, 0), update=False))
        model.epoch = model.count
        assert not torch.equal(first, pipeline.forward(x))
        CONFIG["scale"] = 1.0
        model.blocks[0].seen = [object()]
        pipeline.optimizer.zero_grad()
        pipeline.move(pipeline.plan)
        assert torch.equal(first, pipeline.forward(x))
        model.blocks[0].config = {"scale": 2.0}
        with pytest.raises(UsageError, match=r"has changed blocks\.0\.config, of"):
            pipeline.forward(x)


@pytest.mark.long
def test_a_model_may_be_built_again() -> None:
    """As `assigner check` does: that its class counts what it makes is no forward's."""
    graph = partition_graph(workload(Root, "blocks.*"))
    Root()
    graph.check_read()


class Aliased(Plain):
    """The module under another name."""

    def forward(self, x: Any) -> Any:
        return x * chance.gauss(0.0, 1.0)


class Imported(Plain):
    """A function of it under another name."""

    def forward(self, x: Any) -> Any:
        return x * toss()


class ImportedOfNumpy(Plain):
    """Likewise of NumPy's."""

    def forward(self, x: Any) -> Any:
        return x * toss_of_numpy()


class AliasedOfNumpy(Plain):
    """The module of NumPy's."""

    def forward(self, x: Any) -> Any:
        return x * chance_of_numpy.rand()


class ByPath(Plain):
    """By NumPy itself."""

    def forward(self, x: Any) -> Any:
        return x * np.random.rand()


class Held(Plain):
    """As an attribute, which another object calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tool, self.draw = Tool(self), random.random

    def forward(self, x: Any) -> Any:
        return self.tool.run(x) * self.draw()


class ByDefault(Plain):
    """As the argument that a call leaves out."""

    def forward(self, x: Any, draw: Any = random.random) -> Any:
        return x * draw()


class InFunction(Plain):
    """Imported where it is used."""

    def forward(self, x: Any) -> Any:
        import secrets as _  # noqa: F401
        from random import choice as pick

        return x * pick([1.0])


class OfNumpyAlone(Plain):
    """NumPy, and nothing that draws."""

    def forward(self, x: Any) -> Any:
        return x * np.sqrt(2.0)


@pytest.mark.parametrize(
    "kind",
    [Aliased, Imported, ImportedOfNumpy, AliasedOfNumpy, ByPath, Held, ByDefault, InFunction, ByAnyText],
)
def test_code_that_can_draw_is_told(kind: Any) -> None:
    """From the generators that all code shares, by whatever name; code that makes names can."""
    assert vocabulary_of([kind()]).draws


@pytest.mark.parametrize("kind", [Plain, ByHelper, ByDecorator, OfNumpyAlone])
def test_code_that_names_no_generator_cannot_draw(kind: Any) -> None:
    """And so nobody has to seed one for it."""
    assert not vocabulary_of([kind()]).draws


class Asks(nn.Module):
    """Runs one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        """As the function has it."""
        return self.function(x)


def by_text(x: Any) -> Any:
    """Names it in a text."""
    return getattr(x.weight, "grad", None)


def taken(x: Any) -> Any:
    """Of modules of Python's alone."""
    return torch.autograd.grad(x.sum(), x), autograd.grad(x.sum(), x), torch.func.grad(x), gradient(x.sum(), x)


def imported(x: Any) -> Any:
    """Nobody looks what a name in a function is."""
    from torch import autograd as within

    return within.grad(x.sum(), x)


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (taken, False), (by_text, True), (imported, True), (operator.attrgetter("weight.grad"), True),
        (lambda x: x.weight.grad, True), (lambda x: (torch.autograd.grad(x, x), [x.grad for _ in x]), True),
        (lambda x: setattr(x, "scale", 1), False), (lambda _: torch.Tensor.grad, True),
    ],
)  # fmt: skip
def test_who_asks_for_gradients(function, asks):
    """It is an object that is asked, or may be: `torch.autograd.grad` has the name, and asks none."""
    assert vocabulary_of([Asks(function)]).gradients is asks


def test_each_walk_meets_of_a_class_what_its_own_names_reach() -> None:
    """Whatever names another walk had before."""
    made = Plain()
    for vocabulary, is_met in ((vocabulary_of([made]), False), (None, True), (vocabulary_of([made]), False)):
        met = [each for _, each in reach({}, [("", made)], vocabulary=vocabulary)]
        assert any(each is Plain.table for each in met) is is_met
