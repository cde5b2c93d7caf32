"""The readers of published instances, and the benchmark over a folder of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from load import evaluate, solve_load

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "solver"


@pytest.fixture
def readers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import readers

    return readers


@pytest.fixture
def folder(tmp_path):
    """One file of each family: a chain a -> b -> c of 3, 2 and 1 seconds, trained, in each one's own words."""

    def node(n, name, seconds, colour, backward):
        return {
            "id": n, "name": name, "cpuLatency": 10 * seconds, "fpgaLatency": seconds, "size": 1, "colorClass": colour,
            "isBackwardNode": backward, "supportedOnFpga": 1,
        }  # fmt: skip

    nodes = [node(n, "abc"[n], 3 - n, n, 0) for n in range(3)] + [
        node(3 + n, "CBA"[n], 1 + n, 2 - n, 1) for n in range(2)
    ]
    nodes.append(node(5, "A", 3, None, 1))  # a class of its own: ordered by its mirrored edge B -> A
    edges = [{"sourceId": n, "destId": n + 1, "cost": 0.25, "size": 1} for n in range(5)]
    throughput = tmp_path / "dnn-partitioning" / "throughput"
    throughput.mkdir(parents=True)
    document = {"maxSizePerFPGA": 100, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    (throughput / "tiny.json").write_text(json.dumps(document))
    (tmp_path / "dnn-partitioning" / "reference.csv").write_text("instance,contiguous_optimum\ntiny,6.5\n")

    def options(seconds):
        sizes = {"parameterSize": 0, "memoryUsageB": 0}
        vanilla = {"id": "vanilla", "timePerSample": seconds, "memoryUsageA": 2**30, **sizes}
        again = {"id": "activation recomp", "timePerSample": 1.5 * seconds, "memoryUsageA": 2**28, **sizes}
        return {"1": [vanilla, again]}

    (tmp_path / "piper").mkdir()
    bits = [{"sourceId": n, "destId": n + 1, "communicationCost": 25 * 2**28} for n in range(2)]
    steps = [{"id": n, "name": "abc"[n], "TMPCs": options(3 - n)} for n in range(3)]
    (tmp_path / "piper" / "tiny.json").write_text(json.dumps({"nodes": steps, "edges": bits}))
    (tmp_path / "pipedream").mkdir()
    line = "{} -- {} -- forward_compute_time={}, backward_compute_time=1000.0, activation_size={}, parameter_size=0.0"
    lines = [line.format("node1", "Input", 9e6, 5.0), line.format("node2", "Linear(a, b)", 1000.0, "[1e8; 4e8]")]
    lines += [line.format("node3", "ReLU", 500.0, "5.0"), "\tnode1 -- node2", "\tnode2 -- node3"]
    (tmp_path / "pipedream" / "tiny.txt").write_text("\n".join(lines))
    (tmp_path / "pipedream" / "LICENSE.txt").write_text("MIT")
    return tmp_path


def test_backward_classes_are_ordered_by_mirrored_edges(readers, folder):
    """Colours join forward and backward; only edges of a backward class without forward node are turned round."""
    problem = readers.read_dnn_partitioning(folder / "dnn-partitioning" / "throughput" / "tiny.json")
    assert problem.order == ((0, 1), (1, 2), (5, 4))
    assert [node.colour for node in problem.nodes] == [0, 1, 2, 2, 1, None]
    assert [output.targets for output in problem.outputs] == [(1,), (2,), (3,), (4,), (5,)]
    answer = solve_load(problem)
    assert evaluate(problem, answer.stages).value == pytest.approx(6 + 2 * 0.25)  # {a, A} pays for b and B


def test_piper_counts_positions_from_the_end(readers, folder):
    """Two stages of 3 GiB: {a} keeps two micro-batches, {b, c} one; an edge costs either end half a second."""
    path = folder / "piper" / "tiny.json"
    problem = readers.read_piper(path, stages=2, gibibytes=3)
    answer = solve_load(problem)
    assert answer.value == pytest.approx(3.5)
    assert evaluate(problem, answer.stages).memory == pytest.approx((2 * 2**30, 2 * 2**30))
    assert solve_load(readers.read_piper(path, stages=2, gibibytes=1.5, remat=False)).infeasible
    assert solve_load(readers.read_piper(path, stages=2, gibibytes=1.5)).value == pytest.approx(5.0)


def test_pipedream_inputs_cost_nothing(readers, folder):
    """Times are milliseconds, an output of several values is their sum, and the input node is free."""
    problem = readers.read_pipedream(folder / "pipedream" / "tiny.txt", workers=2)
    assert [node.options[0].seconds for node in problem.nodes] == [(0.0,), (2.0,), (1.5,)]
    assert [output.cost for output in problem.outputs] == [0.0, 5e8]
    assert solve_load(problem).value == pytest.approx(2.0)


def test_the_benchmark_solves_a_folder(folder):
    """One command prints a table per family, and writes every row; what cannot be read is told and left out."""
    out = folder / "rows.json"
    (folder / "piper" / "broken.json").write_text("{}")
    command = [sys.executable, str(BENCHMARK / "instances.py"), str(folder), "--free", "--json", str(out)]
    run = subprocess.run([*command, "--piper-settings", "2x3"], check=True, capture_output=True, text=True)
    rows = json.loads(out.read_text())
    assert {family: len(found) for family, found in rows.items()} == {"dnn-partitioning": 3, "piper": 2, "pipedream": 2}
    assert rows["dnn-partitioning"][0]["diff %"] == pytest.approx(0.0)
    assert run.stdout.count("| tiny") == 7
    assert "broken.json: KeyError" in run.stderr
