"""Training scripts of public repositories, ported: the same losses and metrics, stopped and resumed, weights back."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scripts.port import NAMES, Log, changes, difference, lines_of, script
from sweeps import sweep

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

ROOT = Path(__file__).resolve().parents[2]
EXACT = 1e-9
TRAINED = sweep(NAMES, quick=("word_lstm", "nano_gpt", "adversarial", "waves"))
"""In every run: gradients over several batches, state between batches, two optimizers, a closure."""


@functools.cache
def plain(name: str, loop: str = "plain") -> tuple[list[dict[str, float]], list[float]]:
    """The log of the plain loop, and what is done with its weights."""
    log, module = Log(), script(name)
    model = getattr(module, loop, module.plain)(log)
    return log.lines, module.used(model)


class Ported:
    """What each rank of tests/runs/ported.py found of a script, run once; 0 ranks: one process that is none."""

    def __init__(self, forked: ForkedRanks, folder: Path) -> None:
        self._forked, self._folder = forked, folder
        self._known: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def __call__(self, name: str, ranks: int) -> list[dict[str, Any]]:
        if (name, ranks) not in self._known:
            folder = self._folder / f"{name} {ranks}"
            folder.mkdir()
            self._forked.run("ported.py", folder, name, ranks=ranks, before=f"scripts.port:captured {name}")
            texts = [(folder / f"{rank}.jsonl").read_text() for rank in range(max(ranks, 1))]
            self._known[name, ranks] = [json.loads(text) for text in texts]
        return self._known[name, ranks]


@pytest.fixture(scope="module")
def ported(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> Ported:
    return Ported(forked, tmp_path_factory.mktemp("ported"))


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    lines, used = plain(name)
    for found in ranks:
        assert difference(found["whole"], lines) < EXACT
    assert ranks[0]["whole: used"] == pytest.approx(used, rel=EXACT, abs=EXACT)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_give_what_the_plain_script_gives(name: str, ported: Ported) -> None:
    """Losses, metrics and rates of every line on both ranks; then what the weights give in plain PyTorch."""
    check(name, ported(name, 2))


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("name", TRAINED)
def test_a_stopped_script_goes_on_in_the_middle_of_its_data(name: str, ported: Ported) -> None:
    """A signal to one rank ends all of them at the same line; with the workers exchanged the rest follows, line by
    line, and ends with the same weights.
    """
    lines, used = plain(name, "stopped")
    ranks = ported(name, 2)
    for found in ranks:
        assert 0 < len(found["stopped"]) < len(lines)
        assert difference(found["stopped"] + found["resumed"], lines) < EXACT
    assert ranks[0]["resumed: used"] == pytest.approx(used, rel=EXACT, abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_one_rank_gives_what_the_plain_script_gives(name: str, ported: Ported) -> None:
    """The same on one worker, without a launcher, in whole batches."""
    check(name, ported(name, 0))


@pytest.mark.parametrize("name", NAMES)
def test_a_ported_loop_needs_no_way_around(name: str) -> None:
    """No global, no second forward of what was evaluated, no word of torch.distributed."""
    loop = "\n".join(lines_of(script(name).ported))
    assert not re.search(r"\bglobal\b|\bnonlocal\b|\bdist\.|torch\.distributed|\.forward\(", loop)


def test_the_page_says_how_many_lines_change() -> None:
    """The table of docs/porting.md has the lines of each loop, plain and ported, and those that are another."""
    page = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*?`(\w+)\.py` \| (\d+) \| (\d+) \| (\d+) \|$", page, flags=re.MULTILINE)
    assert {name: tuple(map(int, found)) for name, *found in rows} == {name: changes(name) for name in NAMES}
