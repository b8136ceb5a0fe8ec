"""Pages of the site that come from files in the repository root, with their links rewritten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation

ROOT = Path(__file__).parents[1]
SOURCES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PAGES = {source: page for page, source in SOURCES.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose source is in the repository root."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=site_links((ROOT / source).read_text(encoding="utf-8"))))
    return files


def on_nav(nav: Navigation, config: Any, files: Files) -> Navigation:
    """Add the link to the plan pages, which `make site` writes above the documentation."""
    nav.items.append(Link("Plans and catalogue", "../index.html"))
    return nav


def site_links(text: str) -> str:
    """Rewrite links of a root file for the site; a link to a file outside docs/ becomes its path."""

    def rewrite(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        if target.startswith(("http://", "https://", "mailto:")):
            return match.group(0)
        if target.startswith("docs/") or target in PAGES:
            return f"{image}[{label}]({PAGES.get(target, target.removeprefix('docs/'))}{anchor or ''})"
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{target} is linked from a page but does not exist")
        return label if label.startswith("`") else f"{label} (`{target}`)"

    return LINK.sub(rewrite, text)
