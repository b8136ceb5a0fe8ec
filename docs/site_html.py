"""HTML of the documentation site: sized pictures with a small version, and names that screen readers need."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:  # mkdocs loads this file; tests read it where mkdocs is not installed
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

SMALL = 720  # px: the text column of the theme, and a phone's at 1.75 device pixels
COLUMN = f"(max-width: {SMALL + 40}px) calc(100vw - 32px), {SMALL}px"
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^":]+\.png)"\s*/?>')
ADDED = "-small.webp"


def on_files(files: Files, config: Any) -> Files:
    """Add a small version of every picture."""
    from mkdocs.structure.files import File

    for one in [one for one in files if one.src_uri.endswith(".png") and one.abs_src_path]:
        name = one.src_uri.removesuffix(".png") + ADDED
        files.append(File.generated(config, name, content=small(Path(str(one.abs_src_path)))))
    return files


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Write the size of every picture, and offer its small version."""
    shown = [one for one in files if one.src_uri.endswith(".png") and one.abs_src_path]
    sizes = {one.src_uri: size_of(Path(str(one.abs_src_path))) for one in shown}
    html = html.replace("<th></th>", "<td></td>")  # a heading without text is none
    return with_sizes(html, str(PurePosixPath(page.file.src_uri).parent), sizes)


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Name the theme's search dialog, which a screen reader announces."""
    search = 'data-md-component="search" role="dialog"'
    return output.replace(search, f'{search} aria-label="Search"')


def with_sizes(html: str, folder: str, sizes: Mapping[str, tuple[int, int]]) -> str:
    """Return a page's HTML with sized pictures: the first is wanted at once, the others when they come into sight."""
    first = True

    def rewrite(match: re.Match[str]) -> str:
        nonlocal first
        alt, source = match.groups()
        width, height = sizes[_joined(folder, source)]
        when = 'fetchpriority="high"' if first else 'loading="lazy" decoding="async"'
        first = False
        few = f"{source.removesuffix('.png')}{ADDED}"
        return (
            f'<a href="{source}"><img alt="{alt}" src="{few}" '
            f'srcset="{few} {SMALL}w, {source} {width}w" sizes="{COLUMN}" width="{width}" height="{height}" {when}></a>'
        )

    return PICTURE.sub(rewrite, html)


def small(path: Path) -> bytes:
    """Return a picture in the width of a text column, as WebP."""
    out = io.BytesIO()
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
        picture.thumbnail((SMALL, SMALL * picture.height // picture.width + 1))
        picture.save(out, "WEBP", quality=60, method=6)
    return out.getvalue()


def size_of(path: Path) -> tuple[int, int]:
    """Return the width and height of a picture."""
    with Image.open(path) as opened:
        return opened.size


def _joined(folder: str, source: str) -> str:
    parts = [one for one in folder.split("/") if one not in ("", ".")]
    for one in source.split("/"):
        if one == "..":
            parts.pop()
        else:
            parts.append(one)
    return "/".join(parts)
