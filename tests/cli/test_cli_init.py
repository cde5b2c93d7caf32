import json
import re
import subprocess
import sys

import pytest

from assigner.formats.trace import load_trace

NET = """
from torch import nn


class Translator(nn.Module):
    def __init__(self, vocabulary=100, width=16, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.out(self.encoder(self.embed(tokens)))


def chain():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
"""


@pytest.fixture
def net(folder, monkeypatch):
    """net.py in the current folder."""
    (folder / "net.py").write_text(NET)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    yield folder
    sys.modules.pop("net", None)


@pytest.mark.long
def test_it_says_what_it_wrote_and_what_comes_next(assigner, net):
    """The model was cut at the proposed marks, so the partitions are known; nothing is on stdout."""
    result = assigner("init", "net.py:Translator")
    assert (result.exit_code, result.stdout) == (0, "")
    wrote, has, then = result.stderr.splitlines()
    assert wrote == "wrote workload.py"
    assert has == "it has 5 partitions: embed, encoder.layers.0-2 (3), out"
    assert then.startswith("next: assigner profile workload.py:workload")
    assert '"encoder.layers.*",  # 3 modules' in (net / "workload.py").read_text()


def test_gaps_are_said(assigner, net):
    """What only the user knows is asked for on stderr."""
    (net / "net.py").write_text(NET.replace("vocabulary=100, width=16", "width, vocabulary=100"))
    result = assigner("init", "net.py:Translator", "-o", "other.py")
    assert result.exit_code == 0
    assert "to do: Translator needs width" in result.stderr
    assert "next: do that in other.py; after it, assigner profile other.py:workload" in result.stderr
    assert "return Translator(width=...)" in (net / "other.py").read_text()


@pytest.mark.long
def test_a_model_that_cannot_be_cut_is_told(assigner, net):
    """The file is there, with the reason."""
    (net / "net.py").write_text(
        NET.replace("self.encoder(self.embed(tokens))", "self.embed(tokens) * len(tokens.tolist())")
    )
    result = assigner("init", "net.py:Translator")
    assert result.exit_code == 0
    assert (net / "workload.py").exists()
    assert "to do: " in result.stderr


@pytest.mark.parametrize("model", ["net.py:Translator", "net:Translator", "again:Translator"])
@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_the_models_own_file_is_never_written_over(assigner, net, model, flags):
    """Named by its file, by its module, or through another one; with --force too."""
    (net / "again.py").write_text("from net import Translator\n")
    result = assigner("init", model, "-o", "net.py", *flags)
    assert result.exit_code == 2
    assert "hint: -o workload.py" in result.stderr or (not flags and ".py:" not in model)
    assert (net / "net.py").read_text() == NET
    sys.modules.pop("again", None)


def test_what_the_model_prints_is_no_result(assigner, net):
    """stdout stays empty: it prints as it is imported, built and called."""
    noisy = f"print('import')\n{NET}".replace("layers=3", "layers=1").replace(
        "super().__init__()", "super().__init__(); print('built')"
    )
    (net / "net.py").write_text(noisy.replace("return self.out", "print('called')\n        return self.out"))
    result = assigner("init", "net.py:Translator")
    assert (result.exit_code, result.stdout) == (0, "")
    assert {"import", "built", "called"} <= set(result.stderr.split())


def test_the_next_command_can_be_pasted(assigner, net):
    """A file with a space stands in quotes."""
    result = assigner("init", "net.py:chain", "-o", "my net.py")
    assert "assigner profile 'my net.py:workload' -o" in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("init nowhere.py:Net", "nowhere.py: no such file"),
        ("init net.py:Nobody", "'Nobody'"),
        ("init Net", "'Net' names no model"),
        ("init -o workload.txt", "no Python file"),
        ("init -o no/where.py", "mkdir"),
        ("init -o net.py", "net.py exists"),
    ],
)
def test_wrong_uses(assigner, net, line, words):
    """Each is a usage error of at most three lines, and no file is written."""
    before = sorted(net.iterdir())
    result = assigner(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) <= 3
    assert [path for path in sorted(net.iterdir()) if path.name != "__pycache__"] == before


def test_the_children_of_a_sequential_are_its_partitions(assigner, net):
    """A function that builds one needs no marks."""
    result = assigner("init", "net.py:chain")
    assert "it has 4 partitions: 0-3 (4)" in result.stderr
    assert "marks=(\n" not in (net / "workload.py").read_text()


@pytest.mark.distributed
@pytest.mark.long
def test_from_init_to_a_trained_step(net, programs):
    """init, profile, solve, run and bench, with nothing changed in between; the loss falls, and times are told."""
    (net / "net.py").write_text(NET.replace("layers=3", "layers=1"))

    def assigner(*words):
        done = subprocess.run(
            [programs / "assigner", *words], capture_output=True, text=True, cwd=net, timeout=1200, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    assigner("init")
    assigner("profile", "workload.py:workload", "-o", "small.json", "--micro-batches", "4", "--max-message", "65536")
    assigner("solve", "small.json", "-o", "plan.json", "--micro-batches", "4")
    (net / "trace.json").touch()
    run = assigner("run", "plan.json", "--", "workload.py", "--trace", "trace.json", "--force")
    steps = [re.fullmatch(r"step \d+: ([\d.]+) ms, loss ([\d.]+)", line) for line in run.stdout.splitlines()]
    losses = [float(step[2]) for step in steps]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]
    assert re.search(r"^step: .+ predicted, .+ measured \(IQR .+ over 19 steps\)", run.stderr, re.MULTILINE)
    assert load_trace(net / "trace.json").steps == 20
    bench = assigner("bench", "plan.json", "--steps", "3", "--rounds", "2", "--json")
    measured = json.loads(bench.stdout)["plans"][0]["measured"]
    assert len(measured["steps_s"]) == 6
    assert measured["error"] is not None
