"""What a model's file imports from another one of the user's: an object that counts."""

from __future__ import annotations


class Tracker:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> int:
        self.count += 1
        return self.count


TRACKER = Tracker()
