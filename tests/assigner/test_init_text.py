import ast
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from assigner.errors import UsageError
from assigner.init.text import EXAMPLE, RESERVED, Code, Draft, DraftInput, DraftOutput, MarkPattern, workload_text
from assigner.model.workload import Workload, load_workload

NET = Code(local=("from net import Net",), body=("return Net()",))
TOKENS = DraftInput("tokens", (16,), 50)
IMAGES = DraftInput("images", (3, 8, 8))
DRAFTS = {
    "example": EXAMPLE,
    "nothing known": Draft("Net", "assigner init net.py:Net", NET, gaps=("the model takes a width, a depth " * 5,)),
    "next token": Draft(
        "Net", "assigner init", NET, (TOKENS,), gives=DraftOutput("", (16, 50)), marks=(MarkPattern("a.*", 3),)
    ),
    "by name": Draft("Net", "assigner init", NET, (TOKENS,), keywords=True, gives=DraftOutput(".logits", (16, 50))),
    "classes": Draft("Net", "assigner init", NET, (IMAGES,), gives=DraftOutput("[0]", (10,)), children=True),
    "numbers": Draft("Net", "assigner init", NET, (IMAGES,), gives=DraftOutput("", (1,)), marks=(MarkPattern("a", 1),)),
    "several": Draft(
        "Net", "assigner init", NET, (DraftInput("rows", (2,)), DraftInput("input", (), 9)), keywords=True,
        gives=DraftOutput("", (2, 2)),
    ),
    "odd": Draft(
        'a"b', 'assigner init \'net.py:Net(a="""x\\n""")\'', NET, marks=(MarkPattern('a"b', 1), MarkPattern("c\\d", 1))
    ),
}  # fmt: skip


def test_texts_are_clean(tmp_path):
    """ruff has nothing to say of any of them, by many of its rules, and would lay none out in another way."""
    pytest.importorskip("ruff", reason="pip install -e '.[dev]'")
    (tmp_path / "net.py").touch()
    for name, draft in DRAFTS.items():
        (tmp_path / f"{name.replace(' ', '_')}.py").write_text(workload_text(draft))
    ruff = [sys.executable, "-m", "ruff"]
    rules = "E,F,W,I,B,UP,N,SIM,RET,RUF,C4,PIE"
    for command in (["check", "--isolated", "--select", rules], ["format", "--isolated", "--check", "--diff"]):
        done = subprocess.run([*ruff, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_make_batches(tmp_path, name):
    """Each file is a workload whose batches have the rows that were asked for, and whose loss takes its outputs."""
    draft = DRAFTS[name]
    stub = replace(draft, code=Code(body=("return nn.Identity()",))) if draft.code is NET else draft
    (tmp_path / "workload.py").write_text(workload_text(stub))
    made = load_workload(f"{tmp_path}/workload.py:workload")
    assert isinstance(made, Workload)
    inputs, targets = made.make_batch(4, seed=0)
    given = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    assert [tuple(each.shape) for each in given] == [
        (4, *tensor.shape) for tensor in draft.takes or (DraftInput("", (64,)),)
    ]
    assert list(inputs) == [tensor.name for tensor in draft.takes] if draft.keywords else torch.is_tensor(inputs)
    assert targets.shape[0] == 4
    if draft.gives is not None and draft.gives.access == "":
        assert made.compute_loss(torch.randn(4, *draft.gives.shape), targets).shape == ()


def test_a_trace_is_replaced_where_that_is_asked_for(tmp_path, monkeypatch, capsys):
    """A second run says in a line that the trace exists, before it trains; with --force it goes on to the plan."""
    (tmp_path / "workload.py").write_text(workload_text(EXAMPLE))
    (tmp_path / "t.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ASSIGNER_PLAN", raising=False)
    monkeypatch.setattr(sys, "argv", ["workload.py", "--trace", "t.json"])
    with pytest.raises(SystemExit):
        runpy.run_path("workload.py", run_name="__main__")
    assert "error: --trace: t.json exists; --force replaces it" in capsys.readouterr().err
    sys.argv.append("--force")
    with pytest.raises(UsageError, match="plan"):
        runpy.run_path("workload.py", run_name="__main__")


def test_patterns_and_names_are_in_the_call():
    """What was proposed stands in `marks`, quoted as Python needs it."""
    tree = ast.parse(workload_text(DRAFTS["odd"]))
    words = {word.arg: word.value for call in ast.walk(tree) if isinstance(call, ast.Call) for word in call.keywords}
    assert ast.literal_eval(words["marks"]) == ('a"b', "c\\d")
    assert ast.literal_eval(words["name"]) == 'a"b'


def test_what_is_left_to_the_user_is_said():
    """In the file's own docstring, before anything else."""
    said = ast.get_docstring(ast.parse(workload_text(DRAFTS["nothing known"])))
    assert "Before it works:" in said
    assert "Before it works:" not in workload_text(EXAMPLE)


def test_names_of_the_file_are_reserved():
    """Whatever a file binds or reads at its top or in `model()` must not be the name of the user's own class."""
    for draft in DRAFTS.values():
        tree = ast.parse(workload_text(replace(draft, code=replace(NET, definitions=""))))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        bound = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        bound |= {name.name for each in tree.body if isinstance(each, ast.Import) for name in each.names}
        local = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert bound <= RESERVED
        assert used - local - {"Net", "__name__", "VOCABULARY", "LENGTH"} <= RESERVED


def test_commands_can_be_pasted():
    """A file whose name the shell would break up stands in quotes, and ends no docstring early."""
    text = workload_text(DRAFTS["classes"], 'my """ net.py')
    ast.parse(text)
    assert "assigner profile 'my net.py:workload' -o" in workload_text(DRAFTS["classes"], "my net.py")
