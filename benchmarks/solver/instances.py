"""Our max-load search on published instances, against the values that are known for them.

    python benchmarks/solver/instances.py [DATA_DIR] [--only PATTERN] [--time-limit 30] [--solver highs|cbc] [--free]

DATA_DIR holds dnn-partitioning/throughput/*.json (with dnn-partitioning/reference.csv), piper/*.json and
pipedream/*.txt; INSTANCES.md says where to get them. Every file found is solved, known or not. Our values are
evaluated from the placement, node by node, and not taken from a solver.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # before numpy: small products are slower on several

from load import LoadOptions, evaluate, solve_load  # noqa: E402
from plain import baselines  # noqa: E402
from readers import (  # noqa: E402
    PIPEDREAM_KNOWN,
    PIPER_DEFAULT,
    PIPER_KNOWN,
    PIPER_WITHOUT_REMAT,
    is_pipedream,
    read_dnn_partitioning,
    read_pipedream,
    read_piper,
)

from assigner.errors import AssignerError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from load import LoadProblem

Row = dict[str, Any]
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def solve(case: argparse.Namespace, problem: LoadProblem, reference: float | None, *, gap: float = 1e-6) -> Row:
    """One placement: our value, the reference, the bound, and how it was proven."""
    options = LoadOptions(solver=case.solver, seed=case.seed, time_limit=case.time_limit, gap=gap)
    answer = solve_load(problem, options)
    value = math.inf if answer.infeasible else evaluate(problem, answer.stages).value
    if not answer.infeasible and value != answer.value:
        raise AssertionError(f"evaluated {value}, said {answer.value}")
    used = [
        "+".join(str(stage.replicas) for stage in answer.stages if stage.device == c) if problem.replicas > 1
        else sum(stage.device == c for stage in answer.stages)
        for c in range(len(problem.devices))
    ]  # fmt: skip
    is_open = math.isinf(value) and not answer.infeasible  # the time was over before there was a plan
    return {
        "ours": None if is_open else value, "reference": reference,
        "diff %": None if is_open else _difference(value, reference), "bound": answer.bound,
        "gap %": None if answer.infeasible or is_open else 100 * answer.gap,
        "devices": "+".join(map(str, used)), "found by": answer.found_by, "proven by": answer.proven_by,
        "s": answer.seconds,
    }  # fmt: skip


def _difference(value: float, reference: float | None) -> float | None:
    if reference is None or (math.isinf(value) and math.isinf(reference)):
        return None if reference is None else 0.0
    return 100 * (value - reference) / reference


def dnn_partitioning(case: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Contiguous with the CPU, and without; --free: non-contiguous."""
    known = _references(path.parents[1] / "reference.csv").get(path.stem, {})
    modes: list[tuple[str, str, dict[str, bool], float]] = [
        ("contiguous", "contiguous_optimum", {}, 1e-6),
        ("without CPU", "contiguous_optimum_without_cpu", {"cpu": False}, 1e-6),
    ]
    if case.free:
        modes.append(("non-contiguous", "non_contiguous_best", {"contiguous": False}, 1e-4))
    plain = baselines(read_dnn_partitioning(path, cpu=False))
    for name, column, settings, gap in modes:
        row = solve(case, read_dnn_partitioning(path, **settings), known.get(column), gap=gap)
        yield {"instance": path.stem, "mode": name, **row, **plain}


def _references(path: Path) -> dict[str, dict[str, float]]:
    if not path.exists():
        return {}
    with path.open() as lines:
        return {row["instance"]: {k: number for k, v in row.items() if (number := _float(v)) is not None}
                for row in csv.DictReader(lines)}  # fmt: skip


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def piper(case: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Every setting with recompute as an option, and without."""
    known = [(k, gibibytes) for name, k, gibibytes in PIPER_KNOWN if name == path.stem]
    for k, gibibytes in case.piper_settings or known or PIPER_DEFAULT:
        for remat in (True, False):
            problem = read_piper(path, stages=k, gibibytes=gibibytes, remat=remat)
            table = PIPER_KNOWN if remat else PIPER_WITHOUT_REMAT
            row = solve(case, problem, table.get((path.stem, k, gibibytes)))
            name = f"{path.stem} {k} x {gibibytes:g} GiB"
            yield {"instance": name, "mode": "recompute" if remat else "plain", **row, **baselines(problem)}


def pipedream(case: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Lines without replication, and with."""
    if not is_pipedream(path):
        return
    for workers in case.pipedream_workers:
        plain = baselines(read_pipedream(path, workers=workers))
        for replicas in (1, workers):
            problem = read_pipedream(path, workers=workers, replicas=replicas)
            row = solve(case, problem, PIPEDREAM_KNOWN.get((path.stem, workers, replicas > 1)))
            mode = f"{workers} workers, {'replicated' if replicas > 1 else 'one each'}"
            yield {"instance": path.stem, "mode": mode, **row, **plain}


FAMILIES: dict[str, tuple[str, Callable[[argparse.Namespace, Path], Iterator[Row]]]] = {
    "dnn-partitioning": ("throughput/*.json", dnn_partitioning),
    "piper": ("*.json", piper),
    "pipedream": ("*.txt", pipedream),
}
"""Where the files of each family lie, and how one is solved."""


def rows_of(case: argparse.Namespace, family: str) -> Iterator[Row]:
    """The rows of every file of a family; one that cannot be read is told on stderr and left out."""
    pattern, solve_file = FAMILIES[family]
    for path in sorted((case.data / family).glob(pattern)):
        if case.only in str(path.relative_to(case.data)):
            try:
                yield from solve_file(case, path)
            except (AssignerError, KeyError, ValueError) as error:
                print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        places = {"s": ".1f", "diff %": "+.4f", "gap %": ".4f"}.get(column, ".7g")
        return "infeasible" if math.isinf(value) else format(value, places)
    return str(value)


def _print(rows: Iterator[Row]) -> list[Row]:
    """A table, line by line as it is solved."""
    done: list[Row] = []
    for row in rows:
        if not done:
            print(f"\n| {' | '.join(row)} |\n|{' --- |' * len(row)}")
        print(f"| {' | '.join(_cell(key, value) for key, value in row.items())} |", flush=True)
        done.append(row)
    return done


def _settings(text: str) -> list[tuple[int, float]]:
    return [(int(k), float(size)) for k, size in (setting.split("x") for setting in text.split(","))]


def main() -> None:
    """Print a table for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA, metavar="DATA_DIR")
    parser.add_argument("--only", default="", metavar="PATTERN", help="part of a file's path")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each placement")
    parser.add_argument("--solver", choices=("highs", "cbc"), default="highs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--free", action="store_true", help="non-contiguous placements too")
    parser.add_argument("--piper-settings", type=_settings, default=[], metavar="8x16,8x8", help="devices x GiB")
    parser.add_argument("--pipedream-workers", type=lambda text: [int(k) for k in text.split(",")], default=[4])
    parser.add_argument("--json", type=Path, help="write all rows there")
    case = parser.parse_args()
    found = {}
    for name in FAMILIES:
        print(f"\n## {name}")
        found[name] = _print(rows_of(case, name))
        if not found[name]:
            print(f"\nno file in {case.data / name} matches {case.only!r}")
    if case.json:
        case.json.write_text(json.dumps(found, indent=1, default=str).replace("Infinity", "null"))


if __name__ == "__main__":
    main()
