"""Ranks that fail, each scenario in processes forked from this one, so that torch is imported once.

    python tests/runs/failures.py FOLDER

No launcher: rank 0 keeps the job's store, and nobody ends the others. Writes FOLDER/found.json: scenario -> exit codes
and what each rank wrote to stderr.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from assigner import Pipeline, Workload
from assigner.errors import AssignerError
from assigner.runtime.failures.cause import OtherWorkerError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from forked_ranks import end_after
from free_ports import free_ports
from workloads import graph_of, make_plan, numbers, sgd

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan

WORLD = 3
START_S = 600.0
PATIENCE_S = 600.0
STILL, STILL_S = 2, 4.0


FATAL = 15
TRAP = {"armed": False, "calls": 0}
"""Outside of the layer: a stage that several ranks share cannot count in there."""


class Trap(nn.Linear):
    """A layer whose forward fails at the fatal call of any, on the rank that arms it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if TRAP["armed"]:
            TRAP["calls"] += 1
            if TRAP["calls"] == FATAL:
                raise ArithmeticError("the trap snapped")
        return super().forward(x)


def made_workload() -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(Trap(8, 8), Trap(8, 8), Trap(8, 1)).double()

    return Workload(model, numbers, nn.functional.mse_loss, sgd, 8)


MADE = made_workload()
PLAN = make_plan(MADE, [(0, ["0"]), (1, ["1"]), (2, ["2"])])
COUNTS = {0: 1, 1: 1, 2: 2}
SHARED = make_plan(MADE, [(COUNTS, ["0"]), (COUNTS, ["1", "2"])], remat=["0"])
"""The fatal call of rank 2 recomputes the first stage, when the gradients of the second one are being added up."""


def train(
    steps: int, *, failing: int | None = None, timeout_s: float = 60.0, at_five: Any = None, plan: Plan = PLAN
) -> None:
    """Some steps; from the fifth on this rank is ready to be killed."""
    rank = int(os.environ["RANK"])
    with Pipeline(MADE, plan, timeout_s=timeout_s, graph=graph_of(MADE)) as pipeline:
        TRAP["armed"] = rank == failing
        for n in range(steps):
            pipeline.step(MADE.make_batch(8, n))
            if n == 5:
                Path(f"ready.{rank}").touch()
                if at_five is not None:
                    at_five(rank)


def stall(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def raise_in_script(rank: int) -> None:
    if rank == 2:
        raise KeyError("the user's own")


def raise_while_one_stands_still(rank: int) -> None:
    """Rank 2 gets no processor for longer than anybody would stay for it without cause."""
    if rank == 1:
        raise KeyError("the user's own")
    if rank == STILL:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {STILL_S:g}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def late(rank: int) -> None:
    time.sleep(1.5 * rank)


def without_close() -> None:
    pipeline = Pipeline(MADE, PLAN, graph=graph_of(MADE))
    for n in range(3):
        pipeline.step(MADE.make_batch(8, n))


ENDLESS = 10**6
SCENARIOS: dict[str, tuple[Callable[[], None], int | None]] = {
    "raises on rank 1": (lambda: train(ENDLESS, failing=1), None),
    "raises on rank 0": (lambda: train(ENDLESS, failing=0), None),
    "killed rank 0": (lambda: train(ENDLESS), 0),
    "killed rank 1": (lambda: train(ENDLESS), 1),
    "raises on a rank that shares": (lambda: train(ENDLESS, failing=2, plan=SHARED), None),
    "killed rank that shares": (lambda: train(ENDLESS, plan=SHARED), 1),
    "stalls": (lambda: train(ENDLESS, timeout_s=10.0, at_five=stall), None),
    "script raises": (lambda: train(ENDLESS, at_five=raise_in_script), None),
    "raises while one stands still": (lambda: train(ENDLESS, at_five=raise_while_one_stands_still), None),
    "ends apart": (lambda: train(6, at_five=late), None),
    "never closed": (without_close, None),
}


def child(rank: int, port: int, body: Callable[[], None], *, quickly: bool) -> NoReturn:
    """One rank: ends as a script does, with a traceback and exit code 1 where it raises, through a normal exit.

    `quickly`: but for taking the modules of torch apart.
    """
    errors = os.open(f"stderr.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if quickly:
        end_after(functools.partial(end_with, body))
    end_with(body)


def end_with(body: Callable[[], None]) -> NoReturn:
    """Exit as a script with this body does."""
    try:
        body()
    except AssignerError as error:
        traceback.print_exc()
        if isinstance(error, OtherWorkerError) and isinstance(error, ArithmeticError):
            sys.stderr.write(f"caught as an ArithmeticError of {error.worker}: {str(error).splitlines()[0]}")
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - as the interpreter does at the end of a script
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def run(folder: Path, body: Callable[[], None], victim: int | None, *, quickly: bool = False) -> dict[str, Any]:
    folder.mkdir()
    os.chdir(folder)
    (port,) = free_ports(1)
    ranks = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            child(rank, port, body, quickly=quickly)
        ranks[pid] = rank
    start = time.monotonic()
    if victim is not None:
        ready = [Path(f"ready.{rank}") for rank in range(WORLD)]
        while not all(path.exists() for path in ready) and time.monotonic() < start + START_S:
            time.sleep(0.05)
        if not all(path.exists() for path in ready):
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            sys.exit(f"the ranks do not train within {START_S:g} s")
        os.kill(next(pid for pid, rank in ranks.items() if rank == victim), signal.SIGKILL)
    codes: dict[int, int] = {}
    start = time.monotonic()
    patience_s = PATIENCE_S if victim is not None else START_S + PATIENCE_S
    while ranks and time.monotonic() < start + patience_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid, rank in ranks.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = -99
    texts = [Path(f"stderr.{rank}").read_text() for rank in range(WORLD)]
    return {"codes": [codes[rank] for rank in range(WORLD)], "stderr": texts}


def main(folder: Path, names: list[str]) -> None:
    found = {}
    gc.freeze()  # the ranks share torch's objects with this process: to collect them at their end would copy them all
    for n, (name, (body, victim)) in enumerate(SCENARIOS.items()):
        if not names or name in names:
            found[name] = run(folder / str(n), body, victim)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
