"""Marking: from a model's own forward to a graph of partitions."""

from __future__ import annotations

from assigner.marking.cut import partition_graph
from assigner.marking.graph import PartitionGraph, Piece, Value
from assigner.marking.marks import Mark, find_marks, partition

__all__ = ["Mark", "PartitionGraph", "Piece", "Value", "find_marks", "partition", "partition_graph"]
