"""Orders of actions as a plan lists them: `0F0 0F1 1F0 1B0 0B0 ...`, by worker.

A step is a stage, a letter and a micro-batch, as torch.distributed.pipelining writes it: F a forward, B a backward; or
in its place I, the part of it that gives the gradients of what the stage read, and later W, that of its weights.

An order is sound in itself if each forward and each backward of the plan stands in it once, on the worker that has the
stage for that micro-batch, and a backward behind its forward. The forwards of a stage stand in the order of their
micro-batches, as they run without a plan: what a forward writes into a buffer, the next one reads. Whether workers wait
for each other in a circle depends on the model's graph: `schedule/deadlock.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.files import read_text
from assigner.formats.document import decode, parse_json, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from assigner.formats.stage import Stage

FORWARD, BACKWARD, INPUT, WEIGHT = "FBIW"
STEP_LETTERS = {"forward": FORWARD, "backward": BACKWARD, "backward_input": INPUT, "backward_weight": WEIGHT}
"""By what a worker does; all else has none."""
_STEP = re.compile("([0-9]{1,6})([FBIW])([0-9]{1,6})")


class ListedStep(NamedTuple):
    """One forward, one backward or one part of a backward.

    Args:
        stage: Its position in the plan.
        letter: F, B, I or W.
        micro_batch: 0 to M - 1.
    """

    stage: int
    letter: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.micro_batch}"


def parse_order(text: str, where: str, *, most: int | None = None) -> tuple[ListedStep, ...]:
    """The steps of one worker's order, which spaces part: no more than `most`, so that any file is answered at once.

    Raises:
        FormatError: a word is no step, or there are too many.
    """
    words, steps = text.split(), []
    if most is not None and len(words) > most:
        raise FormatError(f"{where}: {fmt.plural(len(words), 'step')}; the plan has no more than {most} in all")
    for word in words:
        match = _STEP.fullmatch(word)
        if match is None:
            raise FormatError(
                f"{where}: {shown(word)} is not allowed; expected a stage, one of F, B, I and W, and a micro-batch,"
                " as 0F0"
            )
        steps.append(ListedStep(int(match[1]), match[2], int(match[3])))
    return tuple(steps)


def written_order(steps: Iterable[ListedStep]) -> str:
    """An order as a plan has it."""
    return " ".join(map(str, steps))


def cut_orders(orders: Mapping[str, Sequence[ListedStep]], micro_batches: int) -> dict[str, str]:
    """The orders of a step's first micro-batches: the others' steps are left out, what remains stays as it was."""
    return {
        worker: written_order(step for step in steps if step.micro_batch < micro_batches)
        for worker, steps in orders.items()
    }


def forwards_taken(orders: Mapping[str, Sequence[ListedStep]], stage: int) -> dict[int, str]:
    """The worker that has each micro-batch's forward of a stage."""
    return {
        step.micro_batch: worker
        for worker, steps in orders.items()
        for step in steps
        if step.stage == stage and step.letter == FORWARD
    }


def check_orders(orders: Mapping[str, Sequence[ListedStep]], stages: Sequence[Stage], micro_batches: int) -> None:
    """Raise FormatError unless the orders, by worker, are sound in themselves."""
    holders = dict.fromkeys(worker for stage in stages for worker in stage.workers)
    for worker in orders:
        if worker not in holders:
            raise FormatError(f"orders: {worker!r} holds no stage", hint=fmt.meant(worker, [*holders], "workers"))
    taker: dict[tuple[int, int], str] = {}
    for worker in holders:
        if worker not in orders:
            raise FormatError(f"orders: {worker!r} holds a stage and has no order")
        _check_order(orders[worker], worker, stages, micro_batches, taker)
    for n, stage in enumerate(stages):
        for m in range(micro_batches):
            if (n, m) not in taker:
                raise FormatError(f"orders: {n}F{m} is in none; each stage runs every micro-batch once")
        for each in stage.replicas:
            count = sum(taker[n, m] == each.worker for m in range(micro_batches))
            if count != each.micro_batches:
                raise FormatError(
                    f"orders[{each.worker}]: {fmt.plural(count, 'micro-batch')} of stage {n}; its replica takes"
                    f" {each.micro_batches}"
                )


def _check_order(
    steps: Sequence[ListedStep],
    worker: str,
    stages: Sequence[Stage],
    micro_batches: int,
    taker: dict[tuple[int, int], str],
) -> None:
    """One worker's order; `taker` gets to know who runs which stage for which micro-batch."""
    where = f"orders[{worker}]"
    before: dict[tuple[int, int], str] = defaultdict(str)  # the letters of a stage and micro-batch so far
    latest: dict[int, int] = {}
    for step in steps:
        stage, letter, m = step
        if stage >= len(stages) or m >= micro_batches:
            raise FormatError(
                f"{where}: {step} is not allowed; the plan has {fmt.plural(len(stages), 'stage')}, numbered from 0,"
                f" and {fmt.plural(micro_batches, 'micro-batch')}"
            )
        if worker not in stages[stage].workers:
            raise FormatError(f"{where}: {step} is not allowed; stage {stage} is on {', '.join(stages[stage].workers)}")
        seen = before[stage, m]
        if letter in seen:
            raise FormatError(f"{where}: {step} stands twice")
        if letter == FORWARD:
            _check_forward(step, worker, where, latest, taker)
        else:
            _check_backward(step, seen, where)
        before[stage, m] += letter
    for (stage, m), seen in before.items():
        if seen == FORWARD:
            raise FormatError(f"{where}: {stage}B{m} is missing; each forward has its backward")
        if INPUT in seen and WEIGHT not in seen:
            raise FormatError(f"{where}: {stage}W{m} is missing; {stage}I{m} is only a part of the backward")


def _check_forward(
    step: ListedStep, worker: str, where: str, latest: dict[int, int], taker: dict[tuple[int, int], str]
) -> None:
    stage, _, m = step
    if (stage, m) in taker:
        raise FormatError(f"{where}: {step} stands in the order of {taker[stage, m]} too")
    if latest.get(stage, -1) > m:
        raise FormatError(
            f"{where}: {step} stands behind {stage}F{latest[stage]}",
            hint="the forwards of a stage go in the order of their micro-batches: what one writes, the next one reads",
        )
    latest[stage], taker[stage, m] = m, worker


def _check_backward(step: ListedStep, seen: str, where: str) -> None:
    stage, letter, m = step
    if FORWARD not in seen:
        raise FormatError(f"{where}: {step} stands without {stage}F{m} before it")
    if letter == WEIGHT and INPUT not in seen:
        raise FormatError(f"{where}: {step} stands without {stage}I{m} before it")
    if letter != WEIGHT and seen != FORWARD:
        raise FormatError(
            f"{where}: {step} and {stage}{seen[1]}{m} are the same backward",
            hint="a backward is B as a whole, or I and later W",
        )


def load_orders(path: Path, workers: Sequence[str]) -> dict[str, str]:
    """The order of each worker, as it stands in a file of its own; whether it is sound is for the plan to say.

    Args:
        path: JSON where it begins with a brace, `{"worker:0/cpu": "0F0 0B0", ...}`; else CSV with a row for each
            worker and a cell for each step, as `assigner export --to pipelining-schedule` writes it. Empty cells, in
            which torch's workers wait, are left out.
        workers: The plan's, whose rows they are in this order.

    Raises:
        UsageError: the file cannot be read.
        FormatError: it is neither, or has another number of rows than there are workers.
    """
    text = read_text(path, hint="is this the path of a file with orders?")
    if text.lstrip().startswith("{"):
        found = parse_json(text, path, name="file of orders", hint='write {"WORKER": "0F0 0B0", ...}')
        try:
            return decode(dict[str, str], found, "orders")  # type: ignore[no-any-return]
        except FormatError as error:
            hint = "assigner schedule PLAN --list -o FILE writes a file of orders"
            raise FormatError(f"{path}: {error.message}", hint=hint) from error
    rows = [row for row in text.splitlines() if row.strip()]
    if len(rows) != len(workers):
        raise FormatError(
            f"{path}: {fmt.plural(len(rows), 'row')}, and {fmt.plural(len(workers), 'worker')}: {', '.join(workers)}",
            hint="a CSV has a row for each worker of the plan, in pipeline order; JSON names them",
        )
    return {
        worker: " ".join(cell.strip() for cell in row.split(",") if cell.strip())
        for worker, row in zip(workers, rows, strict=True)
    }
