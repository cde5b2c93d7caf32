"""One page's blocks at work, in order, in a folder of their own.

The folder has the repository's examples, profiles and benchmarks beside what the page's own blocks write. Commands run
in bash at a width of 100 columns; Python blocks without a title share one process, so that each goes on where the one
before has ended.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from pages import ROOT, Block, Command

if TYPE_CHECKING:
    from typing import IO, Self

LINKED = ("examples", "profiles", "benchmarks")
WIDTH = 100
SETTINGS = {
    "ASSIGNER_PROFILE_MICRO_BATCHES": "2,8",
    "ASSIGNER_PROFILE_MAX_MESSAGE": "1048576",
    "ASSIGNER_PROFILE_FORCE_BUSY": "1",
    "ASSIGNER_SIMULATE_FORCE_BUSY": "1",
    "ASSIGNER_TIME_LIMIT": "600",
}
"""Make the pages' `assigner profile` take less time here, measurements beside other tests be taken as they are, and
proofs end on a busy machine; the commands are as a reader types them."""
LIMIT_S = 1200
_END = "-- end of block --"
_DONE: dict[tuple[object, ...], tuple[list[str], dict[str, str]]] = {}
"""What a command of REMEMBERED said and wrote, by its words, the files that it names and the folder's Python files: run
once for all pages."""
REMEMBERED = ("assigner profile ", "assigner solve ", "assigner run ")

_INTERPRETER = f"""
import json, sys, traceback
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    good = True
    try:
        exec(compile(json.loads(line), "<block>", "exec"), names)
    except BaseException:
        traceback.print_exc()
        good = False
    sys.stderr.flush()
    print({_END!r}, good, flush=True)
"""


class Session:
    """A page's folder and its Python process; leave it with `with`.

    Args:
        folder: An empty one.
        programs: Where `python` and `assigner` are; None: the real ones.
    """

    def __init__(self, folder: Path, programs: Path | None = None) -> None:
        self.folder, self._programs = folder, programs or Path(sys.executable).parent
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASSIGNER_", "PYTEST_"))}
        own = dict.fromkeys((str(folder / "bin"), str(self._programs), str(Path(sys.executable).parent)))
        path = [*own, os.environ.get("PATH", os.defpath)]
        self.environment = {**kept, **SETTINGS, "PATH": os.pathsep.join(path), "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
        self._python: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._pipe(self._python.stdin).close()
            self._python.wait(LIMIT_S)
            self._pipe(self._python.stdout).close()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    def run(self, block: Block) -> list[list[str]]:
        """Do what a block says; the output of each of its commands.

        Raises:
            AssertionError: it fails, or does not give what the page shows.
        """
        if block.title:
            (self.folder / block.title).write_text(block.code, encoding="utf-8")
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "bash" and not block.title:
            self._call(Command(block.code, (), ()), block, 0)
        elif block.language == "python" and not block.title:
            self._interpret(block)
        elif block.language == "console":
            commands = block.commands
            last = int(block.note("exits with") or 0)
            return [self._call(each, block, last if each is commands[-1] else 0) for each in commands]
        return []

    def _call(self, command: Command, block: Block, code: int) -> list[str]:
        if not command.text.startswith(REMEMBERED) or code:
            return self._execute(command, block, code)
        before = self._texts()
        named = {name for name in before if name.endswith(".py") or name in command.text.split()}
        key = command.text, *sorted((name, before[name]) for name in named)
        if key not in _DONE:
            folders = self._folders()
            said = self._execute(command, block, code)
            written = {name: text for name, text in self._texts().items() if before.get(name) != text}
            if self._folders() != folders:
                return said  # it left more than files
            _DONE[key] = said, written
        said, written = _DONE[key]
        for name, text in written.items():
            (self.folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        return said

    def _folders(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.is_dir() and path.name != "__pycache__"}

    def _texts(self) -> dict[str, str]:
        """The folder's own files; one that is no text counts as its bytes."""
        files = [path for path in self.folder.iterdir() if path.is_file() and not path.is_symlink()]
        return {path.name: path.read_text(encoding="utf-8", errors="surrogateescape") for path in files}

    def _execute(self, command: Command, block: Block, code: int) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, f"{block.place}: {command.text}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout.splitlines()

    def _interpret(self, block: Block) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                [self._programs / "python", "-c", _INTERPRETER],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        stdin, stdout = self._pipe(self._python.stdin), self._pipe(self._python.stdout)
        stdin.write(json.dumps(block.code) + "\n")
        stdin.flush()
        said: list[str] = []
        for line in stdout:
            if line.startswith(_END):
                assert line.split()[-1] == "True", f"{block.place}\n{''.join(said)}"
                return
            said.append(line)
        raise AssertionError(f"{block.place}: the process ended\n{''.join(said)}")


def _squeezed(line: str) -> str:
    return re.sub(r"─+", "─", re.sub(r"\s+", " ", line.strip()))


def missing_line(shown: tuple[str, ...], said: list[str], *, as_measured: bool) -> str | None:
    """The first line that a page shows and a command did not say; None: the page is right.

    Spaces and rules count once. `...` stands for anything, on a line of its own for any lines. The lines must stand in
    the page's order; without a `...` nothing may stand between them. With `as_measured`, lines with a digit in them or
    of one word are not compared, and anything may stand between the others.
    """
    found = [line for line in map(_squeezed, said) if line]
    place, anywhere = 0, as_measured
    for line in map(_squeezed, shown):
        if not line or (as_measured and (re.search(r"\d", line) or " " not in line)):
            continue
        if line == "...":
            anywhere = True
            continue
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        reach = range(place, len(found) if anywhere else min(place + 1, len(found)))
        hit = next((n for n in reach if re.fullmatch(pattern, found[n])), None)
        if hit is None:
            return line
        place, anywhere = hit + 1, as_measured
    return None
