"""State from batch to batch is that of a plain loop, however a batch is cut, recomputed, saved and moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recurrent_cases import ROWS, PlainLoop, batches_of, feedback, train, words
from workloads import graph_of, language, make_plan

from assigner import Pipeline, Workload
from assigner.errors import FormatError, UsageError

EXACT = 1e-9


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("count", "schedule"), [(2, "1f1b"), (1, "gpipe"), (4, "gpipe")])
def test_as_a_plain_loop(count, schedule):
    """Losses, evaluations in between, accumulated gradients and weights, with nothing, some and all recomputed."""
    for made in (words(), feedback(), words(none=True)):
        names = [piece.name for piece in graph_of(made).pieces]
        plan = make_plan(made, micro_batches=count, schedule=schedule, remat=names[1:2])
        for remat in ("never", "plan", "always"):
            with Pipeline(made, plan, graph=graph_of(made), remat=remat) as pipeline:
                assert train(pipeline, PlainLoop(made)) < EXACT


def test_dropout_and_recomputing():
    """With dropout a recompute reads the state that its first forward read: losses and weights to the last digits."""
    made, found = words(dropout=0.3), []
    for remat in ("never", "always"):
        with Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made), remat=remat) as pipeline:
            losses = [pipeline.step(batch) for batch in batches_of(made, 4)]
            found.append((losses, {name: each.detach().clone() for name, each in pipeline.named_parameters()}))
    (losses, weights), (others, other_weights) = found
    assert max(abs(a - b) for a, b in zip(losses, others, strict=True)) < EXACT
    assert max(float((weights[name] - other_weights[name]).abs().max()) for name in weights) < EXACT


def test_saved_and_moved(tmp_path):
    """A state goes on under a plan with other micro-batches, from a checkpoint and after a move."""
    made = words()
    plain, plans = PlainLoop(made), [make_plan(made, micro_batches=count) for count in (4, 2, 1)]
    with Pipeline(made, plans[0], graph=graph_of(made)) as pipeline:
        assert train(pipeline, plain) < EXACT
        pipeline.save(tmp_path / "saved")
        pipeline.step(batches_of(made, 1, 90)[0])
    with Pipeline(made, plans[1], graph=graph_of(made)) as pipeline:
        pipeline.load(tmp_path / "saved")
        assert train(pipeline, plain, first=20) < EXACT
        pipeline.move(plans[2])
        assert train(pipeline, plain, first=40) < EXACT
        pipeline.move(plans[0])
        assert train(pipeline, plain, first=60) < EXACT
    with (
        Pipeline(replace(made, carried=None), plans[0], graph=graph_of(made)) as pipeline,
        pytest.raises(FormatError, match="is no state of this workload"),
    ):
        pipeline.load(tmp_path / "saved")


def test_other_rows():
    """A batch of other rows is refused, and begins anew where it is asked to; a step after that is a plain one."""
    made = words()
    with Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made)) as pipeline:
        pipeline.step(batches_of(made, 1)[0])
        fewer = batches_of(made, 1, 1, rows=ROWS - 2)[0]
        with pytest.raises(UsageError, match="of 7 rows, and this batch has 5"):
            pipeline.step(fewer)
    plain = PlainLoop(made)
    with Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made)) as pipeline:
        for batch in (*batches_of(made, 1), fewer):
            pipeline.reset_carried(evaluation=False)
            plain.state = None
            assert abs(pipeline.step(batch) - plain.step(batch)) < EXACT


def searched(plain, batch):
    """A plain step of LBFGS, whose evaluations all begin with the state that the batch before left."""
    begun = plain.state

    def closure():
        plain.state = begun
        plain.optimizer.zero_grad()
        loss = plain.loss(batch)
        loss.backward()
        return loss

    return plain.optimizer.step(closure).item()


def searched_by_hand(pipeline, batch):
    """The same by a closure of the script."""

    def closure():
        pipeline.optimizer.zero_grad()
        return pipeline.step(batch, update=False)

    return pipeline.optimizer.step(closure)


@pytest.mark.parametrize("step", [Pipeline.step, searched_by_hand])
def test_every_evaluation_of_a_closure_begins_alike(step):
    """LBFGS asks for one batch's loss several times: each time with what the batch before has left."""
    made = replace(words(), optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))
    plain = PlainLoop(made)
    with Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made)) as pipeline:
        for batch in batches_of(made, 3):
            assert abs(step(pipeline, batch) - searched(plain, batch)) < EXACT
        assert plain.distance(pipeline.named_parameters()) < EXACT


def test_forwards_hand_on():
    """Forwards go on from each other, and their outputs have the state that they leave."""
    made = words()
    plain, batches = PlainLoop(made), batches_of(made, 2)
    with Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made), training=False) as pipeline:
        for (ids, given), _ in batches:
            wanted = plain.output((ids, given if plain.state is None else plain.state))
            plain.state = wanted[1]
            scores, (hidden, cell) = pipeline.forward((ids, given))
            for mine, other in zip((scores, hidden, cell), (wanted[0], *wanted[1]), strict=True):
                torch.testing.assert_close(mine, other, atol=EXACT, rtol=0)


@pytest.mark.long
def test_autocast():
    """Under autocast a state keeps the type that the model made it in, as in a plain loop."""
    made = replace(feedback(), autocast="bfloat16", model=lambda: feedback().model().float(), batch=_float32)
    plain = PlainLoop(made)
    with Pipeline(made, make_plan(made, micro_batches=1), graph=graph_of(made)) as pipeline:
        for batch in batches_of(made, 3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain.loss(batch)
            assert plain.state.dtype is torch.bfloat16
            plain.optimizer.zero_grad()
            loss.backward()
            plain.optimizer.step()
            assert pipeline.step(batch) == pytest.approx(loss.item(), rel=1e-6)


def _float32(rows, generator):
    inputs, targets = feedback().batch(rows, generator)
    return {name: each.float() for name, each in inputs.items()}, targets.float()


@pytest.mark.parametrize(
    ("carried", "words_of"),
    [
        ({"state": "memory"}, "carries input 'state', and the model is called with 'x', 'memory'"),
        ({0: "memory"}, "carries input 0, and the model is called with"),
        ({"memory": "state"}, "carries output 'state', and the model's output has none"),
        ({"memory": 1}, "carries output 1, and the model's output has none"),
    ],
)
def test_what_is_not_there(carried, words_of):
    """A name that the model has not is refused before anything is built."""
    made = replace(feedback(), carried=carried)
    with pytest.raises(UsageError, match=words_of):
        Pipeline(made, make_plan(feedback()))


def _of_all_rows(rows, generator):
    inputs, targets = feedback().batch(rows, generator)
    return {**inputs, "memory": inputs["memory"][:1]}, targets


class _Mean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x, memory):
        made = torch.tanh(self.inlet(x + memory))
        return {"scores": self.outlet(made), "memory": made.mean(0, keepdim=True)}


@pytest.mark.long
def test_a_state_of_the_whole_batch():
    """A state without rows is carried with one micro-batch, and refused with several."""
    made = replace(feedback(), model=lambda: _Mean().double(), batch=_of_all_rows, marks=("inlet", "outlet"))
    plain = PlainLoop(made)
    with Pipeline(made, make_plan(made, micro_batches=1), graph=graph_of(made)) as pipeline:
        for batch in batches_of(made, 3):
            assert abs(pipeline.step(batch) - plain.step(batch)) < EXACT
    with (
        Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made)) as pipeline,
        pytest.raises(UsageError, match="7 rows are not to be found"),
    ):
        pipeline.step(batches_of(made, 1)[0])


def test_wrong_declarations():
    """What says nothing is refused; so is a reset where nothing is carried."""
    for carried in ({1: None}, {-1: 1}, "hidden", {1.5: 1}):
        with pytest.raises(UsageError, match=r"Workload\.carried"):
            Workload(torch.nn.Identity, lambda *_: None, batch_size=1, carried=carried)
    with (
        Pipeline(language(), make_plan(language())) as pipeline,
        pytest.raises(UsageError, match="carries no state from batch to batch"),
    ):
        pipeline.reset_carried()
