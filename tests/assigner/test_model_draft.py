import sys

import pytest
import torch
from torch import nn

from assigner.errors import UsageError
from assigner.init.inputs import try_inputs
from assigner.init.modeldraft import draft_of_model, not_proposed, propose
from assigner.init.text import DraftInput, DraftOutput, MarkPattern

NETS = """
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8, *, classes=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Needy(nn.Module):
    def __init__(self, width: int, depth: int = 2):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)


class Config:
    def __init__(self, num_hidden_layers=12, hidden_size=64, use_cache=True):
        self.num_hidden_layers, self.hidden_size, self.use_cache = num_hidden_layers, hidden_size, use_cache


class Configured(Net):
    config_class = Config

    def __init__(self, config):
        assert not config.use_cache and config.hidden_size % 2 == 0
        super().__init__(config.hidden_size)


class Placed(nn.Linear):
    def __init__(self, width, /, *, depth, bias=True):
        super().__init__(width, width)


def model(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def sequence(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def broken():
    raise RuntimeError("no luck")


number = 3
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A folder with nets.py, as the current one."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    yield tmp_path
    sys.modules.pop("nets", None)


class Towers(nn.Module):
    """A list in a submodule, a small norm, an embedding that is large, and a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.text = nn.ModuleDict({"embed": nn.Embedding(1000, 8)})
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
        )
        self.norm = nn.LayerNorm(8)
        self.spare = nn.Linear(8, 1000)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1000))

    def forward(self, tokens):
        return {"scores": self.head(self.norm(self.encoder(self.text["embed"](tokens)))), "note": None}


def test_repeated_and_large_modules_are_proposed():
    """Lists by a pattern, wherever they lie; large modules by name; a Sequential of unlike ones as a whole."""
    marks = propose(Towers())
    assert marks == (
        MarkPattern("text.embed", 1), MarkPattern("encoder.layers.*", 3),
        MarkPattern("spare", 1), MarkPattern("head", 1),
    )  # fmt: skip


def test_modules_that_are_not_called_are_not_proposed():
    """A trial forward says which are."""
    trial = try_inputs(Towers())
    assert [mark.pattern for mark in propose(Towers(), trial.called)] == ["text.embed", "encoder.layers.*", "head"]


class Round(nn.Module):
    """Two layers in turn, as a decoder that refines its queries; and one that both sides of a pair go through."""

    def __init__(self, *, ends=False):
        super().__init__()
        self.ends = ends
        self.side, self.refine, self.mix = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.tail = nn.Linear(16, 1)

    def forward(self, x):
        first, second = self.side(x), self.side(-x)
        y = first
        for _ in range(2):
            y = first + self.refine(y)
        y = self.mix(y)
        return self.tail(torch.cat([self.refine(y) if self.ends else y, second], 1))


def test_a_forward_that_decides_by_values():
    """Some way through it is found."""

    class Checks(Towers):
        def forward(self, tokens):
            if tokens.max() > 7:
                raise ValueError(tokens)
            made = super().forward(tokens)
            assert made["scores"].isfinite().all()
            return made

    assert "head" in try_inputs(Checks()).called


@pytest.mark.parametrize(("places", "patterns"), [
    ([None, 0, 1], ["parts.*", "head"]), ([0, None, 0], ["parts.*", "head"]), ([0, None], ["parts.0", "head"]),
    ([None], ["head"]),
])  # fmt: skip
def test_a_list_with_places_that_hold_none(places, patterns):
    """The modules in it are looked at, and nothing else: a list may have a place for each layer, used or not."""

    class Gaps(nn.Module):
        def __init__(self):
            super().__init__()
            made = [nn.Linear(8, 8), nn.Linear(8, 8)]
            self.parts = nn.ModuleList(None if each is None else made[each] for each in places)
            self.head = nn.Linear(8, 1)

    found = propose(Gaps())
    assert [mark.pattern for mark in found] == patterns
    assert found[0].count == sum(each is not None for each in places) or patterns[0] != "parts.*"


def test_modules_that_others_lead_back_to_are_not_proposed():
    """A layer that is called again with its own results alone, or with other inputs, can still be a partition."""
    model = Round()
    trial = try_inputs(model)
    assert trial.called["mix"] == {"side", "refine"}
    patterns = ["side", "refine", "mix", "tail"]
    assert [mark.pattern for mark in propose(model, trial.called)] == patterns
    called = try_inputs(Round(ends=True)).called
    assert [mark.pattern for mark in propose(model, called)] == ["side", "mix", "tail"]
    assert not_proposed(model, called) == ([], [], ["refine"])


def test_a_model_that_repeats_nothing():
    """Each layer with a matrix or a kernel is a partition, however few its parameters; norms and dropouts are none."""
    named = {
        "conv": nn.Conv2d(1, 4, 3), "norm": nn.BatchNorm2d(4), "drop": nn.Dropout(), "wide": nn.Linear(4, 900),
        "out": nn.Linear(900, 1),
    }  # fmt: skip
    flat = nn.Module()
    for name, each in named.items():
        flat.add_module(name, each)
    assert [mark.pattern for mark in propose(flat)] == ["conv", "wide", "out"]


@pytest.mark.parametrize(
    ("word", "hint"),
    [("clases=2", "did you mean classes? it takes width, classes"), ("n_layer=4", "it takes width, classes")],
)
def test_a_keyword_that_the_model_lacks(nets, word, hint):
    """It is refused with those that there are, also where the model needs others."""
    with pytest.raises(UsageError, match=f"Net takes no '{word.split('=')[0]}'") as caught:
        draft_of_model(f"nets.py:Net({word})", nets)
    assert caught.value.hint == hint
    with pytest.raises(UsageError, match="Needy takes no 'n_layer'"):
        draft_of_model("nets.py:Needy(n_layer=4)", nets)


@pytest.mark.parametrize(
    ("model", "takes", "gives"),
    [
        (nn.Sequential(nn.Embedding(50, 4)), DraftInput("input", (64,), 50), DraftOutput("", (64, 4))),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2)),
            DraftInput("input", (3, 224, 224)), DraftOutput("", (4, 222 * 222)),
        ),
        (
            nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(26 * 26, 7)),
            DraftInput("input", (1, 28, 28)), DraftOutput("", (7,)),
        ),
        (nn.Sequential(nn.ConvTranspose2d(6, 2, 4)), DraftInput("input", (6, 1, 1)), DraftOutput("", (2, 4, 4))),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), DraftInput("input", (12,)), DraftOutput("", (2,))),
        (nn.Sequential(nn.GRU(6, 5, batch_first=True)), DraftInput("input", (16, 6)), DraftOutput("[0]", (16, 5))),
        (Towers(), DraftInput("tokens", (64,), 1000), DraftOutput('["scores"]', (64, 1000))),
    ],
)  # fmt: skip
def test_inputs_are_guessed_from_the_first_layer(model, takes, gives):
    """Tokens, images of the size that fits, features or sequences of them, and the tensor among the outputs."""
    trial = try_inputs(model)
    assert (trial.takes[0], trial.gives) == (takes, gives)


def test_wrong_guesses_are_not_logged(capfd):
    """A guess that the model refuses leaves nothing on the screen; torch would log a traceback for each."""

    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(x) + torch.zeros(5, 4, 30, 30)

    assert try_inputs(Strict().to("meta")).takes[0].shape == (3, 32, 32)
    assert capfd.readouterr() == ("", "")


def test_several_arguments_are_given_by_name():
    """All without a default are tensors."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, left, right, scale=2.0):
            return self.layer(left - right) * scale

    trial = try_inputs(Both())
    assert (trial.takes, trial.keywords) == ((DraftInput("left", (6,)), DraftInput("right", (6,))), True)


class Recurrent(nn.Module):
    """Its cell is registered before its embedding; tokens and a hidden state are its two inputs."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 5)
        self.embed = nn.Embedding(50, 6)

    def forward(self, token, hidden):
        return self.cell(self.embed(token), hidden)


def test_tokens_beside_a_hidden_state():
    """An embedding takes whole numbers wherever it is registered, and what stands beside it is guessed by itself."""
    trial = try_inputs(Recurrent())
    assert trial.takes == (DraftInput("token", (), 50), DraftInput("hidden", (5,)))
    assert trial.gives == DraftOutput("", (5,))

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)
            self.embed = nn.Embedding(50, 6)

        def forward(self, x):
            return self.head(self.embed(x))

    assert try_inputs(Late()).takes == (DraftInput("x", (64,), 50),)


def test_what_is_left_out_is_said(nets):
    """A head that is not called, a small one, and outputs that the loss does not see."""
    (nets / "nets.py").write_text(
        "from torch import nn\n"
        "class Heads(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))\n"
        "        self.policy, self.value, self.spare = nn.Linear(64, 16), nn.Linear(64, 1), nn.Linear(64, 64)\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x)\n"
        "        return {'policy': self.policy(x), 'value': self.value(x)}\n"
    )
    draft = draft_of_model("nets.py:Heads", nets)
    assert [mark.pattern for mark in draft.marks] == ["layers.*", "policy"]
    unused, small, others = draft.notes
    assert (unused.split(":")[0], small.split(":")[0]) == ("spare", "value")
    assert others == (
        'the loss takes outputs["policy"] alone: outputs["value"] of the model\'s outputs have no part in it'
    )
    assert draft.gaps == ()


def test_a_model_that_takes_something_else_is_left_to_the_user():
    """No guess runs: nothing is claimed."""

    class Strange(nn.Linear):
        def forward(self, x):
            return super().forward(x["deep"])

    assert not try_inputs(Strange(3, 3)).takes


def test_a_draft_of_a_file(nets):
    """The class is imported as the workload file beside it will do it."""
    draft = draft_of_model("nets.py:Net", nets)
    assert draft.code.local == ("from nets import Net",)
    assert draft.code.body == ("return Net()",)
    assert (draft.takes, draft.gives) == ((DraftInput("x", (8,)),), DraftOutput("", (3,)))
    assert draft.marks == (MarkPattern("layers.*", 4), MarkPattern("head", 1))
    assert draft.gaps == ()


def test_arguments_are_kept(nets):
    """What stands in brackets is how the model is built."""
    draft = draft_of_model("nets:Net(width=6, classes=2)", nets)
    assert draft.code.imports == ("from nets import Net",)
    assert draft.code.body == ("return Net(width=6, classes=2)",)
    assert draft.takes == (DraftInput("x", (6,)),)
    assert draft_of_model("nets.py:Needy(width=5)", nets).gaps == ()


def test_a_function_and_a_sequential_will_do(nets):
    """The children of an nn.Sequential need no marks."""
    draft = draft_of_model("nets.py:sequence", nets)
    assert (draft.children, draft.marks) == (True, ())


def test_missing_arguments_are_named(nets):
    """Dots stand for what only the user knows, and the file is honest about it."""
    draft = draft_of_model("nets.py:Needy", nets)
    assert draft.code.body[-1] == "return Needy(width=...)"
    assert draft.gaps[0].startswith("Needy needs width: int: ")


def test_arguments_without_a_name_are_dots_alone(nets):
    """What only has a place is given there, before what was given by name."""
    assert (
        draft_of_model("nets.py:Placed(bias=False)", nets).code.body[-1] == "return Placed(..., bias=False, depth=...)"
    )


def test_a_name_that_the_file_has_another_use_for_is_changed(nets):
    """`def model(): return model()` would call itself."""
    code = draft_of_model("nets.py:model(width=6)", nets).code
    assert (code.local, code.body) == (
        ("from nets import model as build_model",),
        ("return build_model(width=6)",),
    )


def test_errors_speak_of_the_class(nets):
    """There is no Workload yet: the class is named as it was called, and the hint says what it takes."""
    with pytest.raises(UsageError) as caught:
        draft_of_model("nets.py:Net(width='a')", nets)
    assert caught.value.message.startswith("Net(width='a') failed at ")
    assert "it is Net(width=8, *, classes=3)" in caught.value.hint


def test_a_file_of_a_package_is_named_by_its_package(nets):
    """One that imports relatively cannot be imported alone; the hint is what to write."""
    (nets / "pack" / "deep").mkdir(parents=True)
    for folder in ("pack", "pack/deep"):
        (nets / folder / "__init__.py").touch()
    (nets / "pack" / "deep" / "relative.py").write_text("from .other import Net\n")
    with pytest.raises(UsageError) as caught:
        draft_of_model("pack/deep/relative.py:Net", nets / "pack" / "deep")
    assert caught.value.hint == "it is part of a package: pack.deep.relative:Net -o workload.py"


def test_a_file_that_hides_behind_a_module_of_python_is_refused(nets):
    """`import os` would give Python's."""
    (nets / "os.py").write_text("from nets import Net\n")
    with pytest.raises(UsageError, match="which is imported in its place"):
        draft_of_model("os.py:Net", nets)


def test_a_model_made_from_a_config_is_small(nets):
    """As transformers' are: from a config of the model's own class, with fewer layers and no cache."""
    body = "\n".join(draft_of_model("nets.py:Configured", nets).code.body)
    for line in ("num_hidden_layers=4,", "hidden_size=256,", "use_cache=False,", "return Configured(config)"):
        assert line in body


def test_rows_that_are_not_first_are_noted(nets):
    """torch's own layers take the sequence first unless they are told."""
    (nets / "nets.py").write_text("from torch.nn import GRU\ndef make():\n    return GRU(4, 4)\n")
    assert "batch_first=False" in draft_of_model("nets.py:make", nets).gaps[-1]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nets.py", "names no model"),
        ("nets.py:", "names no model"),
        ("nets.py:Net()()", "is no class or function"),
        ("nets.py:Net(width=[1)", "cannot be read"),
        ("nets.py:Net(width=open('x'))", "cannot be read"),
        ("nowhere.py:Net", "no such file"),
        ("no.such.package:Net", "cannot import no.such.package"),
        ("class:Net", "no name that Python can import"),
        ("my-net:Net", "no name that Python can import"),
        ("nets.py:Nobody", "no class or function 'Nobody'"),
        ("nets.py:number", "no class or function 'number'"),
        ("nets.py:broken", "no luck"),
        ("os:getcwd", "getcwd gave str"),
    ],
)
def test_wrong_names(nets, model, words):
    """Each is a usage error with a next step."""
    with pytest.raises(UsageError, match=words.replace("(", r"\(")) as caught:
        draft_of_model(model, nets)
    assert caught.value.hint


def test_a_model_of_another_folder_is_refused(nets):
    """The workload file could not import it."""
    (nets / "inner").mkdir()
    with pytest.raises(UsageError, match="not in the folder of the workload file") as caught:
        draft_of_model("nets.py:Net", nets / "inner")
    assert caught.value.hint == "-o workload.py"


def test_nothing_is_computed_and_nothing_held(nets):
    """A model of 40 GB is looked at as fast as a small one."""
    draft = draft_of_model("nets.py:Net(width=50000)", nets)
    assert draft.takes == (DraftInput("x", (50000,)),)
    assert torch.is_grad_enabled()
