"""Plans in the forms of other tools: one module a format. Pure functions from a plan and its profile to a text."""

from __future__ import annotations

from assigner.export.device_map import device_map
from assigner.export.exported import Exported
from assigner.export.graphviz import partition_drawing
from assigner.export.pipelining import module_names, schedule_csv
from assigner.export.torchgpipe import balance

__all__ = ["Exported", "balance", "device_map", "module_names", "partition_drawing", "schedule_csv"]
