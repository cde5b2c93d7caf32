"""What is read from the run's store: this run's words, of the right form, or an error."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import HashStore

import assigner
from assigner.errors import WorkerError
from assigner.launch.seal import SECRET, _mark, clean, seal, seal_first, secret, unseal


@dataclass(frozen=True)
class Word:
    """What is told here."""

    text: str
    number: float = 0.0


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "of the run")


def test_a_word_comes_back() -> None:
    """With every character that is one, from text and from bytes; a list of them, too."""
    word = Word("naïve \x1b[2J\n", 0.1)
    assert unseal(Word, "name", seal("name", Word("lone \ud800"))) == Word("lone ?")
    assert unseal(Word, "name", seal("name", word)) == word
    assert unseal(tuple[Word, ...], "name", seal("name", [word, word]).encode()) == (word, word)


def test_a_word_counts_under_its_own_name_alone() -> None:
    """It cannot be copied to another place of the store."""
    with pytest.raises(WorkerError, match="the run's secret"):
        unseal(Word, "another", seal("name", Word("x")))


def test_a_word_of_another_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this run has none, and where the other had none."""
    for theirs, ours in (("theirs", "ours"), ("theirs", ""), ("", "ours")):
        monkeypatch.setenv(SECRET, theirs)
        text = seal("name", Word("x"))
        monkeypatch.setenv(SECRET, ours)
        with pytest.raises(WorkerError, match=r"'name'.*the run's secret"):
            unseal(Word, "name", text)


@pytest.mark.parametrize(
    "text", ["", "x", "{}", "[]", b"\xff", "9" * 10_000, "[" * 100_000, '{"text": 1}', '{"text": "a", "number": 1e999}']
)
def test_words_without_form_are_refused(text: str | bytes) -> None:
    """Unsealed ones, and sealed ones, as a stranger writes them where a run has no secret."""
    with pytest.raises(WorkerError):
        unseal(Word, "name", text)
    inner = text if isinstance(text, str) else text.decode("latin-1")
    sealed = f"{_mark('name', inner)} {inner}"
    with pytest.raises(WorkerError, match="'name'"):
        unseal(Word, "name", sealed)


def test_the_first_word_stays_and_a_strangers_is_replaced() -> None:
    """Whoever tells second learns the first."""
    store = HashStore()
    store.set("name", "a stranger's")
    assert seal_first(store, "name", Word("first")) == Word("first")
    assert seal_first(store, "name", Word("second")) == Word("first")


def test_a_secret_is_drawn_where_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is set is passed on."""
    assert secret() == {SECRET: "of the run"}
    monkeypatch.delenv(SECRET)
    assert len(secret()[SECRET]) == 64
    assert secret() != secret()


def test_a_text_for_a_screen_cannot_move_its_cursor() -> None:
    """Line breaks and tabs stay: a traceback has them."""
    assert clean("a\x1b]0;b\x07c\r\x9b\u202ed\n\te") == "a\ufffd]0;b\ufffdc\ufffd\ufffd\ufffdd\n\te"


PICKLING = {
    "Unpickler", "DynamicRendezvousHandler", "all_gather_object", "gather_object", "broadcast_object_list",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
LOADERS = {f"{module}.{verb}" for module in ("pickle", "torch", "marshal") for verb in ("load", "loads")}


@pytest.mark.long
def test_nothing_is_unpickled_that_another_process_has_sent() -> None:
    """No module of the package loads a pickle, or asks torch for objects, whose pickles it would load."""
    found = []
    for path in Path(assigner.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if last in PICKLING or (last in ("load", "loads") and ast.unparse(node) in LOADERS):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not found
