"""`python -m assigner_cli`: the same as the `assigner` script."""

from __future__ import annotations

from .app import app

if __name__ == "__main__":
    app(prog_name="assigner")
