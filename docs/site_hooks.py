"""Pages of the site that come from files in the repository root, with their links rewritten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # mkdocs loads this file; tests read it where mkdocs is not installed
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation

ROOT = Path(__file__).parents[1]
SOURCES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PAGES = {source: page for page, source in SOURCES.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose source is in the repository root."""
    from mkdocs.structure.files import File

    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=site_links((ROOT / source).read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links of a page to files of the repository outside docs/."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def rewrite(match: re.Match[str]) -> str:
        _, label, target, _ = match.groups()
        place = (folder / target).resolve()
        if not target.startswith("../") or not place.is_relative_to(ROOT) or place.is_relative_to(ROOT / "docs"):
            return match.group(0)
        if not place.exists():
            raise FileNotFoundError(f"{target} is linked from {page.file.src_uri} but does not exist")
        path = place.relative_to(ROOT).as_posix()
        return f"`{path}`" if path.startswith(label) else f"{label} (`{path}`)"

    return LINK.sub(rewrite, markdown) if page.file.src_uri not in SOURCES else markdown


def on_nav(nav: Navigation, config: Any, files: Files) -> Navigation:
    """Add the link to the plan pages, which `make site` writes above the documentation."""
    from mkdocs.structure.nav import Link

    nav.items.append(Link("Plans and catalogue", "../index.html"))
    return nav


def site_links(text: str) -> str:
    """Rewrite links of a root file for the site; a link to a file outside docs/ becomes its path."""

    def rewrite(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        if image and target.startswith(("http://", "https://")):
            return ""  # a badge: the site loads nothing from other hosts
        if target.startswith(("http://", "https://", "mailto:")):
            return match.group(0)
        if target.startswith("docs/") or target in PAGES:
            return f"{image}[{label}]({PAGES.get(target, target.removeprefix('docs/'))}{anchor or ''})"
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{target} is linked from a page but does not exist")
        return label if label.startswith("`") else f"{label} (`{target}`)"

    return LINK.sub(rewrite, text)
