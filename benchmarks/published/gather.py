"""The three files of the benchmark, from a clone of the authors' repository.

    git clone https://github.com/eth-easl/sailor && git -C sailor checkout cf2c8e3c
    python benchmarks/published/gather.py sailor FOLDER

Nothing is computed: their files are merged and cut down to one model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MODEL, ZONE = "OPT-350", "us-central1-a"
PLANS = {"rtx-plans.json": "mit", "gh200-plans.json": f"clariden/{MODEL}"}
GPUS = ("RTX-2080", "RTX-3090", "Titan-RTX", "GH-96")


def profile(clone: Path) -> dict[str, Any]:
    """Layers, seconds and links of the model's GPUs."""
    planner = clone / "sailor" / "Planner"
    layers = json.loads((planner / "llm_info.json").read_text())[MODEL]
    seconds = json.loads((planner / "simulations" / "profiles_tmp.json").read_text())[MODEL]
    links = json.loads((clone / "sailor" / "providers" / "multizone_bandwidths_het.json").read_text())[ZONE]
    return {
        "model": MODEL,
        "layers": _by_degree(layers),
        "seconds": {gpu: {rows: _by_degree(found) for rows, found in seconds[gpu].items()} for gpu in GPUS},
        "link": {
            gpu: {
                count: {other: each[count][0] for other, each in to[ZONE].items() if other in GPUS and count in each}
                for count, to in links[gpu].items()
                if ZONE in to
            }
            for gpu in GPUS
        },
    }


def _by_degree(found: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """By tensor-parallel degree, the layers in order."""
    return {degree: [layers[str(n)] for n in range(len(layers))] for degree, layers in found.items()}


def plan(path: Path) -> dict[str, Any]:
    """One plan with what was measured."""
    document = json.loads(path.read_text())
    (pipeline,) = document["pipeline_list"]
    return {
        "name": path.stem.removeprefix("plan_config_"),
        "micro_batch_size": document["mbs"],
        "global_batch_size": document["gbs"],
        "stages": [
            {
                "layers": [layers[0], layers[-1]],
                "layer_count": len(layers),
                "replicas": [
                    {"gpu": hosts[0][0], "gpus": hosts[0][1], "tensor_parallel": degree} for hosts, degree in replicas
                ],
            }
            for layers, replicas in zip(pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True)
        ],
        "measured_step_s": document["real"],
        "measured_all_reduce_s": document["red_grads"],
        "measured_peak_bytes": document["max_mem"],
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "opt350-profile.json").write_text(json.dumps(profile(args.clone)))
    for file, place in PLANS.items():
        found = sorted(
            (args.clone / "sailor" / "Planner" / "simulations" / "validation" / place).rglob("plan_config_*.json")
        )
        (args.folder / file).write_text(json.dumps([plan(path) for path in found], indent=1))


if __name__ == "__main__":
    main()
