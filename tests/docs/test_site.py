"""The documentation's site builds without a warning and needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

if not os.environ.get("CI"):  # there nothing else builds the site: what lacks is an error
    for needed in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(needed, reason="pip install -e '.[docs]'")


pytestmark = pytest.mark.long  # to build it takes longer than to look at it


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning, such as for a broken link or anchor, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_warnings(site: Path) -> None:
    """Every page is there, those of the repository's other folders too, and the search index."""
    for name in ("index.html", "api.html", "formats.html", "benchmarks/prediction/index.html", "CHANGELOG.html"):
        assert (site / name).is_file()
    assert "rematerialise" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """No script, style, font or picture of a page has an address outside of the site."""
    loads = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=["'](?:https?:)?//[^"']+""")
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_the_reference_has_the_docstrings(site: Path) -> None:
    """Methods of public classes stand on the page with their arguments."""
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in ("assigner.Pipeline.step", "assigner.Pipeline.save", "assigner.Workload.make_batch"):
        assert f'id="{name}"' in page
    assert "max_norm" in page
