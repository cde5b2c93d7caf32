"""What is validated: models on clusters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One model on one set of workers.

    Args:
        model: For the tables.
        entry: The workload.
        cluster: A file of examples/clusters without its ending; empty: plain local ranks.
        ranks: How many workers.
        steps: Steps of one run, the nine that warm up among them.
        busy: Of so many cores another program takes its part while the plans are trained.
        plans: The plans by name; empty: all.
    """

    model: str
    entry: str
    cluster: str = ""
    ranks: int = 2
    steps: int = 17
    busy: float = 0.0
    plans: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The case as one word."""
        return f"{self.cluster or ('busy' if self.busy else 'local')}-{self.model}"


MODELS = {
    "gpt": "examples/gpt.py:workload(width=192,context=64,blocks=10)",
    "resnet": "examples/resnet.py:workload(width=24)",
    "unet": "examples/unet.py:workload(width=16)",
    "clicks": "examples/clicks.py:workload(width=192)",
}

CASES = (
    *(Case(model, entry, steps=21) for model, entry in MODELS.items()),
    *(Case(model, entry, "mixed3", 3) for model, entry in MODELS.items()),
    Case("gpt", MODELS["gpt"], "racks4", 4),
    Case("clicks", MODELS["clicks"], "racks4", 4),
    Case("gpt", "examples/gpt.py:workload(width=384,context=128,blocks=8)", "smallmem3", 3, steps=13),
    Case("resnet", MODELS["resnet"], "ladder5", 5),
    Case("gpt", MODELS["gpt"], "thinwires4", 4),
    Case("gpt", MODELS["gpt"], steps=21, busy=0.5, plans=("solved", "one worker a stage", "interleaved")),
)
