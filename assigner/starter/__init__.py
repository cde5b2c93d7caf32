"""The first workload file of a new user: what is known of a model, written down as Python with comments."""

from __future__ import annotations

from assigner.starter.draft import Code, Draft, Mark, Output, Tensor
from assigner.starter.example import EXAMPLE
from assigner.starter.text import RESERVED, workload_text

__all__ = ["EXAMPLE", "RESERVED", "Code", "Draft", "Mark", "Output", "Tensor", "workload_text"]
