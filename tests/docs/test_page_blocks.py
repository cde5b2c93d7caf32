"""Every command and every code block of README.md and docs/ works as it stands."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from pages import LANGUAGES, ROOT, Block, page_names, read_page
from session import Session, missing_line
from unrun import check_command

if TYPE_CHECKING:
    from pathlib import Path

PAGES = page_names()
RUN = [name for name in PAGES if any(block.language in ("console", "python") for block in read_page(name))]
FOREIGN = ("git ", "cd ", "pip ", "python -m http.server")
QUICK = "docs/errors.md"
"""The page that runs in no time: that a page is run, and compared, is seen without the long ones too."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.long]) for name in RUN]
)
def test_every_block_of_a_page_works_and_gives_what_is_shown(page: str, tmp_path: Path, programs: Path) -> None:
    """A page's blocks, run in order in one folder, end as they should and print what the page says they print."""
    with Session(tmp_path, programs) as session:
        for block in read_page(page):
            if block.note("not run") is not None:
                continue
            outputs = session.run(block)
            if block.language != "console":
                continue
            for command, said in zip(block.commands, outputs, strict=True):
                lost = missing_line(command.output, said, as_measured=block.note("as measured") is not None)
                assert lost is None, f"{block.place}: {command.text}: not said: {lost!r}\n" + "\n".join(said)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_at_least_spelled_right(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and flags are those of the real programs, and Python is Python, whether a block is run or not.

    A block that no test can run says why, and each of its commands can be looked at.
    """
    monkeypatch.chdir(tmp_path)  # where the page's files are: a --config is read together with the flags
    for block in read_page(page):
        if block.title:
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
        if block.language == "python":
            compile(block.code, block.place, "exec")
        if block.note("not run") is not None:
            assert block.note("not run"), block.place
            assert block.language in ("python", "console"), block.place
        for command in block.commands if block.language == "console" and not block.hidden else ():
            if command.text.startswith("make "):
                assert f"\n{command.text.split()[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
                continue
            checked = check_command(command.text)
            if block.note("not run") is not None and not command.text.startswith(FOREIGN):
                assert checked, f"{block.place}: {command.text}: nothing in it can be checked"


def scripts() -> list[Block]:
    """Shell scripts that a page shows as files, such as a scheduler's job."""
    return [block for name in PAGES for block in read_page(name) if block.language == "bash" and not block.hidden]


@pytest.mark.parametrize("block", scripts(), ids=lambda block: f"{block.place} {block.title}")
def test_a_shown_script_is_sound(block: Block) -> None:
    """bash can read it, and the calls of assigner in it are ones that exist."""
    assert block.title
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    assert sum(check_command(line) for line in block.code.splitlines())


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    """A fence names one of the known languages; a plain text says why it is neither a command nor its output."""
    for block in read_page(page):
        assert block.language in LANGUAGES, f"{block.place}: {block.language!r}"
        if block.language == "text":
            assert block.note("shown"), f"{block.place}: put output below its command, or say what this is"


def test_lines_that_are_not_said_are_noticed() -> None:
    """Outputs are compared line by line, in order, `...` standing for anything."""
    said = ["plan  for gpt", "", "──────", "step 12 ms  9.1", "status: optimal (HiGHS 1.15, 3 ms)"]
    assert missing_line(("plan for gpt", "───", "step 12 ms 9.1"), said, as_measured=False) is None
    assert missing_line(("plan for gpt", "...", "status: optimal (HiGHS ...)"), said, as_measured=False) is None
    assert missing_line(("plan for gpt", "status: optimal (HiGHS ...)"), said, as_measured=False) is not None
    assert missing_line(("step 13 ms 9.1",), said, as_measured=False) == "step 13 ms 9.1"
    assert missing_line(("plan for gpt", "step 99 ms"), said, as_measured=True) is None
    assert missing_line(("no such line",), said, as_measured=True) == "no such line"
