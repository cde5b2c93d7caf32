"""What ranks need of a batch, and what they are told when they do not do the same; on three ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked_ranks import cases_of
from torch import nn
from workloads import WIDTH, graph_of, make_plan, numbers, pipeline_of, skips, workload

from assigner import Pipeline
from assigner.errors import UsageError, WorkerError
from assigner.model.marking.rows import EXAMPLE_ROWS
from assigner.runtime.batch.callcomparison import inputs_of, outline

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

SCRIPT = Path(__file__).resolve().parent.parent / "runs" / "disagreeing.py"


@pytest.fixture(scope="module")
def parts(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of tests/runs/parts.py found."""
    return forked.found("parts.py", tmp_path_factory.mktemp("parts"), ranks=3)


@pytest.fixture(scope="module")
def disagreements(
    request: pytest.FixtureRequest, forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What tests/runs/disagreeing.py saw, of the ways that this run of the tests has."""
    made = tmp_path_factory.mktemp("disagreements")
    forked.run("disagreeing.py", made, *cases_of(request, "way"))
    found: dict[str, Any] = json.loads((made / "found.json").read_text())
    return found


def test_steps_that_are_given_all_make_no_batch_but_two_that_show_the_rows():
    """What `Workload.batch` draws or counts there would be missing from the script's own batches."""
    made: list[int] = []

    def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(rows)
        return numbers(rows, generator)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double()

    built = workload(model, "0", "1", batch=batch)
    with pipeline_of(built, make_plan(built)) as pipeline:
        inputs, targets = numbers(8, torch.Generator().manual_seed(1))
        made.clear()
        pipeline.step((inputs, targets))
        pipeline.evaluate((inputs, targets))
        pipeline.forward(inputs)
    assert made == [EXAMPLE_ROWS, 2 * EXAMPLE_ROWS]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "needs"),
    [
        ("keywords", [["inputs"], ["inputs"], ["targets"]]), ("weights of targets", [["inputs"], [], ["targets"]]),
        ("weights of inputs", [["inputs"], [], ["inputs", "targets"]]), ("no targets", [["inputs"], [], []]),
        ("one idles", [[], ["inputs"], ["targets"]]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_ranks_without_inputs_or_targets_train_as_the_plain_model(parts, case, needs):
    """Whatever each rank hands in beyond its needs, and after a move by its new ones: losses, outputs and weights."""
    named = [[what for what, wanted in zip(("inputs", "targets"), each[case]["needs"][0], strict=True) if wanted]
             for each in parts]  # fmt: skip
    assert named == needs
    assert all(each[case]["worst"] < 1e-10 for each in parts)
    if case == "one idles":
        assert [each[case]["needs"][1] for each in parts] == [[False, True], [False, False], [True, False]]


STEP = "step(update=True, scale=1.0, max_norm=None)"
HELD = "step(update=False, scale=1.0, max_norm=None)"
CLIP = "clip_grad_norm_(1.0, norm_type=2.0, names=None, error_if_nonfinite=False)"
MOVE = "move(a plan on worker:0/cpu, worker:1/cpu, worker:2/cpu)"


def at(code: str, count: int = 1) -> str:
    """The line of the script that has this code for the n-th time."""
    lines = [n for n, line in enumerate(SCRIPT.read_text().splitlines(), 1) if code in line]
    return f"{SCRIPT}:{lines[count - 1]}"


def unsettled(text: str) -> str:
    """Without the settings that an update goes by."""
    return re.sub(r" with (lr [^()]*\()?settings [0-9a-f]+\)?", "", text)


TOGETHER = "(pipeline.evaluate if evaluating else pipeline.step)"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "rank", "what", "call"),
    [
        ("zeros for inputs", 1, "the values of inputs (float64[8, 8])", f"{STEP} at {at('zeros_like')}"),
        ("other targets", 2, "the values of targets (float64[8, 1])", f"{STEP} at {at('make_batch(8, 2)')}"),
        ("fewer rows", 1, "the shape of inputs: float64[6, 8] on worker:1, float64[8, 8] on worker:0", STEP),
        ("evaluate", 1, "the call", f"evaluate() at {at('pipeline.evaluate(MADE')}"),
        ("an update", 2, "the call", f"optimizer.step() at {at('optimizer.step')}"),
        ("learning rate", 1, "the settings of the optimizer", f"{STEP} with lr 0.5"),
        ("gradients dropped", 2, "the call", f"optimizer.zero_grad() at {at('optimizer.zero_grad')}, then {STEP} at"),
        ("save", 1, "the call", f"save('saved') at {at('pipeline.save')}"),
        ("save on rank 0", 0, "the call", f"save('saved') at {at('pipeline.save')}"),
        ("clipping", 2, "the call", f"{CLIP} at {at('clip_grad_norm_')}"),
        ("move", 1, "the call", f"{MOVE} at {at('pipeline.move')}"),
    ],
)  # fmt: skip
def test_both_sides_of_a_disagreement_are_told_on_every_rank(disagreements, way, rank, what, call):
    """Who differs from whom, in what, what each called at which line, and how the third one goes."""
    found = disagreements[way]
    assert 0 not in found["codes"]
    for text in map(unsettled if way != "learning rate" else str, found["stderr"]):
        finder = re.findall(r"worker:(.) and worker:0 differ in", text)[-1]  # both may find it: the last is its own
        assert rank in (int(finder), 0)
        assert f"worker:0 differ in {what}; worker:" in text
        assert f"worker:{rank} calls {call}" in text
        assert f"{STEP} at {at(TOGETHER)}" in unsettled(text)
        assert f"worker:{3 - int(finder)} is like worker:{0 if rank else finder}" in text


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "rank", "words"),
    [
        ("another pipeline", 1, "worker:1 and worker:0 are in .* calls step.* at .* of pipeline 2; .* of pipeline 1"),
        ("another pipeline on rank 0", 0, "worker:0 are in .* calls step.* at .* of pipeline 1; .* of pipeline 2"),
        ("half made", 1, "no memory of it"),
        ("raises between", 2, "the user's own"),
        ("a thread", 1, r"thread 'other' calls a pipeline.* while thread 'MainThread' is in a call of one"),
    ],
)  # fmt: skip
def test_ranks_whose_pipelines_go_apart_are_told(disagreements, way, rank, words):
    """All of them, and who it was; nobody waits for a time-out."""
    found = disagreements[way]
    assert 0 not in found["codes"]
    for number, text in enumerate(found["stderr"]):
        assert re.search(words, text), text
        if number != rank and "rank 0" not in way:
            assert f"worker:{rank}" in text


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "alone", "others"),
    [
        ("save elsewhere", "save('best') at " + at('save("best")'), "save('last') at " + at('save("last")')),
        ("an update left out", f"{HELD} at {at('make_batch(8, 2), update=False')}", "optimizer.step() with lr"),
    ],
)
def test_where_rank_0_alone_has_left_out_or_added_a_call(disagreements, way, alone, others):
    """The others have come to the next call of that kind: both are told everywhere, with their lines."""
    found = disagreements[way]
    assert 0 not in found["codes"]
    for text in found["stderr"]:
        assert f"worker:0 calls {alone}" in text
        assert f" calls {others}" in text


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("way", "leaver"), [("leaves", 1), ("leaves on rank 0", 0)])
def test_whoever_leaves_early_is_told_of_with_both_lines(disagreements, way, leaver):
    """Where its pipeline was closed, and where another rank was then."""
    for text in map(unsettled, disagreements[way]["stderr"]):
        assert f"came to an end, at {at('with Pipeline(MADE, PLAN')}, while worker:" in text
        assert f"went on with {STEP} at {at(TOGETHER)}" in text
        assert f"while worker:{leaver} " not in text


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("no inputs", "worker:0/cpu was given no inputs and needs them: its partition '0' reads inputs"),
        ("no batch", "worker:2/cpu was given no targets and needs them: its partition '2' makes the model's output"),
        ("another graph", "worker:1/cpu was given no inputs and needs them: its partition 'parts.1' reads inputs['x']"),
    ],
)  # fmt: skip
def test_a_rank_that_lacks_what_it_needs_is_told_why(disagreements, way, words):
    """On every rank: its partition, and which input that reads, in the plan's graph or in another one."""
    assert all(words in text for text in disagreements[way]["stderr"])
    assert 0 not in disagreements[way]["codes"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("another order", "orders"), ("another schedule", "schedule (listed and gpipe), orders"),
        ("other workers", "schedule (listed and gpipe), stages, orders"),
        ("more ranks", "schedule (listed and gpipe), stages, orders"),
    ],
)  # fmt: skip
def test_ranks_with_unlike_plans_are_refused_when_they_start(disagreements, way, what):
    """On every rank, with what differs, before any of them waits for messages that the others never send."""
    found = disagreements[way]
    assert found["codes"] == [2, 2, 2]
    words = f"worker:0 and worker:1 were given unlike plans: they differ in {what}\n"
    assert all(words in re.sub(r" \([0-9a-f]{12} and [0-9a-f]{12}\)", "", text) for text in found["stderr"])


def test_one_process_needs_all_of_a_batch():
    """None for a part of it, or for all, is refused with the reason."""
    made = skips()
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        assert (pipeline.needs_inputs, pipeline.needs_targets) == (True, True)
        inputs, targets = made.make_batch(8, 0)
        with pytest.raises(UsageError, match=r"given no inputs and needs them: its partition 'parts\.0' reads inputs"):
            pipeline.evaluate((None, targets))
    with (
        Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline,
        pytest.raises(UsageError, match="given no targets and needs them"),
    ):
        pipeline.step((inputs, None))


@pytest.mark.parametrize("text", ["", "3x", '["tensor", "pickle", [2], [1]]', '["code", 1]', "[]", "[[]]"])
def test_what_is_no_outline_is_refused(text):
    """Another release, or somebody else, has told it; nothing of it is run."""
    with pytest.raises(WorkerError, match="worker:3 has told something else than inputs"):
        inputs_of(text, "worker:3")


def test_an_outline_has_no_values():
    """A tensor that is expanded keeps its strides, a dtype and odd numbers come back as they are."""
    made = inputs_of(outline((torch.ones(1, 3).expand(4, 3), torch.bfloat16, float("inf"), {1: torch.Size([2])})), "w")
    assert made[0].is_meta
    assert made[0].stride() == (0, 1)
    assert made[1:] == (torch.bfloat16, float("inf"), {1: torch.Size([2])})
