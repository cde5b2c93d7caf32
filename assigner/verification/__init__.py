"""Does a model that is cut into partitions compute what it computes as it is? Asked before anything is measured."""

from __future__ import annotations

from assigner.verification.checking import check_model

__all__ = ["check_model"]
