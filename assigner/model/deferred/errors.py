"""What a builder does that cannot be replayed, before its line is known."""

from __future__ import annotations

from assigner.errors import AssignerError


class BuilderError(AssignerError):
    """The builder does what cannot be replayed.

    Args:
        message: What it does, as in "the model's builder ... at LINE".
        hint: What to do instead.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
