"""Ray Train starts two ranks, each of which makes the pipeline; see train.py.

ASSIGNER_PLAN=PLAN python tests/launched/by_ray.py FILE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def loop(config: dict[str, Any]) -> None:
    """One rank."""
    os.environ["ASSIGNER_PLAN"] = config["plan"]
    sys.path[:0] = [config["folder"]]
    from train import main

    main(Path(config["file"]))


if __name__ == "__main__":
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - 15 is usual: a busy machine starves them
    ray.init(num_cpus=2, include_dashboard=False)
    here = {"plan": os.environ["ASSIGNER_PLAN"], "folder": str(Path(__file__).parent), "file": sys.argv[1]}
    TorchTrainer(
        loop,
        train_loop_config=here,
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(Path(sys.argv[1]).parent / "ray")),
    ).fit()
    ray.shutdown()
