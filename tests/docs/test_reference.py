"""What the pages say of commands, formats, names and variables is what the program has."""

from __future__ import annotations

import re
import sys

import pytest
from markdown_it import MarkdownIt
from pages import ROOT, page_names

import assigner

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import made  # noqa: E402 - the documentation's own script

MADE = [path.name for path in sorted(DOCS.glob("*.md")) if "<!-- made: " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", MADE)
def test_made_pages_are_up_to_date(page: str) -> None:
    """Tables of commands, settings and formats are those of the program: `python docs/made.py` writes them."""
    assert (DOCS / page).read_text(encoding="utf-8") == made.filled(page), "python docs/made.py"


@pytest.mark.parametrize("page", ["docs/lab.md", "examples/clusters/README.md"])
def test_every_cluster_file_is_named(page: str) -> None:
    """Where a page lists the files of examples/clusters, it lists all of them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [path.name for path in (ROOT / "examples" / "clusters").glob("*.toml") if f"`{path.name}`" not in text]


@pytest.mark.parametrize("kind", ["profile", "plan", "trace"])
def test_every_field_of_a_format_has_a_meaning(kind: str) -> None:
    """No field stands in a table without words, and all of the schema's fields are there."""
    from assigner_cli.schema import json_schema

    table = made.file_format(kind)
    assert not [line for line in table.splitlines() if line.endswith("|  |")]
    for field in json_schema(kind)["properties"]:
        assert f"| `{field}` |" in table


def test_the_reference_has_every_public_name() -> None:
    """docs/api.md names each name of `assigner.__all__`, once, and no other."""
    named = re.findall(r"^::: assigner\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(named) == sorted(assigner.__all__)


def test_the_settings_page_has_every_variable() -> None:
    """Each ASSIGNER_ variable that the code names stands on the page."""
    said = (DOCS / "settings.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "assigner").rglob("*.py"), *(ROOT / "cli").glob("*.py")]
    named = {
        name for path in sources for name in re.findall(r"\bASSIGNER_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8"))
    }
    assert {"ASSIGNER_PLAN", "ASSIGNER_HOST"} <= named
    assert not [name for name in named if f"`{name}`" not in said]


@pytest.mark.parametrize("page", page_names())
def test_links_lead_to_files_of_the_repository(page: str) -> None:
    """A reader of the repository can follow each relative link; the site's build checks the anchors."""
    text = (ROOT / page).read_text(encoding="utf-8")
    inline = [each for token in MarkdownIt().enable("table").parse(text) for each in token.children or ()]
    for each in inline:
        target = str(each.attrs.get("href") or each.attrs.get("src") or "")
        path = target.partition("#")[0]
        assert not path or "://" in path or ((ROOT / page).parent / path).exists(), target
