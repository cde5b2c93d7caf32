"""The foreign list over some ranks, each case against plain torch.

    torchrun --nproc-per-node 2 tests/foreign/run.py --only 'in place' --remat all
    python tests/foreign/run.py --ranks 3 --micro-batches 2 --remat none --remat all --json found.json [--resume]

The second form starts the first in batches, and goes on after a case that hangs or takes its process with it. One rank
needs no launcher. Rank 0 prints how many there are of each verdict, and each that is not equal with its words. The file
is written after each batch: with --resume a run that was stopped goes on after the last one.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import assigner  # noqa: F401 - before the next line: tests/assigner is no package

sys.path.append(str(Path(__file__).resolve().parent.parent))

from foreign.case import Case, all_cases
from foreign.harness import PLACES, PLANS, WORST, Judge, Setting, Verdict

BATCH = 25


def chosen(only: str) -> list[Case]:
    return [each for each in all_cases() if re.search(only, f"{each.group}: {each.name}", re.IGNORECASE)]


def settings(options: argparse.Namespace, ranks: int) -> list[Setting]:
    return [
        Setting(ranks, *each, options.devices, plan)
        for *each, plan in itertools.product(
            options.micro_batches or [1, 2], options.remat or ["none", "all"], options.plan or ["equal"]
        )
    ]


def work(cases: list[Case], given: list[Setting], folder: Path, rank: int, patience_s: float) -> None:
    """A rank's verdicts, a line each."""
    with (folder / f"{rank}.jsonl").open("a") as lines:
        for each in cases:
            judge = Judge(each, patience_s / 4, tells=True)  # who waits in vain says so before the launcher ends it
            for setting in given:
                line = {"case": each.name, "setting": asdict(setting), **asdict(judge.verdict(setting))}
                lines.write(json.dumps(line) + "\n")
                lines.flush()


def found(folder: Path) -> dict[tuple[str, Setting], Verdict]:
    """The worst verdict of each case and setting that all ranks ended; a state that none compared is a difference."""
    verdicts: dict[tuple[str, Setting], Verdict] = {}
    ended: collections.Counter[tuple[str, Setting]] = collections.Counter()
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            key = line.pop("case"), Setting(**line.pop("setting"))
            verdict = Verdict(**{**line, "lost": tuple(line["lost"])})
            verdicts[key] = verdicts[key].worse(verdict) if key in verdicts else verdict
            ended[key] += 1
    return {key: each.settled() for key, each in verdicts.items() if ended[key] == key[1].ranks}


def supervise(
    cases: list[Case], given: list[Setting], options: argparse.Namespace
) -> dict[tuple[str, Setting], Verdict]:
    """Run all cases in batches of processes of their own."""
    verdicts = read(options.json) if options.resume else {}
    waiting = [each for each in cases if any((each.name, setting) not in verdicts for setting in given)]
    while waiting:
        batch = waiting[:BATCH]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "names").write_text(json.dumps([each.name for each in batch]))
            why = _run_batch(folder, options)
            verdicts.update(found(folder))
            done = next((n for n, each in enumerate(batch) if (each.name, given[-1]) not in verdicts), len(batch))
            if done < len(batch):
                stopped = next(each for each in given if (batch[done].name, each) not in verdicts)
                verdicts[batch[done].name, stopped] = Verdict("foreign", why)
                done += 1
        waiting = waiting[done:]
        if options.json is not None:
            write(verdicts, options.json)
        sys.stderr.write(f"{len(cases) - len(waiting)} of {len(cases)}\n")
    return verdicts


def _run_batch(folder: Path, options: argparse.Namespace) -> str:
    """Why it ended."""
    ranks = options.ranks
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = [f"--patience={options.patience}", f"--devices={options.devices}"]
    words += [f"--micro-batches={each}" for each in options.micro_batches or ()]
    words += [f"--remat={each}" for each in options.remat or ()]
    words += [f"--plan={each}" for each in options.plan or ()]
    said = (folder / "said").open("w")
    started = subprocess.Popen(
        [sys.executable, *launcher, __file__, "--folder", str(folder), *words],
        stdout=said, stderr=said, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while started.poll() is None:
        times = [each.stat().st_mtime for each in folder.iterdir()]
        if time.time() - max(times) > options.patience:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            return f"no verdict for {options.patience:g} s: it hangs"
        time.sleep(0.5)
    return f"the process ended with {started.returncode}: {(folder / 'said').read_text()[-800:]}"


def write(verdicts: dict[tuple[str, Setting], Verdict], path: Path) -> None:
    """The verdicts, whole or not at all: a run may be stopped at any time."""
    groups = {each.name: each for each in all_cases()}
    lines = [
        {"group": groups[name].group, "case": name, "setting": asdict(setting), "allowed":
         groups[name].allows(each.kind, each.words, places=PLACES[setting.plan]), **asdict(each)}
        for (name, setting), each in verdicts.items() if name in groups
    ]  # fmt: skip
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps(lines, indent=1))
    beside.replace(path)


def read(path: Path) -> dict[tuple[str, Setting], Verdict]:
    """What `write` wrote; nothing where there is no file yet."""
    lines = json.loads(path.read_text()) if path.exists() else []
    return {
        (line["case"], Setting(**line["setting"])):
        Verdict(line["kind"], line["words"], line["inherent"], tuple(line["lost"]))
        for line in lines
    }  # fmt: skip


def show(verdicts: dict[tuple[str, Setting], Verdict], cases: list[Case]) -> int:
    """The tables; how many cases are not as they should be."""
    groups = {each.name: each for each in cases}
    worst: dict[str, tuple[Setting, Verdict]] = {}
    for (name, setting), verdict in verdicts.items():
        if name not in worst or WORST.index(verdict.kind) > WORST.index(worst[name][1].kind):
            worst[name] = setting, verdict
    console = Console(width=200)
    table = Table("group", "case", "verdict", "where", "should be", "words", show_lines=True)
    for name, (setting, verdict) in worst.items():
        if verdict.kind != "equal":
            is_allowed = groups[name].allows(verdict.kind, verdict.words, places=PLACES[setting.plan])
            wanted = "" if is_allowed else (groups[name].refusal or "equal")
            table.add_row(groups[name].group, name, verdict.kind, f"{setting}", wanted, verdict.words[:500])
    console.print(table, markup=False)
    counts = Table("group", *WORST)
    for group in dict.fromkeys(each.group for each in cases):
        kinds = collections.Counter(verdict.kind for name, (_, verdict) in worst.items() if groups[name].group == group)
        counts.add_row(group, *[str(kinds[kind] or "") for kind in WORST])
    kinds = collections.Counter(verdict.kind for _, verdict in worst.values())
    counts.add_row("all", *[str(kinds[kind] or "") for kind in WORST])
    console.print(counts)
    undeclared = [name for (name, _), each in verdicts.items() if each.inherent and not groups[name].inherent]
    if undeclared:
        console.print("whole batch and micro-batches differ in plain torch:", *dict.fromkeys(undeclared), sep="\n  ")
    bad = [
        name
        for (name, setting), each in verdicts.items()
        if not groups[name].allows(each.kind, each.words, places=PLACES[setting.plan])
    ]
    console.print(f"{len(worst)} cases, {len(dict.fromkeys(bad))} not as they should be")
    return len(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression over `module: name`")
    parser.add_argument("--ranks", type=int, default=1, help="without torchrun")
    parser.add_argument("--micro-batches", type=int, action="append", help="1 and 2 where none is given")
    parser.add_argument(
        "--remat", action="append", choices=("none", "half", "all"), help="none and all are the default"
    )
    parser.add_argument("--plan", action="append", choices=(*PLANS,), help="equal is the default")
    parser.add_argument("--devices", default="cpu", help="of the ranks: cuda:0,cpu; the last one also of those left")
    parser.add_argument("--json", type=Path, help="written after each batch")
    parser.add_argument("--resume", action="store_true", help="leave out what the file of --json has already")
    parser.add_argument(
        "--patience", type=float, default=120, metavar="S", help="a case without a verdict for so long hangs"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resume and options.json is None:
        parser.error("--resume goes on with the file of --json, and none is given")
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cases = chosen(options.only)
    if options.folder is not None:  # started by `supervise`
        names = json.loads((options.folder / "names").read_text())
        cases = [each for each in cases if each.name in names]
        work(cases, settings(options, ranks), options.folder, rank, options.patience)
        return 0
    if "RANK" in os.environ:
        folder = Path(tempfile.gettempdir()) / f"foreign {os.environ['MASTER_PORT']} {os.getppid()}"
        folder.mkdir(exist_ok=True)
        work(cases, settings(options, ranks), folder, rank, options.patience)
        (folder / f"{rank}.ended").touch()
        while rank == 0 and len(list(folder.glob("*.ended"))) < ranks:
            time.sleep(0.2)
        if rank > 0:
            return 0
        verdicts = found(folder)
    else:
        verdicts = supervise(cases, settings(options, options.ranks), options)
    if options.json is not None:
        write(verdicts, options.json)
    names = {each.name for each in cases}
    return show({key: each for key, each in verdicts.items() if key[0] in names}, cases)


if __name__ == "__main__":
    raise SystemExit(bool(main()))
