"""Explains terms where they stand: on every page, the first use of a term in a section links to its meaning."""

from __future__ import annotations

import re
from functools import cache

from markupsafe import Markup, escape

from meshwright.api.terms import IN_SENTENCES, meanings

LINK = Markup('<a class="term" href="/glossary#{}" data-meaning="{}">{}</a>')
TAG = re.compile(r"(<[^>]*>)")  # templates and escaped values have no > inside an attribute
UNTOUCHED = frozenset(
    ("a", "button", "code", "data", "h1", "label", "option", "pre", "script", "select", "style", "summary", "svg")
) | {"textarea"}
"""Elements whose text is no prose, or that may not contain a link; data-plain is for other elements like these."""
WHOLE = frozenset(("dt", "figcaption", "h2", "h3", "legend", "li", "span", "th"))
"""Elements that are marked if a term is all of their text: words such as plan or other are terms only there."""
SECTIONS = frozenset(("form", "nav", "section"))
VOID = frozenset(("br", "hr", "img", "input", "link", "meta", "wbr"))


def term_link(name: str, label: str = "") -> Markup | str:
    """Return a term as a link with its meaning; the text alone if it is no term."""
    text = meanings().get(name)
    return LINK.format(name, text, label or name) if text else label or name


@cache
def _in_sentences() -> re.Pattern[str]:
    words = sorted((re.escape(one).replace("_", "[ _]") for one in IN_SENTENCES), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])({'|'.join(words)})(?![\w=/]|-\w|\.\w)", re.IGNORECASE)


def _name(text: str) -> str:
    return text.strip().lower().replace(" ", "_")


def explained(page: str) -> str:
    """Return a page whose terms are links to their meaning, each once in a section."""
    start, end = page.find("<main"), page.rfind("</main>")
    if start < 0 or end < 0:
        return page
    marked = _Marker()
    parts = TAG.split(page[start:end])
    return page[:start] + "".join(map(marked.part, range(len(parts)), parts)) + page[end:]


class _Marker:
    """Goes through a page part by part: even ones are text, odd ones tags."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.untouched = 0  # open elements inside one whose text stays
        self.seen: set[str] = set()

    def part(self, number: int, text: str) -> str:
        """Return one part, with terms marked if it is text."""
        if number % 2:
            self._tag(text)
            return text
        return text if self.untouched or not text.strip() else self._marked(text)

    def _tag(self, text: str) -> None:
        name = re.split(r"[\s/>]", text.lstrip("</"), maxsplit=1)[0].lower()
        if text.startswith("</"):
            if name in self.open:
                while self.open.pop() != name:
                    pass
            self.untouched -= self.untouched > 0
        elif name not in VOID and not text.endswith("/>"):
            self.untouched += bool(self.untouched) or name in UNTOUCHED or " data-plain" in text
            self.open.append(name)
        if name in SECTIONS:
            self.seen = set()
        if found := re.match(r'<a class="term" href="/glossary#([^"]+)"', text):
            self.seen.add(found[1])

    def _marked(self, text: str) -> str:
        parent, name = self.open[-1] if self.open else "", _name(text)
        if parent in WHOLE and name in meanings():
            return text.replace(text.strip(), self._link(name, text.strip()))
        return _in_sentences().sub(lambda found: self._link(_name(found[1]), found[1]), text)

    def _link(self, name: str, label: str) -> str:
        if name in self.seen:
            return label
        self.seen.add(name)
        return LINK.format(escape(name), meanings()[name], Markup(label))  # the label is escaped already
