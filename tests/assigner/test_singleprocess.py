"""The user's code finds one process in torch.distributed, whatever the run has."""

from __future__ import annotations

import _thread
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from assigner.errors import UsageError
from assigner.model import singleprocess
from assigner.model.singleprocess import StandIns, as_rank, as_single_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def group() -> Iterator[None]:
    """A process group that says that it has one more process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def script() -> Iterator[Any]:
    """A module that has imported by name."""
    made: Any = types.ModuleType("a_script_of_somebody")
    made.world, made.get_rank, made.is_initialized = dist.get_world_size, dist.get_rank, dist.is_initialized
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def found_by(ask: Callable[[], Any], start: Callable[[Callable[[], None]], Any]) -> Any:
    """What another thread finds."""
    found, done = [], threading.Event()

    def work() -> None:
        found.append(ask())
        done.set()

    start(work)
    assert done.wait(60)
    return found[0]


@pytest.mark.usefixtures("group")
def test_answers_are_those_of_one_process(script: Any) -> None:
    """By attribute and by an imported name; our own code in between, and all behind it, is told the truth."""
    before = dist.is_initialized, script.is_initialized
    with as_single_process():
        assert (dist.is_initialized(), script.is_initialized()) == (False, False)
        assert (dist.get_world_size(), script.world(), dist.get_rank(), script.get_rank()) == (1, 1, 0, 0)
        with as_rank():
            assert (dist.is_initialized(), script.is_initialized()) == (True, True)
            with as_rank():
                assert dist.is_initialized()
            with as_single_process():
                assert not dist.is_initialized()
            assert dist.is_initialized()
        with as_single_process():
            assert not dist.is_initialized()
        assert not dist.is_initialized()
    assert (dist.is_initialized, script.is_initialized) == before
    assert dist.is_initialized()


@pytest.mark.usefixtures("group")
def test_a_step_puts_stand_ins_once(script: Any) -> None:
    """Around all of its blocks; in between and behind them the truth is told, also to what is imported meanwhile."""
    before = dist.get_world_size
    made: Any = types.ModuleType("a_file_of_somebody")
    made.initialized = dist.is_initialized
    with StandIns():
        assert dist.get_world_size is not before
        for late in (False, True):
            if late:  # a file that is loaded in the middle of a step, and has a function from before that
                sys.modules[made.__name__] = made
            with as_single_process():
                assert (dist.is_initialized(), script.is_initialized()) == (False, False)
                assert not late or not made.initialized()
            assert (dist.is_initialized(), script.is_initialized()) == (True, True)
            assert dist.get_world_size is not before
    del sys.modules["a_file_of_somebody"]
    assert dist.get_world_size is before
    assert made.initialized()


@pytest.mark.usefixtures("group")
def test_whose_thread_it_is() -> None:
    """A thread of Python's carries messages; one that Python did not start is autograd's, and runs the user's code."""
    for inside in (True, False):
        with as_single_process() if inside else as_rank():
            assert found_by(dist.is_initialized, lambda work: threading.Thread(target=work).start())
            ask = dist.is_initialized  # what stands there now
            assert found_by(ask, lambda work: _thread.start_new_thread(work, ())) is not inside


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [each for each in singleprocess._COLLECTIVES if hasattr(dist, each)])
def test_a_collective_is_refused(name: str) -> None:
    """It would meet nobody; also through a function of torch's own that is made of others."""
    with as_single_process(), pytest.raises(UsageError, match=f"calls torch.distributed.{name}: "):
        getattr(dist, name)(torch.ones(1))


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.usefixtures("group")
def test_a_differentiable_collective_is_refused() -> None:
    """Those of torch.distributed.nn call the others."""
    nn_functions = pytest.importorskip("torch.distributed.nn")
    with as_single_process(), pytest.raises(UsageError, match=r"calls torch\.distributed\."):
        nn_functions.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", singleprocess._FUNCTIONAL_COLLECTIVES)
def test_a_functional_collective_is_refused(name: str) -> None:
    """Those that compilers trace would wait for others until the run's time is out."""
    functional = pytest.importorskip(singleprocess._FUNCTIONAL)
    if not hasattr(functional, name):
        pytest.skip("this torch has none of that name")
    before = getattr(functional, name)
    with (
        as_single_process(),
        pytest.raises(UsageError, match=f"calls torch.distributed._functional_collectives.{name}: "),
    ):
        getattr(functional, name)(torch.ones(1), "sum", dist.group.WORLD)
    assert getattr(functional, name) is before
