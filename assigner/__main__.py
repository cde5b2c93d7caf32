"""`python -m assigner`: the same as the `assigner` script."""

from __future__ import annotations

from assigner_cli import main

if __name__ == "__main__":
    main()
