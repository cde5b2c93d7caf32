"""Make docs/report.png: the HTML report of a sample plan, as Chromium shows it.

    python docs/picture.py [PROGRAM]      chromium unless another program is named

Run it when the report changes. The picture is kept small, so that it can lie in the repository.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZE = "1120,1252"
WAIT_MS = 4000


def main(program: str = "chromium") -> None:
    """Write the picture."""
    plan = str(ROOT / "profiles" / "mixed3-gpt" / "plan.json")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        subprocess.run([sys.executable, "-m", "assigner_cli", "report", plan, "-o", str(page)], check=True)  # noqa: S603
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}"]
        picture = f"--screenshot={ROOT / 'docs' / 'report.png'}"
        command = [program, *flags, f"--virtual-time-budget={WAIT_MS}", picture, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603


if __name__ == "__main__":
    main(*sys.argv[1:])
