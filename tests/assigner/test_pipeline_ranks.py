"""Several ranks on this host: exact under every plan, and an end with a message when a rank fails."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked_ranks import cases_of
from safetensors.torch import load_file
from workloads import language, make_plan

from assigner import Pipeline, load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed

EXACT = 1e-10


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tests/runs/ranks.py left, of the cases that this run of the tests has."""
    made = tmp_path_factory.mktemp("ranks")
    forked.run("ranks.py", made, *cases_of(request, "case"), ranks=3)
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of the three ranks found."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.fixture(scope="module")
def failures(
    request: pytest.FixtureRequest, forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What tests/runs/failures.py saw, of the failures that this run of the tests has."""
    made = tmp_path_factory.mktemp("failures")
    forked.run("failures.py", made, *cases_of(request, "failure"))
    found: dict[str, Any] = json.loads((made / "found.json").read_text())
    return found


@pytest.mark.long
def test_another_default_device(forked: ForkedRanks, tmp_path: Path) -> None:
    """What ranks tell each other is on the CPU, wherever the script makes its tensors (torch.set_default_device)."""
    for found in forked.found("default_device.py", tmp_path, ranks=2):
        assert max(found.values()) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "workers in another order, tied weights, remat", "a rank that idles", "skips over three workers",
        "two stages of one worker", "a branch", "1f1b", "1f1b, deeper", "random plans", "accumulation",
    ],
)  # fmt: skip
def test_equal_to_the_plain_model(ranks, case):
    """Loss, gradients, weights and buffers of every rank are the plain model's, for full and ragged batches."""
    for found in ranks:
        assert found[case]
        assert max(found[case].values()) < EXACT


def test_dropout_does_not_depend_on_the_placement(ranks):
    """With dropout the loss under three workers is to the last bit that under one."""
    assert [found["dropout"]["loss"] for found in ranks] == [0.0] * 3


def test_nothing_leaks(ranks):
    """Steps leave no thread and no open file behind."""
    assert [found["leaks"] for found in ranks] == [{"threads": 0, "files": 0}] * 3


def test_the_fingerprint_is_the_same_in_every_process(ranks):
    """Nothing in it depends on addresses or hash seeds."""
    assert {found["fingerprint"] for found in ranks} == {make_plan(language()).workload.fingerprint}


def test_training_resumes_under_another_plan(ranks):
    """Losses after a checkpoint are to the last bit the same under the plan that wrote it and under another one."""
    for found in ranks:
        assert found["checkpoint"]["losses"] == found["checkpoint"]["expected"]
        assert found["checkpoint"]["steps"] == 6
        assert "checkpoint exists" in found["checkpoint"]["again"]


def test_a_checkpoint_that_one_rank_refuses_is_refused_on_all_alike(ranks):
    """The error has one type everywhere and names the file or the weight; nothing has changed, and the run goes on."""
    found = [each["checkpoint"]["refused"] for each in ranks]
    for n, each in enumerate(found):
        assert each["one is damaged"].startswith("FormatError: " + ("" if n == 1 else "worker:1: "))
        assert "of rank 1/training.json: steps: -1 is not allowed" in each["one is damaged"]
        assert each["they differ"].startswith("FormatError: ")
        assert "is not the same on all ranks" in each["they differ"]
        assert each["a weight is NaN on one"].startswith("UsageError: ")
        assert "'tokens.weight' holds" in each["a weight is NaN on one"]
        assert each["changed"] == "[]"


def test_a_checkpoint_of_three_ranks_on_one(ranks, folder):
    """One rank reads weights and Adam state bit for bit, and trains on as the three did."""
    made = language()
    with Pipeline(made, make_plan(made)) as pipeline:
        pipeline.load(folder / "checkpoint")
        weights = load_weights(folder / "checkpoint")
        assert all(torch.equal(tensor, weights[name]) for name, tensor in pipeline.state_dict().items())
        shards = [load_file(folder / "checkpoint" / f"optimizer-0000{rank}.safetensors") for rank in range(3)]
        for name, parameter in pipeline.named_parameters():
            for key, value in pipeline.optimizer.state[parameter].items():
                saved = [shard[f"{name}/{key}"] for shard in shards if f"{name}/{key}" in shard]
                assert saved
                assert all(torch.equal(value, each) for each in saved)
        losses = [pipeline.step(made.make_batch(8, n)) for n in range(3, 6)]
    assert losses == pytest.approx(ranks[0]["checkpoint"]["expected"], abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "rank"), [("raises on rank 0", 0), ("raises on rank 1", 1)])
def test_an_exception_in_a_partition(failures, failure, rank):
    """Every rank ends by itself with the same type and message, worker, partition, micro-batch and traceback."""
    found = failures[failure]
    assert found["codes"] == [1 if each == rank else 7 for each in range(3)]
    for each, text in enumerate(found["stderr"]):
        caught = f"caught as an ArithmeticError of worker:{rank}/cpu: the trap snapped"
        assert (caught in text) == (each != rank)
        assert "ArithmeticError: the trap snapped" in text
        assert f"forward of partition '{rank}', micro-batch 2 on worker:{rank}/cpu" in text
        assert 'failures.py", line' in text


@pytest.mark.long
@pytest.mark.parametrize("failure", ["raises while one stands still"])
def test_a_rank_that_stands_still_meanwhile_learns_the_cause(failures, failure):
    """Another one fails, and rank 0, which hosts the store, does not leave before it could read why."""
    found = failures[failure]
    assert found["codes"] == [7, 1, 7]
    assert all("the user's own" in text for text in found["stderr"])


@pytest.mark.long
@pytest.mark.parametrize("failure", ["raises on a rank that shares"])
def test_an_exception_among_ranks_that_share_a_stage(failures, failure):
    """Those that wait for the sum of gradients which it has begun to add up end with its error."""
    found = failures[failure]
    assert found["codes"] == [7, 7, 1]
    for text in found["stderr"]:
        assert "ArithmeticError: the trap snapped" in text
        assert "backward of partition '0', micro-batch 3 on worker:2/cpu" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "rank"), [("killed rank 0", 0), ("killed rank 1", 1), ("killed rank that shares", 1)]
)
def test_a_killed_rank(failures, failure, rank):
    """The others end by themselves and name it, also where the job's store died with it."""
    found = failures[failure]
    assert found["codes"] == [-9 if each == rank else 7 for each in range(3)]
    assert all(f"worker:{rank}" in text and "its process is gone" in text for text in found["stderr"] if text)


@pytest.mark.long
@pytest.mark.parametrize("failure", ["stalls"])
def test_a_rank_that_stalls(failures, failure):
    """A wait ends after the time-out with the name of the rank that did not answer, and that rank ends too."""
    found = failures[failure]
    assert found["codes"] == [7, 7, 7]
    cause = r"worker:1/cpu failed: others wait for it in vain: it is in no call of the pipeline"
    assert all(re.search(cause, text) for text in found["stderr"])


@pytest.mark.parametrize("failure", ["script raises"])
def test_an_exception_in_the_training_script(failures, failure):
    """What the script raises between two steps reaches the other ranks as well."""
    found = failures[failure]
    assert found["codes"] == [7, 7, 1]
    assert all("in the training script" in text and "the user's own" in text for text in found["stderr"])


def of_this_package(text: str) -> str:
    """Without torch's own lines: of a port that it tries again, and of a store whose host was the first to end."""
    torchs = r"\[W.*(socket|TCPStore)\.cpp|Exception raised from|frame #\d"
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(torchs, line))


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["never closed", "ends apart"])
def test_a_quiet_end(failures, failure):
    """Ranks that end seconds apart, or never close their pipeline, end without an error."""
    assert failures[failure]["codes"] == [0, 0, 0]
    assert [of_this_package(text) for text in failures[failure]["stderr"]] == ["", "", ""]


def test_pipelines_one_after_another(forked):
    """Each pipeline of a process meets the others' addresses of its own group, never those of the one before."""
    forked.run("rejoining.py", ranks=2)


@pytest.mark.long
def test_a_plan_changes_during_the_run(forked):
    """Weights, statistics and optimizer state follow the partitions; training goes on as if nothing had happened."""
    forked.run("moving.py", ranks=3)


@pytest.mark.long
def test_hooks_and_changing_state_on_two_ranks(forked):
    """Hooks see shared gradients whole; what forwards change moves along, or is refused where ranks would differ."""
    forked.run("changing.py", ranks=2)
