"""Orders in files of their own: a JSON object by worker, or torch.distributed.pipelining's compute-only CSV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.files import read_text
from assigner.formats.document import decode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def load_orders(path: Path, workers: Sequence[str]) -> dict[str, str]:
    """The order of each worker, as it stands in a file; whether it is sound is for the plan to say.

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
    try:
        if text.lstrip().startswith("{"):
            return decode(dict[str, str], json.loads(text), "orders")  # type: ignore[no-any-return]
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            hint='write {"WORKER": "0F0 0B0", ...}',
        ) from error
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error
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
