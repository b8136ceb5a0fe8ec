"""A served page as a static file: links lead to other files, and nothing needs a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from html.parser import HTMLParser

from meshwright.web.assets import assets

VOID = frozenset(("input", "meta", "link", "br", "hr", "img"))


def as_file(
    page: str, at: str, files: Mapping[str, str], inlined: Callable[[str], str] = str, root: str | None = None
) -> str:
    """Return a page as a static file. `files` maps URLs to files; `inlined` returns parts that are loaded later.

    Links are relative to the page, or start with `root` where a page is shown at any address. Styles, and the script
    that sets the colors before anything is drawn, are in the page: its first paint waits for no other file. Elements
    with `data-served` need a server and are left out; hidden ones with `data-static="URL"` are shown if `files` has the
    URL.
    """
    parser = _Page(root if root is not None else "../" * at.count("/"), files, inlined)
    parser.feed(page)
    parser.close()
    return "".join(parser.out)


def _asks_server(tag: str, attributes: Mapping[str, str]) -> bool:
    """Return whether a tag loads or configures htmx, which has nothing to request here."""
    return (tag == "script" and "/htmx" in attributes.get("src", "")) or attributes.get("name") == "htmx-config"


def _inlined_asset(tag: str, attributes: Mapping[str, str]) -> str:
    """Return a style sheet or script that blocks the first paint as a part of the page; empty for other tags."""
    place = attributes.get("href" if tag == "link" else "src", "").partition("?")[0]
    name = place.removeprefix("/static/")
    if tag == "link" and attributes.get("rel") == "stylesheet" and name in assets():
        return f"<style>{_without_comments(assets()[name].content.decode())}</style>"
    if tag == "script" and name in assets() and not {"defer", "async"} & attributes.keys():
        return f"<script>{assets()[name].content.decode().strip()}"
    return ""


def _without_comments(style: str) -> str:
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)).strip()


class _Page(HTMLParser):
    """Rewrites a page tag by tag."""

    def __init__(self, up: str, files: Mapping[str, str], inlined: Callable[[str], str]) -> None:
        super().__init__(convert_charrefs=False)
        self.up, self.files, self.inlined = up, files, inlined
        self.out: list[str] = []
        self.ends: list[tuple[str, str]] = []  # open tags: name, and the text at their end
        self.left_out = 0  # open tags inside an omitted part

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Write one tag."""
        if self.left_out:
            self.left_out += tag not in VOID
            return
        attributes = {name: value or "" for name, value in attrs}
        filtering = tag == "div" and attributes.get("class") == "field check"  # filters that need a server
        if filtering or "data-served" in attributes or self._is_absent(attributes):
            self.left_out = 1
            return
        if _asks_server(tag, attributes):
            self.left_out = int(tag not in VOID)
            return
        if tag == "a" and attributes.get("href", "").startswith("/") and self._link(attributes["href"]) is None:
            self._open(tag, "<span>", "</span>")
            return
        self._open(tag, _inlined_asset(tag, attributes) or self._written(tag, attrs), f"</{tag}>")
        if tag == "div" and "hx-get" in attributes:
            self.out += [self.inlined(attributes["hx-get"]), "</div>"]
            self.ends.pop()
            self.left_out = 1

    def _is_absent(self, attributes: Mapping[str, str]) -> bool:
        """Return whether a tag is only for sites that have a page, and this one has not."""
        return "data-static" in attributes and self._link(attributes["data-static"]) is None

    def _open(self, tag: str, text: str, end: str) -> None:
        self.out.append(text)
        if tag not in VOID:
            self.ends.append((tag, end))

    def _written(self, tag: str, attrs: list[tuple[str, str | None]]) -> str:
        names = [name for name, _ in attrs]
        filters = tag == "form" and ("id", "find") in attrs
        places = [value or "" for name, value in attrs if name in ("href", "src")]
        only_static = "data-static" in names
        if (
            not (filters or only_static)
            and not any(name.startswith("hx-") for name in names)
            and not any(p[:1] == "/" for p in places)
        ):
            return self.get_starttag_text() or ""
        kept = [(name, self._value(name, value)) for name, value in attrs if not name.startswith("hx-")]
        if only_static:
            kept = [one for one in kept if one[0] not in ("hidden", "data-static")]
        if filters:
            kept = [*(one for one in kept if one[0] not in ("action", "method")), ("data-filter", None)]
        attributes = [name if value is None else f'{name}="{escape(value)}"' for name, value in kept]
        return f"<{' '.join([tag, *attributes])}>"

    def _value(self, name: str, value: str | None) -> str | None:
        if name in ("href", "src") and value and value.startswith("/"):
            return self._link(value)
        return value

    def _link(self, address: str) -> str | None:
        address, hash_sign, fragment = address.partition("#")
        path, _, query = address.partition("?")
        if path.startswith("/static/"):
            return self.up + path[1:]
        found = self.files.get(address) or (self.files.get(path) if not query else None)
        return None if found is None else f"{self.up}{found}{hash_sign}{fragment}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Write a self-closing tag, as in SVG."""
        if not self.left_out:
            self.out.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        """Write the end of a tag."""
        if self.left_out:
            self.left_out -= 1
            return
        if self.ends and self.ends[-1][0] == tag:
            self.out.append(self.ends.pop()[1])
        else:
            self.out.append(f"</{tag}>")
        if tag == "head":
            self.out.insert(-1, f'<script src="{self.up}static/filter.js" defer></script>\n')

    def _copy(self, text: str) -> None:
        if not self.left_out:
            self.out.append(text)

    def handle_data(self, data: str) -> None:
        """Write text."""
        self._copy(data)

    def handle_entityref(self, name: str) -> None:
        """Write a named character."""
        self._copy(f"&{name};")

    def handle_charref(self, name: str) -> None:
        """Write a numbered character."""
        self._copy(f"&#{name};")

    def handle_decl(self, decl: str) -> None:
        """Write the document type."""
        self._copy(f"<!{decl}>")
