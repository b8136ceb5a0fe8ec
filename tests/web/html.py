"""A page read strictly: every tag closed, every id once, nothing that the content security policy would refuse."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

VOID = frozenset(("area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"))
ADDRESSES = ("href", "src", "action", "hx-get", "hx-post", "formaction", "data", "poster", "xlink:href", "srcset")


class Page(HTMLParser):
    """What a page says: its numbers, its ids, its addresses, and what is wrong with its form."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.numbers: dict[str, float] = {}
        self.addresses: list[str] = []
        self.labelled: set[str] = set()
        self.inputs: list[tuple[str, dict[str, str | None]]] = []
        self.referred: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> is not closed" for tag in self._open]
        self.wrong += [f"id {one} is there twice" for one in set(self.ids) if self.ids.count(one) > 1]
        self.wrong += [f"{one} refers to nothing" for one in self.referred if one not in self.ids]
        for name, said in self.inputs:
            if said.get("id") not in self.labelled and "aria-label" not in said and "label" not in name:
                self.wrong.append(f"{name} without a label")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        if len(said) != len(attrs):
            self.wrong.append(f"<{tag}> says an attribute twice")
        self._judge(tag, said)
        if said.get("id"):
            self.ids.append(str(said["id"]))
        if tag == "data" and said.get("data-of"):
            self.numbers[str(said["data-of"])] = float(str(said["value"]))
        if tag == "label" and said.get("for"):
            self.labelled.add(str(said["for"]))
        if tag in ("input", "select", "textarea") and said.get("type") != "hidden":
            self.inputs.append(("label>" * ("label" in self._open) + tag, said))
        for name in ("aria-labelledby", "aria-describedby", "aria-controls", "for", "list"):
            self.referred += (said.get(name) or "").split()
        if tag not in VOID:
            self._open.append(tag)

    def _judge(self, tag: str, said: dict[str, str | None]) -> None:
        for name, value in said.items():
            if name == "style" or name.startswith(("on", "hx-on")):
                self.wrong.append(f"<{tag}> has {name}")
            if name in ADDRESSES and not (tag == "data" and name == "value"):
                self.addresses.append(value or "")
                if not (value or "").startswith(("/", "#")) or (value or "").startswith("//"):
                    self.wrong.append(f"<{tag} {name}={value}> leaves the site")
        if tag == "script" and "src" not in said and said.get("type") != "application/json":
            self.wrong.append("a script in the page")
        if tag == "style":
            self.wrong.append("a style in the page")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.wrong.append(f"</{tag}> closes {self._open[-1:] or 'nothing'}")
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        self.text += data


def at(answer: Any, path: str) -> Any:
    """The value at a dotted path of an answer."""
    for name in path.split("."):
        answer = answer[int(name)] if isinstance(answer, list) else answer[name]
    return answer
