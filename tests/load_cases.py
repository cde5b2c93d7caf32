"""Small random load problems in every convention, and their optimum by trying everything."""

from __future__ import annotations

import itertools
import math
import random

from load import (
    DeviceClass,
    LoadProblem,
    Node,
    Option,
    Output,
    Stage,
    Transfer,
    evaluate,
)

CONVENTIONS = ("dnn-partitioning", "piper", "pipedream", "replicas")


def random_problem(convention: str, seed: int, *, nodes: int = 5) -> LoadProblem:
    """A small problem; costs are such that transfers and memory matter."""
    rng = random.Random(f"{convention} {seed}")
    names = range(nodes)
    edges = [(u, v) for u, v in itertools.combinations(names, 2) if rng.random() < 0.45]
    targets = {u: tuple(v for a, v in edges if a == u) for u in names}
    classes = 1 if convention == "piper" else 2
    seconds = [tuple(float(rng.randint(0, 6)) * (1 + 2 * c) for c in range(classes)) for _ in names]

    def cost() -> float:
        return rng.randint(0, 8) / 4

    if convention == "dnn-partitioning":
        backward = [
            Output(v, tuple(u for u, a in edges if a == v), cost()) for v in names if any(a == v for _, a in edges)
        ]
        return LoadProblem(
            nodes=tuple(
                Node(
                    str(n), (Option("as is", seconds[n], fixed=rng.randint(0, 3)),), rng.choice([None, None, None, "a"])
                )
                for n in names
            ),
            outputs=(*(Output(u, targets[u], cost()) for u in names if targets[u]), *backward),
            order=tuple(edges),
            devices=(DeviceClass("accelerator", 2, rng.choice([4, 6, 20])), DeviceClass("cpu", 1, pays=False)),
            transfer=Transfer("added"),
        )
    if convention == "piper":
        return LoadProblem(
            nodes=tuple(
                Node(
                    str(n),
                    (
                        Option("vanilla", seconds[n], stored=rng.randint(1, 4), fixed=rng.randint(0, 2)),
                        Option("again", (seconds[n][0] + rng.randint(0, 2),), stored=rng.randint(0, 1), fixed=1),
                    ),
                )
                for n in names
            ),
            outputs=tuple(Output(u, (v,), cost()) for u, v in edges),
            order=tuple(edges),
            devices=(DeviceClass("device", 3, rng.choice([8, 12, 20])),),
            transfer=Transfer("added", factor=0.5),
            from_end=True,
        )  # fmt: skip
    return LoadProblem(
        nodes=tuple(Node(str(n), (Option("as is", seconds[n]),), sync=rng.randint(0, 4)) for n in names),
        outputs=tuple(Output(u, targets[u], 2 * cost()) for u in names if targets[u]),
        order=tuple(edges),
        devices=(DeviceClass("fast", 2), DeviceClass("slow", 1)),
        transfer=Transfer("relayed"),
        replicas=2 if convention == "replicas" else 1,
    )


def best_by_trying(problem: LoadProblem) -> float:
    """The optimum: every device for every node, every order of devices, every choice of options and replicas."""
    devices = [
        (c, r)
        for c, device in enumerate(problem.devices)
        for r in range(1, problem.replicas + 1)
        for _ in range(device.count)
    ]
    count = problem.device_count
    lines = set(itertools.permutations(devices, count)) if problem.contiguous else {tuple(devices)}
    best = math.inf
    for line in lines:
        for at in itertools.product(range(count), repeat=len(problem.nodes)):
            if problem.contiguous and any(at[u] > at[v] for u, v in problem.order):
                continue
            for options in itertools.product(*(range(len(node.options)) for node in problem.nodes)):
                stages = []
                for d, (c, r) in enumerate(line):
                    held = tuple(n for n, device in enumerate(at) if device == d)
                    if held:
                        stages.append(Stage(c, held, tuple(options[n] for n in held), r))
                best = min(best, evaluate(problem, stages).value)
    return best
