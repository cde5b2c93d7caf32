"""`python -m assigner_cli`: the same as the `assigner` script."""

from __future__ import annotations

from . import main

if __name__ == "__main__":
    main()
