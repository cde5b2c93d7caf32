"""On two CPU ranks: torch.distributed.pipelining with a schedule and stages that `assigner export` wrote.

torchrun --nproc-per-node 2 tests/runs/pipelining.py FOLDER

Trains one step for each FOLDER/NAME.csv with FOLDER/NAME.json. Writes FOLDER/rankN.json: name -> how far this rank's
gradients lie from those of the plain model.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

ROWS, WIDTH, MICRO_BATCHES = 8, 4, 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = OrderedDict((f"p{n}", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for n in range(6))
    return nn.Sequential(layers).double()


def worst(folder: Path, name: str) -> float:
    names = json.loads((folder / f"{name}.json").read_text())
    rows = list(csv.reader((folder / f"{name}.csv").read_text().splitlines()))
    mine = sorted({int(cell[: cell.index("F")]) for cell in rows[dist.get_rank()] if "F" in cell})
    model, plain = make_model(), make_model()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    nn.functional.mse_loss(plain(inputs), targets).backward()

    parts = {n: nn.Sequential(*(model.get_submodule(each) for each in names[n])) for n in mine}
    stages = [PipelineStage(parts[n], n, len(names), torch.device("cpu")) for n in mine]
    schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(str(folder / f"{name}.csv"), format="compute_only")
    schedule.step(*([inputs] if 0 in mine else []), **({"target": targets} if len(names) - 1 in mine else {}))
    return max(
        float((model.get_parameter(each).grad - parameter.grad).abs().max())
        for each, parameter in plain.named_parameters()
        if any(each.startswith(f"{module}.") for n in mine for module in names[n])
    )


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found = {path.stem: worst(folder, path.stem) for path in sorted(folder.glob("*.csv"))}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
