"""Measured runs of others as profiles and plans: the arithmetic of benchmarks/published, by hand on a miniature."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from assigner.errors import FormatError

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "published"


@pytest.fixture
def sailor(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import sailor

    return sailor


@pytest.fixture
def pricing(sailor):
    import pricing

    return pricing


def _plan(name, cuts, replicas, *, rows=2, batch=4):
    stages, first = [], 0
    for cut, kinds in zip(cuts, replicas, strict=True):
        nodes = [{"gpu": kind, "gpus": 2, "tensor_parallel": 2} for kind in kinds]
        stages.append({"layers": [first, first + cut - 1], "layer_count": cut, "replicas": nodes})
        first += cut
    return {
        "name": name, "micro_batch_size": rows, "global_batch_size": batch, "stages": stages, "measured_step_s": 4.0,
        "measured_all_reduce_s": 0.1, "measured_peak_bytes": 1e9,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Three layers on nodes of two GPUs; the 3090 is twice as fast; every link carries 0.5 GB/s."""
    sizes = [(100e6, 1e6, 1e6), (10e6, 1e6, 5e6), (50e6, 4e6, 6e6)]
    layers = [{"params_bytes": p, "act_output_bytes": out, "act_mem_bytes": kept} for p, out, kept in sizes]
    slow = [[0.1, 0.2, 0.034], [1.0, 2.0, 0.034], [0.3, 0.4, 0.034]]
    fast = [[seconds / 2 for seconds in layer] for layer in slow]
    kinds = ("RTX-2080", "RTX-3090")
    document = {
        "model": "OPT-350",
        "layers": {"2": layers},
        "seconds": {kind: {"2": {"2": times}} for kind, times in zip(kinds, (slow, fast), strict=True)},
        "link": {kind: {"2": {other: [0.0, 0.0, 0.5] for other in kinds}} for kind in kinds},
    }
    (tmp_path / "opt350-profile.json").write_text(json.dumps(document))
    both = [_plan("line", (2, 1), (("RTX-3090",), ("RTX-2080",))), _plan("data", (3,), (("RTX-3090", "RTX-2080"),))]
    (tmp_path / "rtx-plans.json").write_text(json.dumps(both))
    (tmp_path / "gh200-plans.json").write_text(json.dumps(both))
    return tmp_path


def test_a_node_holds_what_its_gpus_hold_and_the_later_stage_waits(sailor, folder):
    """Bytes are those of both GPUs, the update is shared by parameters, and busy shares follow the stages' order."""
    run = sailor.read_runs(folder / "rtx-plans.json")[0]
    profile = sailor.Measured(folder / "opt350-profile.json").profile(run.replicas, batch_size=4, reserve=1e9)
    embedding, block, head = profile.partitions
    assert (embedding.parameter_bytes, embedding.gradient_bytes, embedding.optimizer_bytes) == (200e6, 200e6, 400e6)
    assert [edge.bytes_per_sample for edge in profile.edges] == [1e6, 1e6]
    slow = {each.partition: each for each in profile.measurements if each.worker == "worker:1/cuda:0"}
    assert [slow[each.name].update_s for each in (embedding, block, head)] == pytest.approx([0.02, 0.002, 0.01])
    # two rows on two GPUs, less the output, which its reader keeps
    assert [slow[each.name].activation_bytes for each in (embedding, block, head)] == [2e6, 18e6, 24e6]
    assert slow["block.0"].workspace_bytes == 20e6
    assert {(link.source[7], link.sender_busy, link.receiver_busy) for link in profile.links} == {
        ("0", 0.0, 1.0), ("1", 1.0, 0.0),
    }  # fmt: skip
    assert [worker.capacity_bytes for worker in profile.workers] == [2 * 23e9, 2 * 10e9]


def test_a_step_by_hand(sailor, pricing, folder):
    """Two micro-batches of two rows: a message takes 4 ms, in which the second stage does not compute."""
    run = sailor.read_runs(folder / "rtx-plans.json")[0]
    assert (run.micro_batches, run.cuts, run.chains) == (2, (2, 1), 1)
    price = pricing.Groups(
        sailor.Measured(folder / "opt350-profile.json"), run.replicas, micro_batch_size=2, micro_batches=2
    ).price(run.cuts)
    second = 0.55 + 0.004 + 0.3 + 0.004 + 0.4  # when the second stage's first backward ends
    first = second + 0.004 + 2 * 1.1  # two backwards of the first stage follow its gradient
    assert price.step_s == pytest.approx(first + 0.017 * 110 / 170)
    state, kept, messages = 4 * 220e6, 2 * (2e6 + 18e6 + 2e6), 2 * 2e6
    assert price.tensor_bytes == pytest.approx((state + kept + 20e6 + messages) / 2)
    assert price.reduce_s == 0


def test_an_all_reduce_by_hand(sailor, pricing, folder):
    """Two replicas of 320 MB of gradients pass half of them twice over a link of 0.5 GB/s, after the slower one."""
    run = sailor.read_runs(folder / "rtx-plans.json")[1]
    assert (run.micro_batches, run.chains) == (1, 2)
    price = pricing.Groups(
        sailor.Measured(folder / "opt350-profile.json"), run.replicas, micro_batch_size=2, micro_batches=1
    ).price(run.cuts)
    assert price.reduce_s == pytest.approx(2 * 160e6 / 0.5e9)
    assert price.step_s == pytest.approx(1.4 + 2.6 + 0.64 + 0.034 * 160 / 170)


def test_an_all_reduce_is_one_bucket(sailor, pricing, folder):
    """Where larger pieces go faster, the pieces are halves of all gradients, not of this program's buckets."""
    path = folder / "opt350-profile.json"
    document = json.loads(path.read_text())
    document["link"] = {
        kind: {"2": {other: [0.0, 0.1, 0.5] for other in to["2"]}} for kind, to in document["link"].items()
    }
    path.write_text(json.dumps(document))
    run = sailor.read_runs(folder / "rtx-plans.json")[1]
    groups = pricing.Groups(sailor.Measured(path), run.replicas, micro_batch_size=2, micro_batches=1)
    rate = 0.5e9 + 0.1e9 * math.log2(80)  # each GPU passes on 80 MB
    assert groups.price(run.cuts).reduce_s == pytest.approx(
        2 * 160e6 / rate, rel=1e-2
    )  # the last bucket, of 5 MB, counts as a small one


def test_a_constant_is_tried_on_what_it_was_not_fitted_to(pricing):
    """Each residue meets the median of the others."""
    assert pricing.left_out([1.0, 2.0, 9.0]) == [5.5, 5.0, 1.5]


def test_unequal_work_is_refused(sailor, tmp_path):
    """A batch that replicas cannot share equally names the run."""
    path = tmp_path / "plans.json"
    path.write_text(json.dumps([_plan("odd", (3,), (("RTX-2080", "RTX-3090"),), batch=6)]))
    with pytest.raises(FormatError, match="odd: 6 samples"):
        sailor.read_runs(path)


def test_the_benchmark_prices_and_solves_a_folder(folder):
    """One command prints the tables and draws the picture; no faster plan is slower than the one that was measured."""
    picture = folder / "picture.svg"
    command = [sys.executable, str(BENCHMARK / "run.py"), str(folder), "--solve", "--picture", str(picture)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    said = [line.split(" | ") for line in run.stdout.splitlines()]
    assert sum(row[0] == "| RTX line" for row in said) == 2
    gains = [row for row in said if len(row) == 9 and row[0].endswith(("line", "data"))]
    assert len(gains) == 4
    assert all(float(row[3]) <= float(row[2]) for row in gains)
    assert picture.read_text().count("<title>") == 4


def test_replicas_are_found_where_wires_are_fast(sailor, folder):
    """The order that was found without replicas is solved again without them, and what is faster with them is shown."""
    import gains

    path = folder / "opt350-profile.json"
    document = json.loads(path.read_text())
    document["link"] = {
        kind: {"2": {other: [0.0, 0.0, 50.0] for other in to["2"]}} for kind, to in document["link"].items()
    }
    path.write_text(json.dumps(document))
    measured, run = sailor.Measured(path), sailor.read_runs(folder / "rtx-plans.json")[0]
    many = replace(run, micro_batches=32)
    solved = gains.gain(measured, many, reserve=1e9, limit_s=20).solved
    assert [len(stage.replicas) for stage in solved.plan.stages] == [len(nodes) for nodes in solved.nodes] == [2]
