"""A hook of the site's build: the repository's own pages become part of it.

A page here names `../benchmarks/trace/README.md`, as a reader of the repository has it. The site holds these files
below the same paths, so that only the `../` goes; links to other files of the repository are left as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
TAKEN = ("benchmarks/**/*.md", "examples/**/*.md", "profiles/*.md", "CHANGELOG.md", "CONTRIBUTING.md")
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def taken() -> dict[str, Path]:
    """The repository's pages, by their address in the site."""
    found = sorted(path for pattern in TAKEN for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix(): path for path in found}


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's pages."""
    for address, path in taken().items():
        files.append(File.generated(config, address, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - the hook's form
    """Links into the repository: to its pages within the site; to other files, the text alone."""
    known = taken()
    address = page.file.src_uri
    own = address in known
    folder = (ROOT / address).parent if own else ROOT / "docs"

    def rewritten(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        place = (folder / target).resolve()
        if not place.is_relative_to(ROOT):
            return found[0]
        inside = place.relative_to(ROOT).as_posix()
        if place.is_dir() and f"{inside}/README.md" in known:
            inside += "/README.md"
        inside = inside.removeprefix("docs/")
        if inside in known or (ROOT / "docs" / inside).exists():
            up = "../" * (address.count("/"))
            return f"[{text}]({up}{inside}{anchor})"
        return text if place.exists() else found[0]

    return _LINK.sub(rewritten, markdown)
